"""A file of settings for one run: the spec.json that a run left, or flat YAML by hand.

epochs: 3
global_batch_size: 256
optimizer: adam
"""

import contextlib
from pathlib import Path
from typing import Any

from jobkit.errors import UsageError
from jobkit.files import read_text
from jobkit.paths import read_json
from jobkit.spec.runspec import SETTINGS, check_keys, plain_type

_MOST_YAML = 64 << 10  # bytes: its reader is slow, and a file by hand is short


def read_spec_file(path: Path) -> dict[str, Any]:
    """The settings in a file. Raises UsageError for a file or a setting that cannot be used."""
    if path.suffix in (".yaml", ".yml"):
        found: Any = {k: _number(k, v) for k, v in _read_yaml(path).items()}
    else:
        content = read_json(path, follow=True)
        found = (content or {}).get("spec", content)
    if not isinstance(found, dict):
        raise UsageError(f"--spec {path}: not the spec.json of a run")
    settings: dict[str, Any] = found
    try:
        check_keys(settings)
    except UsageError as error:
        raise UsageError(f"--spec {path}: {error}") from None
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file and their values: no lists, no tables."""
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f'--spec {path}: needs PyYAML: run "python -m pip install pyyaml", or write JSON'
        ) from None
    try:
        found = yaml.safe_load(read_text(path, _MOST_YAML))
    except OSError as error:
        raise UsageError(f"--spec {path}: {error.strerror}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"--spec {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"--spec {path}: must be lines such as 'epochs: 3'")
    for key, value in found.items():
        if isinstance(value, list | dict | set):
            raise UsageError(f"--spec {path}: {key}: must be one value, not a list or a table")
    return found


def _number(key: str, value: Any) -> Any:
    """A number that YAML 1.1 takes for text, as 1e-3, where the setting is one."""
    if isinstance(value, str) and key in SETTINGS and plain_type(key)[0] is float:
        with contextlib.suppress(ValueError):
            return float(value)
    return value
