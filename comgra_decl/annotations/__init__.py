"""What a program may say about itself: optional words that cost nothing while nobody listens."""

from __future__ import annotations

from .marks import Mark, node
from .words import connect, kpi, note, step, tag

__all__ = ["Mark", "connect", "kpi", "node", "note", "step", "tag"]
