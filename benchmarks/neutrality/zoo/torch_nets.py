"""The family of hand-written nets: layers, sequences, architectures, ways of training, pictures."""

from __future__ import annotations

from benchmarks.neutrality.program import Program
from benchmarks.neutrality.zoo import unusual
from benchmarks.neutrality.zoo.architectures import ARCHITECTURES
from benchmarks.neutrality.zoo.layers import LAYERS
from benchmarks.neutrality.zoo.pictured import PICTURED
from benchmarks.neutrality.zoo.sequences import SEQUENCES
from benchmarks.neutrality.zoo.trainings import TRAININGS

assert "fourier-operator" in ARCHITECTURES, unusual.__name__  # importing it adds programs
_ALL = {**LAYERS, **SEQUENCES, **ARCHITECTURES, **TRAININGS, **PICTURED}
NAMES = list(_ALL)


def build(name: str) -> Program:
    """Return a new training."""
    return _ALL[name]()
