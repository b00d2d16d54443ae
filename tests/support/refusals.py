"""What a command or a function refuses, as the one line that its user sees."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jobkit.errors import UsageError


def refusal(main: Callable[[Sequence[str]], int], words: Sequence[str], capsys: Any) -> str:
    """The line on standard error of a command that ends with 2; argparse exits on wrong usage."""
    try:
        code: object = main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), out + err
    return str(err)


def error_of(function: Callable[..., object], *words: object, **more: object) -> str:
    with pytest.raises(UsageError) as caught:
        function(*words, **more)
    return str(caught.value)
