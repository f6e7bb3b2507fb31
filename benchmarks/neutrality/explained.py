"""Explanations for programs that are not bit-identical or not fully recorded."""

from __future__ import annotations

from fnmatch import fnmatch

EXPLAINED = {
    "torch/compiled": "Recorded steps run eagerly, all others compiled. In this test every step is"
    " recorded, so eager code is compared with compiled code, which rounds in a different order."
    " All parameters agree to 3e-8 except for the bias in front of the batch norm. Its gradient is"
    " zero apart from rounding errors, and AdamW scales these errors up to full steps. The net has"
    " no dropout, because inductor and eager code draw different masks from the same seed.",
    "torch/compiled-aot-eager": "Losses and parameters are bit-identical. The only differences "
    "are parameter attributes that the compiler sets when it first compiles, and that eager steps "
    "do not set.",
    "torch/spectral-norm": "Training is bit-identical. Parametrizations are called once while they"
    " are built, before they belong to a module. The first record contains these calls under a"
    " separate name, so the layer with the same path gets a number (`0` and `0#2`).",
}
"""Explanations by program name, as a glob."""


def explanation(name: str) -> str:
    """Return why a program is an exception, or "" without an explanation."""
    return next((text for glob, text in EXPLAINED.items() if fnmatch(name, glob)), "")
