"""See inside a PyTorch network while it trains, by declaring what to see."""

from __future__ import annotations

__version__ = "0.1.0"
