"""The tools to compare, each a small class."""

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
"""All tools in the order in which they are reported, the baseline first."""
