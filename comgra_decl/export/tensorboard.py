"""TensorBoard: a log folder with one run."""

from __future__ import annotations

from pathlib import Path

from comgra_decl.sinks.tensorboard import TensorBoardSink

from .content import Content
from .forwarding import forward
from .projector import write_projector


def write(content: Content, to: Path) -> None:
    """Write the folder `to`, which `tensorboard --logdir` reads."""
    sink = TensorBoardSink(to)
    try:
        chosen = forward(content, sink)
    finally:
        sink.end("stopped")
    write_projector(content.run, chosen, to)
