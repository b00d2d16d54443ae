"""RunSpec: everything that defines one planned training."""

import hashlib
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from jobkit.errors import UsageError, nearest, one_of
from jobkit.spec import settings as rules
from jobkit.spec.dataset import WITH_PATH
from jobkit.spec.settings import DEFAULT_GLOBAL_BATCH_SIZE, Settings
from jobkit.spec.strategies import FACTS

ONE_RANK = tuple(name for name, facts in FACTS.items() if facts.one_rank)
MODELS = ("cnn", "fast_cnn", "resnet18", "mlp")
DATASETS = ("cifar10", "synthetic")
_BATCHES = ("global_batch_size", "batch_size_per_rank")  # one of the two
_EVERY = re.compile(r"([1-9][0-9]{0,8})|([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])")
_NOT_COMPARED = ("nodes", "ranks_per_node", "repeat", *_BATCHES, "data_dir")

Run = TypeVar("Run", bound="AnyRun")


class AnyRun:
    """What runs of any program have in common: frozen dataclasses, checked when they are made."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    nodes: int
    ranks_per_node: int

    @classmethod
    def from_dict(cls: type[Run], values: Mapping[str, Any]) -> Run:
        """Make a spec; raise UsageError that names the nearest right key for an unknown one."""
        check_keys(values, cls.__dataclass_fields__)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON takes them."""
        return dict(vars(self))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    def differences(self) -> dict[str, Any]:
        """The fields that are not at their default."""
        values = {f: getattr(self, f.name) for f in fields(self)}
        return {f.name: v for f, v in values.items() if v not in (f.default, {})}

    def with_hash(self, slug: str) -> str:
        """A run_id: a readable slug and a short hash of what differs from the defaults.

        Hashing only the differences keeps the id when a later version adds a setting.
        """
        identity = {f.name for f in fields(self) if f.metadata["identity"]}
        content = {k: v for k, v in self.differences().items() if k in identity}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class Every:
    """When checkpoints are written: after iterations, or seconds, or each epoch; or never."""

    iterations: int | None = None
    seconds: float | None = None
    epochs: bool = False

    @classmethod
    def of(cls, text: str | None) -> "Every":
        """Read epoch, 200 (iterations), 30s, 10m or 1h. Raises UsageError for anything else."""
        if text in (None, "epoch"):
            return cls(epochs=text is not None)
        match = _EVERY.fullmatch(text or "")
        if match and match[1]:
            return cls(iterations=int(match[1]))
        if match and (seconds := float(match[2]) * {"s": 1, "m": 60, "h": 3600}[match[3]]) > 0:
            return cls(seconds=seconds)
        raise UsageError(
            f"checkpoint_every = {text!r}: must be epoch, a number of iterations (200), or a time "
            "(30s, 10m, 1h)"
        )


