"""Sends what is recorded to other tools: TensorBoard, W&B, MLflow, trackio.

A `Sink` writes to one tool. `Feed` decides what it receives (`Selection`) and under which names.
Exports feed a sink with a stored run, and a session feeds it while the program trains.
"""

from .api import About, Findings, Moment, Sink
from .feed import Feed, Metrics, Records
from .graph import Graph, graph_of
from .naming import SeriesName
from .selection import Selection

__all__ = [
    "About",
    "Feed",
    "Findings",
    "Graph",
    "Metrics",
    "Moment",
    "Records",
    "Selection",
    "SeriesName",
    "Sink",
    "graph_of",
]
