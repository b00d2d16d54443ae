"""Logs as they come from clusters, each with what a reader must find in it, no more and no less."""

import gzip
import json
from dataclasses import dataclass, field
from random import Random

from jobkit.metric import line as metric
from jobkit.metric.line import TAG

RUN_ID = "ddp-n1-g2-b64-fp32-r0-0a1b2c"
_TAG = TAG.encode()
_PREFIXES = (b"", b"", b"3: ", b"12: ", b"[default0]:", b"[rank1]: ", b"\x1b[32m", b"50%|#  |\r")
_PREFIXES += (b"2026-01-01 | ", b"\x00\x00", b"\xff\xfe ")
_ENDS = (b"\n", b"\n", b"\r\n", b"\x1b[0m\n", b" (node7)\n", b"")
_JUNK = (b"epoch 3: fine", b"\x00" * 40, b"\xc3\x28 caf\xe9", b"[MET", b"METRIC] epoch=9")
_JUNK += (b"\x1b[1;31mred\x1b[0m", b'{"v":1,"kind":"epoch","epoch":9}', b"Traceback:", b"", b"\r\r")
_TEXTS = ("fine", "epoch=7 val_loss=0.001", f"{TAG} epoch=8", '"}', '{"epoch":7}', "a\nb", "\x1b[m")
_TEXTS += ("\u00e4\u4e16", "\ufffd", "\ud800", '","crc":"00000000"}', "$(rm -rf /)", "\x00")
# What stands before and at the place where an inner part begins.
_INNER = (b":{", b'"e', b" e", b',"', b"\\n", b"1,", b"u0")


@dataclass
class Log:
    """A log's bytes, the records that are whole in it, and how many tagged places hold none."""

    data: bytes = b""
    own: list[dict] = field(default_factory=list)  # each once, in order
    foreign: list[dict] = field(default_factory=list)
    rejected: int = 0


