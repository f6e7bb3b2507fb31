"""Lets torchvision be imported where its compiled operators cannot be loaded.

Its wheels of the package index are compiled for a torch with CUDA. Beside a torch without it the
operators are missing, and importing torchvision fails because it describes two of them; its models
do not need any.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
_library: torch.library.Library | None = None


def declare_missing() -> None:
    """Declares the operators if they cannot be loaded; harmless when repeated."""
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
