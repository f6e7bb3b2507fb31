"""Public API for reading runs: tables, series and values as pandas and numpy objects.

```python
run = open_run("runs/train/2026-11-21_10-00-00")
run.series("blocks.0.attn", "std")          # pandas Series indexed by step
run.slot("blocks.0.attn").grad.series("l2") # the l2 norm of its gradient
run.value("blocks.0.attn", step=100)        # numpy array [samples, ...]
```
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("pandas") is not None:
    from comgra_decl.store.checks import NotedCheck, NotedChecks
    from comgra_decl.store.location import Location, Remote, location
    from comgra_decl.store.reader import limit_cache

    from .circuits import Circuit
    from .compare import compare, differences
    from .edge_effects import EdgeEffects
    from .group import Group, open_group
    from .index import Index
    from .listing import RunSummary, list_runs, listed
    from .opening import open_run, require_folder
    from .overview import Clock, RunRow, at_steps, clock_of, metrics_of, overview, row_in, row_of
    from .parting import Difference, Parting, part, sentences
    from .picture import Picture
    from .post_mortem import Ending
    from .preview import Preview
    from .run import Run
    from .slot import Slot
else:  # resuming imports `listing`, which finds the run, and `checkpoints`, for probes

    def __getattr__(name: str) -> object:
        if name in __all__:
            from comgra_decl.errors import needed

            needed("pandas", "read")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Circuit",
    "Clock",
    "Difference",
    "EdgeEffects",
    "Ending",
    "Group",
    "Index",
    "Location",
    "NotedCheck",
    "NotedChecks",
    "Parting",
    "Picture",
    "Preview",
    "Remote",
    "Run",
    "RunRow",
    "RunSummary",
    "Slot",
    "at_steps",
    "clock_of",
    "compare",
    "differences",
    "limit_cache",
    "list_runs",
    "listed",
    "location",
    "metrics_of",
    "open_group",
    "open_run",
    "overview",
    "part",
    "require_folder",
    "row_in",
    "row_of",
    "sentences",
]
