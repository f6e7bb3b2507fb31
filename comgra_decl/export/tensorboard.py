"""TensorBoard: a log folder with one run, and recorded values for its projector."""

from __future__ import annotations

from pathlib import Path

from comgra_decl.sinks.tensorboard import TensorBoardSink

from .content import Content
from .forwarding import forward
from .projector import write_projector


def write(content: Content, to: Path) -> None:
    """Write the folder `to`, which `tensorboard --logdir` reads."""
    sink = TensorBoardSink(to)
    state = "failed"
    try:
        chosen = forward(content, sink)
        state = content.run.state
    finally:
        sink.end(state)
    write_projector(content.run, chosen, to)
