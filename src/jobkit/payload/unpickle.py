"""Reading untrusted pickles: only the named classes and functions are ever called."""

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import IO, Any, ClassVar

MOST_BYTES = 64 << 20
_DEEPEST = 32  # tuples in tuples; hashing one that is far deeper would overflow the C stack
_StandIns = Mapping[tuple[str, str], Any]


# pickle's own, written in Python: the one in C takes as much memory as a number in the file says.
_Python: Any = pickle._Unpickler


class _Restricted(_Python):
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_Python.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # it would be filled with zeros before it is read

    def __init__(
        self,
        file: IO[bytes],
        allowed: Iterable[tuple[str, str]],
        stand_ins: _StandIns,
        encoding: str,
    ) -> None:
        super().__init__(file, encoding=encoding)
        self._allowed, self._stand_ins = frozenset(allowed), stand_ins
        self._types: set[type] = set()
        self._depths: dict[int, tuple[object, int]] = {}  # the object too: its id stays its own

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._stand_ins:
            found = self._stand_ins[module, name]
        elif (module, name) in self._allowed:
            found = super().find_class(module, name)
        else:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this file")
        if isinstance(found, type) and not issubclass(found, Enum):
            self._types.add(found)
        return found

    def load_build(self) -> None:
        """Set the state of an object that this pickle made: never that of a class or a function."""
        if type(self.stack[-2]) not in self._types:
            raise pickle.UnpicklingError("it would change what is not its own")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def _check_depth(self) -> None:
        made = self.stack[-1]
        depth = 1 + max((self._depths.get(id(part), (None, 0))[1] for part in made), default=0)
        if depth > _DEEPEST:
            raise pickle.UnpicklingError("it is nested too deeply")
        self._depths[id(made)] = (made, depth)


def _checked(load: Callable[[Any], None]) -> Callable[[_Restricted], None]:
    """An operation that makes a tuple, and then the look at how deep that is."""

    def run(self: _Restricted) -> None:
        load(self)
        self._check_depth()

    return run


for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Restricted.dispatch[_code[0]] = _checked(_Restricted.dispatch[_code[0]])


def restricted_load(
    file: IO[bytes],
    allowed: Iterable[tuple[str, str]],
    encoding: str = "ASCII",
    stand_ins: _StandIns | None = None,
) -> Any:
    """The object of a pickle made of plain values and of the allowed (module, name) alone.

    stand_ins: what is called in the place of some. encoding: of the texts in a pickle of Python 2;
    "bytes" leaves them as they are. Raises pickle.UnpicklingError for anything that is not allowed,
    before it is called, and for whatever else goes wrong.
    """
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise pickle.UnpicklingError(f"it is larger than {MOST_BYTES:,} bytes")
    try:
        return _Restricted(io.BytesIO(content), allowed, stand_ins or {}, encoding).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # what is no pickle fails in many ways
        said = str(error)[:200]
        raise pickle.UnpicklingError(f"{type(error).__name__}: {said}") from None