@dataclass(frozen=True, kw_only=True)
class RunSpec(Settings, AnyRun):
    """One planned training: a strategy at a size, one repeat.

    Raises UsageError, naming the setting and what it may be, for a value out of its range.
    """

    # Settings that the program decides by its device where they have these values.
    left_to_device: ClassVar[Mapping[str, Any]] = {"precision": "auto", "fp32": "auto"}
    parameters: ClassVar[Mapping[str, Any]] = {}  # of a command alone

    def __post_init__(self) -> None:
        rules.check_fields(self)
        if self.global_batch_size is not None and self.batch_size_per_rank is not None:
            raise UsageError("give --global-batch-size or --batch-size-per-rank, not both")
        if ":" not in self.model:
            one_of("model", self.model, MODELS)
        if not self.dataset.startswith(WITH_PATH):
            one_of("dataset", self.dataset, (*DATASETS, "folder:PATH", "idx:PATH"))
        if self.strategy in ONE_RANK and (ranks := self.world_size) > 1:
            raise UsageError(f"strategy '{self.strategy}' runs at 1 rank, not {ranks}; use ddp")
        Every.of(self.checkpoint_every)
        if self.steps_batch_size < self.accumulate:
            raise UsageError(f"--accumulate {self.accumulate} is more than the samples in a step")

    @property
    def steps_batch_size(self) -> int:
        """Samples in one optimizer step over all ranks."""
        if self.batch_size_per_rank is not None:
            return self.batch_size_per_rank * self.world_size
        return self.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE

    @property
    def low_precision(self) -> bool:
        """Whether it computes in less than fp32. Not known for "auto": then fp32 counts."""
        return self.precision in ("bf16", "fp16")

    @property
    def scaling(self) -> str:
        """'strong' when the global batch is fixed, 'weak' when the batch per rank is."""
        return "strong" if self.batch_size_per_rank is None else "weak"

    @property
    def run_id(self) -> str:
        """Strategy, size, batch, precision and repeat, with a hash of the other settings."""
        weak = self.scaling == "weak"
        batch = f"pb{self.batch_size_per_rank}" if weak else f"b{self.steps_batch_size}"
        size = f"n{self.nodes}-g{self.ranks_per_node}"
        return self.with_hash(f"{self.strategy}-{size}-{batch}-{self.precision}-r{self.repeat}")

    @property
    def whole_node(self) -> bool:
        """Whether one rank uses every GPU of its node."""
        return FACTS[self.strategy].whole_node and self.device != "cpu"

    @property
    def planned_epochs(self) -> int | None:
        """Passes over the training samples; None: the steps end it."""
        return self.epochs if self.max_steps is None else None

    def columns(self) -> dict[str, Any]:
        """The settings by the columns of results.csv; not what the run itself records."""
        columns = self.to_dict() | {
            "world_size": self.world_size,
            "scaling": self.scaling,
            "global_batch_size": self.steps_batch_size,
            "batch_size_per_rank": -(-self.steps_batch_size // self.world_size),
            "epochs_planned": self.epochs,
        }
        del columns["device"], columns["epochs"]
        return columns

    def decided(self, recorded: Any) -> "RunSpec":
        """What is planned, with what it leaves to the device as a run recorded it."""
        left = [n for n, value in self.left_to_device.items() if getattr(self, n) == value]
        return replace(self, **{n: getattr(recorded, n) for n in left if hasattr(recorded, n)})

    def comparable(self) -> dict[str, Any]:
        """What two runs of one series share: not the size, but the batch that stays as it grows."""
        name = "global_batch_size" if self.scaling == "strong" else "batch_size_per_rank"
        batch = {"scaling": self.scaling, name: self.columns()[name]}
        return {k: v for k, v in vars(self).items() if k not in _NOT_COMPARED} | batch

    def arguments(self) -> list[str]:
        """What run.sh gets for this run: the strategy, and what differs from the defaults."""
        words: list[str] = []
        for name, value in {"strategy": self.strategy, **self.differences()}.items():
            if not _META[name]["option"] or value is None:
                continue
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else "--no-" + flag[2:])
            else:
                words += [flag, str(value)]
        return words


_META: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in fields(RunSpec)}
OF_IDENTITY = frozenset(name for name, meta in _META.items() if meta["identity"])
SETTINGS: tuple[str, ...] = tuple(_META)
# The type of each setting, of one that may be left out (None) without that.
TYPES = {n: rules.plain_type(hint)[0] for n, hint in typing.get_type_hints(RunSpec).items()}


def overridden(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with some replaced; a batch size that is given replaces the other kind too."""
    replaced = _BATCHES if any(name in changes for name in _BATCHES) else ()
    return {**{k: v for k, v in values.items() if k not in replaced}, **changes}


def check_keys(values: Iterable[str], known: Iterable[str] = SETTINGS) -> None:
    """Raise UsageError for a key that is no setting, naming the nearest right one."""
    for key in values:
        if key not in known:
            raise UsageError(f"unknown setting '{key}'{nearest(str(key), known)}")
