"""Optional annotations for a program; their cost is negligible unless a session is active."""

from __future__ import annotations

from .marks import Mark, node
from .step_annotations import connect, figure, image, kpi, note, step, tag, text

__all__ = ["Mark", "connect", "figure", "image", "kpi", "node", "note", "step", "tag", "text"]
