"""Make torchvision importable where its compiled operators cannot be loaded.

Its wheels on PyPI are compiled for torch with CUDA. With a CPU-only torch, the operators are
missing, and importing torchvision fails because it registers shapes for two of them; its models
need no operators.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
_library: torch.library.Library | None = None


def declare_missing() -> None:
    """Declare the operators if they cannot be loaded. Idempotent."""
    global _library
    if _library is not None or _loads():
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _loads() -> bool:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return True
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        return False
    return True
