"""The runs of a study of a command: its parameters at each size, with placeholders replaced."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import UsageError, nearest, one_of
from jobkit.spec.command_spec import (
    LAUNCHERS,
    RUN_DIR,
    SCALINGS,
    CommandSpec,
    check_parameter,
    template,
)
from jobkit.spec.placeholders import Value, fill, resolve, resolve_all, used
from jobkit.spec.taken_columns import check_fits, check_name_free

SIZE_NAMES = ("ranks", "nodes", "ranks_per_node", "repeat")
_WORK = ("unit", "per_step", "scaling", "together")


@dataclass(frozen=True, kw_only=True)
class CommandGrid:
    """What a study says of its command. Raises UsageError for what no size could use."""

    command: Sequence[str]
    launcher: str
    parameters: Mapping[str, Any]
    sweep: Mapping[str, Sequence[Any]]
    work: Mapping[str, Any]
    fixed: Mapping[str, Any]  # fields of CommandSpec, the same in every run

    def __post_init__(self) -> None:
        one_of("launcher", self.launcher, LAUNCHERS)
        for name, value in [*self.parameters.items(), *self._swept()]:
            check_parameter(name, value)
            if name in (*SIZE_NAMES, "run_dir"):
                raise UsageError(f"parameter {name}: this name is the size's; choose another")
        for key in self.work:
            if key not in _WORK:
                raise UsageError(f"work: unknown key '{key}'{nearest(str(key), _WORK)}")
        if (scaling := self.work.get("scaling")) is not None:
            one_of("scaling", scaling, SCALINGS)
        if "per_step" in self.work and not self.work.get("unit"):
            raise UsageError(
                'work: per_step needs its unit: --unit images, or unit = "images" in the study'
            )

    def _check_sweep(self) -> None:
        """Raise UsageError for a sweep whose runs would all be the same, or some of them."""
        texts = [*self.command, *self.parameters.values(), self.work.get("per_step")]
        texts += [value for _, value in self._swept()]
        known = set[str]().union(*map(used, texts))
        for name, values in self.sweep.items():
            if name not in known:
                hint = nearest(name, known)
                raise UsageError(f"sweep {name}: no {{{name}}} in the command{hint}")
            for at, value in enumerate(values):
                if str(value) in map(str, values[:at]):  # a command has 1 and "1" alike
                    raise UsageError(f"sweep {name}: has {value!r} twice")

    def _swept(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, values in self.sweep.items() for value in values)

    def runs(self, sizes: Sequence[tuple[int, int]], repeats: int) -> list[CommandSpec]:
        """Every run of the grid.

        Raises UsageError where per_step contradicts scaling, or a parameter has a column's name.
        """
        self._check_sweep()
        for name in (*self.parameters, *self.sweep):
            check_name_free(name)
        points = [
            dict(zip(self.sweep, p, strict=True)) for p in itertools.product(*self.sweep.values())
        ]
        found = []
        for point in points:
            given = {**self.parameters, **point}
            series = [self._spec(given, size, 0) for size in sizes]
            scaling = self._scaling(series)
            for size, repeat in itertools.product(sizes, range(repeats)):
                found.append(self._spec(given, size, repeat, scaling))
        return found

    def _spec(
        self,
        given: Mapping[str, Any],
        size: tuple[int, int],
        repeat: int,
        scaling: str | None = None,
    ) -> CommandSpec:
        nodes, per_node = size
        names: dict[str, Value] = {"ranks": nodes * per_node, "nodes": nodes}
        names |= {"ranks_per_node": per_node, "repeat": repeat, "run_dir": RUN_DIR}
        by_size = {n: v for n, v in given.items() if _follows_size(n, given)}
        try:
            parameters = resolve_all(given, names)
            for name, value in parameters.items():
                check_fits(name, value)
            names |= parameters
            return CommandSpec(
                **self.fixed,
                command=tuple(fill(word, names) for word in self.command),
                launcher=self.launcher,
                nodes=nodes,
                ranks_per_node=per_node,
                repeat=repeat,
                parameters=parameters,
                by_size=tuple(by_size),
                template=template(self.command, by_size),
                unit=self.work.get("unit"),
                work_per_step=_work_per_step(self.work.get("per_step"), names),
                scaling=scaling,
                together=self.work.get("together", False),
            )
        except UsageError as error:
            raise UsageError(f"at {nodes * per_node} ranks: {error}") from None

    def _scaling(self, series: Sequence[CommandSpec]) -> str | None:
        """Whether the work of a step stays or grows with the ranks; None: neither, or not said."""
        stated = self.work.get("scaling")
        work = {s.world_size: s.work_per_step for s in series if s.work_per_step is not None}
        if len(work) < 2:
            return stated
        strong = len(set(work.values())) == 1
        first, *others = work.items()
        weak = all(w * first[0] == first[1] * ranks for ranks, w in others)
        if stated and not (strong if stated == "strong" else weak):
            told = ", ".join(f"{w:g} at {n} ranks" for n, w in work.items())
            wanted = "the same at each size" if stated == "strong" else "in proportion to the ranks"
            raise UsageError(
                f"work: scaling is {stated}, so per_step must be {wanted}; it is {told}"
            )
        return stated or ("strong" if strong else "weak" if weak else None)


def _work_per_step(given: Any, names: Mapping[str, Value]) -> float | None:
    if given is None:
        return None
    found = resolve(given, names)
    if isinstance(found, str) and re.fullmatch(r"\d+(\.\d+)?([eE]\+?\d{1,2})?", found):
        found = float(found)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e18:
        raise UsageError(f"work: per_step = {given!r}: must be a number above 0, or a placeholder")
    return float(found)


def _follows_size(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a parameter's value follows from the size, maybe by way of another parameter."""
    seen, waiting = set[str](), {name}
    while waiting:
        seen |= waiting
        waiting = {n for one in waiting for n in used(given.get(one))} - seen
    return bool(seen & set(SIZE_NAMES) - {name})
