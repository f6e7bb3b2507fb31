"""TensorBoard: a log folder with one run, and recorded values for its projector."""

from __future__ import annotations

from pathlib import Path

from comgra_decl.sinks.tensorboard import TensorBoardSink

from .content import Content
from .forwarding import forward
from .projector import points_in


def write(content: Content, to: Path) -> None:
    """Write the folder `to`, which `tensorboard --logdir` reads."""
    sink = TensorBoardSink(to)
    state = "failed"
    try:
        chosen = forward(content, sink)
        found = [*points_in(content.run, chosen)]
        if any(points.tensors for points in found):
            sink.points(found)
        state = content.run.state
    finally:
        sink.end(state)
