"""The style sheet of all HTML in the viewer.

Colours come from the variables that Panel's themes define, so light and dark need nothing more.
"""

from __future__ import annotations

from pathlib import Path

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