class Mangler:
    """Writes records into a log and damages it as srun, tee, torchrun, a crash or a disk do."""

    def __init__(self, random: Random) -> None:
        self.random, self.log = random, Log()
        self._attempt = self._seq = 0

    def record(self) -> dict:
        """The next record of the attempt, as a reader has to give it back."""
        pick = self.random
        head = {"v": 1, "kind": "epoch", "study": "s", "run_id": RUN_ID, "attempt": self._attempt}
        head |= {"rank": 0, "seq": self._seq, "t": 1.5}
        self._seq += 1
        if pick.random() < 0.3:
            return {**head, "kind": "message", "level": "info", "text": pick.choice(_TEXTS)}
        values = {"epoch": self._seq, "val_loss": pick.random(), "lr": pick.choice((None, 1e-300))}
        spec = {"spec": {"epoch": 5, "lr": 0.1}} if pick.random() < 0.2 else {}
        return {**head, **values, **spec}

    def whole(self) -> None:
        """A record that nothing touched, somewhere on its line."""
        content = self.record()
        self.log.own.append(content)
        self.log.data += self._prefix() + line(content) + self._end()

    def torn(self) -> None:
        """The beginning of a record; the next one may follow on its line."""
        text = line(self.record())
        cut = self.random.randrange(1, len(text))
        self._spoil(text[:cut], end=self.random.choice((b"\n", b"", b"\x00\x00\n")))

    def damaged(self) -> None:
        """A record from which bytes are missing, or in which some are others."""
        text = line(self.record())
        at = self.random.randrange(len(_TAG), len(text))
        gone = self.random.choice((1, 1, 3, 40, 200))
        other = self.random.choice((b"", b"7", b"\xff", b"\x00", b'"', b"\n", b"\x1b[0m", b"3: "))
        broken = text[:at] + other + text[at + gone :]
        if _same(broken, text):  # only the space after the tag is gone, or a colour is between
            self.torn()
        else:
            self._spoil(broken, end=b"\n")

    def inner(self) -> None:
        """A record of which only an inner part is left, which looks like a record or like pairs."""
        text = line(self.record())
        starts = [i for i in range(len(_TAG) + 2, len(text)) if text[i - 1 : i + 1] in _INNER]
        at = self.random.choice(starts)
        self._spoil(_TAG + self.random.choice((b"", b" ")) + text[at:], end=b"\n")

    def nameless(self) -> None:
        """A record that has lost its version and its checksum, and is JSON still."""
        text = line(self.record()).replace(b'"v":1,', b"")
        self._spoil(text[:-18] + b"}", end=b"\n")

    def spliced(self) -> None:
        """Two ranks' lines, the one inside the other: the inner one is whole."""
        outer, content = line(self.record()), self.record()
        at = self.random.randrange(len(_TAG), len(outer) - 1)
        self.log.own.append(content)
        self.log.rejected += 1
        end = self.random.choice((b"\n", b""))
        self.log.data += outer[:at] + self._prefix() + line(content) + end + outer[at:] + b"\n"

    def foreign(self) -> None:
        """A line of a script that is not ours."""
        epoch, loss = len(self.log.foreign), self.random.random()
        content = {"epoch": epoch, "val_loss": loss, "tag": "x"}
        text = self.random.choice((json.dumps(content), f'epoch={epoch} val_loss={loss} tag="x"'))
        self.log.foreign.append(content)
        end = self.random.choice((b"\n", b"\r\n", b"\x1b[0m\n"))
        self.log.data += self._prefix() + _TAG + b" " + text.encode() + end

    def quoted(self) -> None:
        """A line of another script that has the tag in a text."""
        content = {"epoch": len(self.log.foreign), "note": f"a {TAG} epoch=99 line"}
        self.log.foreign.append(content)
        self.log.data += _TAG + json.dumps(content).encode() + b"\n"

    def foreign_torn(self) -> None:
        """A line of another script that ends in a word, where a record begins."""
        text = b" epoch=99 val_loss=0.123456789"
        content = self.record()
        self.log.own.append(content)
        self._spoil(_TAG + text[: self.random.randrange(2, len(text))].rstrip(), end=b"")
        self.log.data += line(content) + b"\n"

    def junk(self) -> None:
        """Text that has nothing to do with records."""
        self.log.data += b"\n" + self.random.choice(_JUNK) + b"\n"

    def empty(self) -> None:
        """A tag with nothing behind it that could be a record."""
        text = self.random.choice((b"", b" epoch", b" {}", b" []", b" {", b' "v":1', b" =3"))
        self._spoil(_TAG + text, end=b"\n")

    def requeue(self) -> None:
        """Another attempt goes on in the same file."""
        self._attempt, self._seq = self._attempt + 1, 0
        self.log.data += b"\n[jobkit] start\n"

    def _prefix(self) -> bytes:
        return self.random.choice(_PREFIXES)

    def _end(self) -> bytes:
        return self.random.choice(_ENDS)

    def _spoil(self, text: bytes, end: bytes) -> None:
        self.log.rejected += text.count(_TAG)
        self.log.data += text + end


_WEIGHTS = {"whole": 6, "torn": 2, "damaged": 3, "spliced": 1, "foreign": 2, "junk": 2, "empty": 1}
_WEIGHTS |= {"requeue": 1, "inner": 2, "nameless": 1, "quoted": 1, "foreign_torn": 1}


def mangled(seed: int, pieces: int) -> Log:
    """A log of so many pieces; the same seed gives the same log."""
    random = Random(seed)
    mangler = Mangler(random)
    for name in random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=pieces):
        getattr(mangler, name)()
    log = mangler.log
    log.data += b"\n"
    return log


def doubled(log: Log) -> Log:
    """The log with all of it once more, as two tees into one file leave it."""
    return Log(log.data * 2, log.own, log.foreign, log.rejected * 2)


def labelled(log: Log, label: bytes) -> Log:
    """The log as srun -l or torchrun prints it: a prefix before every line."""
    body = log.data[:-1].replace(b"\n", b"\n" + label)
    return Log(label + body + b"\n", log.own, log.foreign, log.rejected)


def packed(log: Log) -> bytes:
    """The log as gzip, in two members."""
    half = len(log.data) // 2
    return gzip.compress(log.data[:half], 1) + gzip.compress(log.data[half:], 1)


def line(content: dict) -> bytes:
    """A record as the writer prints it, without the newline."""
    return f"{TAG} {metric.encode(content)}".encode()


def _same(broken: bytes, text: bytes) -> bool:
    """Whether nothing of a record is lost: what changed lies before it."""
    return broken.endswith(text[len(_TAG) + 1 :])
