"""Optional annotations for a program; their cost is negligible unless a session is active."""

from __future__ import annotations

from .marks import Mark, node
from .step_annotations import connect, kpi, note, step, tag

__all__ = ["Mark", "connect", "kpi", "node", "note", "step", "tag"]
