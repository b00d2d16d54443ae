"""A stand-in for PyTorch, for ranks that end before they compute: theirs starts in no time."""

from pathlib import Path

# Whatever is asked of it is there, but for GPUs and a process group.
TEXT = """
import sys
from unittest.mock import MagicMock
torch = MagicMock(__version__="0 (a stand-in)", __path__=[], __spec__=None)
torch.cuda.device_count.return_value = 0
torch.cuda.is_available.return_value = False
for name in ("TCPStore", "init_process_group"):
    getattr(torch.distributed, name).side_effect = RuntimeError("a stand-in has no group")
torch.__spec__ = sys.modules["torch"].__spec__
sys.modules["torch"] = torch
for name in ("distributed", "nn", "nn.functional", "optim", "utils", "utils.data"):
    sys.modules[f"torch.{name}"] = torch
"""


def no_torch(folder: Path) -> str:
    """Write it to a folder; return what PYTHONPATH is to begin with."""
    folder.mkdir(exist_ok=True)
    (folder / "torch.py").write_text(TEXT)
    return str(folder)
