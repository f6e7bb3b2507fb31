"""Explanations for programs that are not bit-equal or not fully recorded."""

from __future__ import annotations

from fnmatch import fnmatch

EXPLAINED = {
    "torch/compiled": "Recorded steps run eagerly, all others compiled; here every step is"
    " recorded, so it is eager code throughout against compiled code, which rounds in another"
    " order. All parameters agree to 3e-8 except for the bias in front of the batch norm: its"
    " gradient is zero but for rounding, which AdamW scales up to whole steps. The net has no"
    " dropout: from the same seed inductor draws other masks than eager code does.",
    "torch/compiled-aot-eager": "Losses and parameters are bit-equal. What differs are attributes"
    " that the compiler leaves on parameters when it first compiles, which eager steps do not.",
    "torch/spectral-norm": "The training is bit-equal. Parametrisations are called once while they"
    " are built, before anything owns them: those calls are part of the first record, under a name"
    " of their own, which the layer of the same path has to share (`0` and `0#2`).",
}
"""By the name of the program, as a glob."""


def explanation(name: str) -> str:
    """Returns why a program is an exception; empty if there is no explanation."""
    return next((text for glob, text in EXPLAINED.items() if fnmatch(name, glob)), "")
