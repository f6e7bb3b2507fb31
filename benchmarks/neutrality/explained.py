"""Explanations for programs that are not bit-equal or not fully recorded."""

from __future__ import annotations

from fnmatch import fnmatch

EXPLAINED = {
    "torch/compiled": "Recorded steps run eagerly, all others compiled. Here every step is"
    " recorded, so eager code is compared with compiled code, which rounds in a different order."
    " All parameters agree to 3e-8 except for the bias in front of the batch norm: its gradient is"
    " zero apart from rounding, which AdamW scales up to full steps. The net has no dropout,"
    " because inductor draws different masks from the same seed than eager code does.",
    "torch/compiled-aot-eager": "Losses and parameters are bit-equal. The differences are"
    " attributes that the compiler leaves on parameters when it first compiles, which eager steps"
    " do not set.",
    "torch/spectral-norm": "The training is bit-equal. Parametrisations are called once while they"
    " are built, before they belong to a module. The first record contains these calls under a"
    " separate name, so the layer with the same path gets a number (`0` and `0#2`).",
}
"""Explanations by program name, as a glob."""


def explanation(name: str) -> str:
    """Return why a program is an exception, or "" without an explanation."""
    return next((text for glob, text in EXPLAINED.items() if fnmatch(name, glob)), "")
