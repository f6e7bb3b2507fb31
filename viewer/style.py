"""Style sheet of all HTML in the viewer.

Colours are defined by Panel's theme variables, so light and dark themes need no extra rules.
"""

from __future__ import annotations

from pathlib import Path

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
