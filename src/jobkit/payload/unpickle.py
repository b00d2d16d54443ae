"""Reading untrusted pickles: only the named classes and functions are ever called."""

import pickle
from collections.abc import Iterable
from typing import IO, Any


class _Restricted(pickle.Unpickler):
    def __init__(self, file: IO[bytes], allowed: frozenset[tuple[str, str]], encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in this file")
        return super().find_class(module, name)


def restricted_load(
    file: IO[bytes], allowed: Iterable[tuple[str, str]], encoding: str = "ASCII"
) -> Any:
    """The object of a pickle made of plain values and of the allowed (module, name) alone.

    encoding: of the texts in a pickle of Python 2; "bytes" leaves them as bytes. Raises
    pickle.UnpicklingError for anything that is not allowed, before it is called.
    """
    return _Restricted(file, frozenset(allowed), encoding).load()
