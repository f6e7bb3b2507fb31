"""The tools that are compared, one small class each."""

from benchmarks.tools.base import CommitClock, Step, Tool
from benchmarks.tools.comgra_peer import COMGRA
from benchmarks.tools.nothing import Nothing
from benchmarks.tools.ours import OURS

__all__ = ["TOOLS", "CommitClock", "Step", "Tool"]

TOOLS: tuple[Tool, ...] = (
    Nothing("nothing", "nothing attached"),
    Nothing("again", "nothing attached, again (noise)"),
    *OURS,
    *COMGRA,
)
"""Every tool, the baseline first, in the order in which it is reported."""
