"""Where torch's compiler keeps its code."""

import os
import shutil

import pytest

from jobkit.errors import UsageError
from jobkit.payload.model import build_model
from jobkit.payload.place import RankEnv
from jobkit.payload.strategies.local import Single
from jobkit.spec.runspec import RunSpec

torch = pytest.importorskip("torch")


def test_the_compilers_cache_is_a_folder_of_ones_own(tmp_path, monkeypatch) -> None:
    """Torch's default in /tmp anybody can make first, and leave pickles there."""
    spec = RunSpec(strategy="single", model="mlp", device="cpu", compile=True)

    def setup() -> None:
        Single(spec, RankEnv(), torch.device("cpu")).setup(build_model(spec, 10))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    setup()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    setup()
    own = tmp_path / f"jobkit-{os.geteuid()}"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{own}/torchinductor"
    assert own.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(own)
    own.symlink_to(tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(UsageError, match="is a link: remove it"):
        setup()
