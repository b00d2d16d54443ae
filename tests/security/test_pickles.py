"""Pickles that somebody else made: CIFAR-10's batches and the index of a checkpoint."""

import contextlib
import io
import pickle
import pickletools
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobkit.errors import UsageError
from jobkit.payload.data import cifar10
from jobkit.payload.unpickle import restricted_load

numpy = pytest.importorskip("numpy")
NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def batch(rows: int = 2) -> bytes:
    """A batch in the form of the published ones."""
    pixels = numpy.zeros((rows, 3072), dtype=numpy.uint8)
    return pickle.dumps({b"data": pixels, b"labels": [0] * rows}, protocol=2)


def folder_with(root: Path, content: bytes) -> Path:
    """CIFAR-10's folder, one batch of which is this."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).write_bytes(batch())
    (folder / "data_batch_1").write_bytes(content)
    return root


def array(dtype: bytes, shape: bytes, data: bytes, dtype_state: bytes = b"") -> bytes:
    """A batch whose array has this dtype, shape and content, as opcodes."""
    return (
        b"\x80\x02}(C\x04data"
         b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
         b"(K\x01" + shape
        + b"cnumpy\ndtype\n(" + dtype + b"K\x00K\x01tR" + dtype_state
        + b"\x89B" + len(data).to_bytes(4, "little") + data + b"tb"
        + b"C\x06labels]K\x00au."
    )  # fmt: skip


# A structured type that hides an object field behind its flags, and takes them back afterwards.
HIDDEN_OBJECT = (
    b"(K\x03C\x01|NC\x01f\x85}C\x01fcnumpy\ndtype\n(C\x02O8K\x00K\x01tRK\x00\x86sK\x08K\x01K\x00tb"
)
ADDRESS = b"A" * 8
ROW = b"(K\x01M\x00\x0ct"  # the shape (1, 3072)
HOSTILE = {
    "hidden object": array(b"C\x02V8", b"(K\x01K\x01t", ADDRESS, HIDDEN_OBJECT),
    "objects": array(b"C\x01O", b"(K\x01K\x01t", ADDRESS),
    "object bytes": array(b"C\x02O8", ROW, bytes(3072)),
    "negative": array(b"C\x02u1", b"(J\xff\xff\xff\xffM\x00\x0ct", b""),
    "huge": array(b"C\x02u1", b"(J\x00\xe1\xf5\x05J\x00\xe1\xf5\x05t", b""),
    "short": array(b"C\x02u1", ROW, bytes(3071)),
    "long": array(b"C\x02u1", ROW, bytes(3073)),
    "a shape of one": array(b"C\x02u1", b"(M\x00\x0ct", bytes(3072)),
    "a shape of bools": array(b"C\x02u1", b"(\x88M\x00\x0ct", bytes(3072)),
    "labels that are none": batch().replace(b"K\x00", b"K\x0b"),
    "ndarray called": b"\x80\x02cnumpy\nndarray\nJ\x00\xe1\xf5\x05J\x10'\x00\x00\x86\x85R.",
    "a big bytearray": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a big memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a big text": b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",
    "a deep tuple that is hashed": b"\x80\x02}" + b")" + b"\x85" * 500_000 + b"K\x00s.",
    "deep tuples in turn": b"\x80\x02}" + b")" + b"(t\x86" * 3 + b"K\x00s.",
    "a class changed": b"ccodecs\nencode\n(N}V__eq__\nK\x00stb.",
    "a stand-in changed": b"cnumpy\ndtype\n(N}V__init__\nK\x00stb.",
    "os.system": pickle.dumps({"x": print}, 0),
    "an extension": b"\x80\x02\x82\x01.",
    "persistent": b"Px\n.",
    "another encoding": b"c_codecs\nencode\n(Vx\nVhex\ntR.",
    "no batch": pickle.dumps([1, 2]),
    "empty": b"",
    "no pickle": b"\x00" * 4096,
}


# Reads each folder in a process of its own, which may crash; torch is imported once for all.
READ = """
import os, resource, sys
from pathlib import Path
from jobkit.errors import UsageError
from jobkit.payload.data import cifar10
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            cifar10.read(Path(name), print, download=False)
            os._exit(1)
        except UsageError as error:
            small = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1_500_000
            os._exit(0 if small and "\\n" not in str(error) else 2)
        except BaseException:
            os._exit(3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        print(Path(name).name, code)
"""


def test_hostile_batches_are_refused_in_one_line(tmp_path: Path) -> None:
    """No crash, no other exception, and no memory by numbers of the file."""
    roots = [str(folder_with(tmp_path / kind, HOSTILE[kind])) for kind in HOSTILE]
    words = [sys.executable, "-c", READ, *roots]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def test_what_numpy_would_make_is_never_made(tmp_path: Path, monkeypatch: Any) -> None:
    """Without numpy the published form is read as well, to the same bytes."""
    root = folder_with(tmp_path, batch(3))
    monkeypatch.setitem(sys.modules, "numpy", None)
    train, _, _ = cifar10.read(root, print, download=False)
    assert train.images.shape == (3 + 4 * 2, 32, 32, 3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_changed_batch_is_read_or_refused(data: st.DataObject) -> None:
    """Bytes of a real one are exchanged: the answer is images or UnpicklingError, nothing else."""
    content = bytearray(batch(1)[:120] + batch(1)[-80:])
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(pickle.UnpicklingError, LookupError, TypeError, ValueError):
        cifar10._part(cifar10._unpickle(bytes(content)))


OPCODES = [op.code.encode("latin1") for op in pickletools.opcodes if op.code != "P"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(OPCODES) | st.binary(max_size=3), max_size=30))
def test_any_opcodes_make_plain_values_or_are_refused(parts: list[bytes]) -> None:
    plain = (dict, list, tuple, set, frozenset, str, bytes, int, float, bool, type(None))
    try:
        found = restricted_load(io.BytesIO(b"\x80\x04" + b"".join(parts) + b"."), ())
    except pickle.UnpicklingError:
        return
    assert isinstance(found, plain)


@pytest.mark.parametrize("size", [cifar10._LARGEST_BATCH + 1, 1 << 40])
def test_a_member_that_is_far_too_large_is_not_unpacked(tmp_path: Path, size: int) -> None:
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.size = size
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.fileobj.write(member.tobuf())  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="far too large"):
        cifar10.read(tmp_path, print, download=False)


METADATA = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize("what", ["MetadataIndex", "_MEM_FORMAT_ENCODING", "TensorProperties"])
def test_the_index_of_a_checkpoint_cannot_change_its_classes(what: str) -> None:
    """A pickle may set attributes of what it made; a class is everybody's."""
    from jobkit.payload.checkpoints.store import _INDEX

    content = f"c{METADATA}\n{what}\n(N}}V__eq__\nctorch\nSize\nstb.".encode()
    pytest.importorskip(METADATA)
    before = getattr(sys.modules[METADATA], what).__eq__
    with pytest.raises(pickle.UnpicklingError, match="not its own"):
        restricted_load(io.BytesIO(content), _INDEX)
    assert getattr(sys.modules[METADATA], what).__eq__ == before


def test_a_function_of_the_index_cannot_be_changed() -> None:
    from jobkit.payload.checkpoints.store import _INDEX

    content = b"ctorch.serialization\n_get_layout\n}Vx\nK\x01sb."
    with pytest.raises(pickle.UnpicklingError, match="not its own"):
        restricted_load(io.BytesIO(content), _INDEX)


def test_an_index_of_torchs_own_is_read(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from jobkit.payload.checkpoints.store import _INDEX

    dcp.save({"w": torch.zeros(3, 4), "b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        found = restricted_load(file, _INDEX)
    assert sorted(found.state_dict_metadata) == ["b", "w"]
    assert found.state_dict_metadata["w"].size == torch.Size([3, 4])
