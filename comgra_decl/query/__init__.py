"""Public API for reading runs: tables, series and values as pandas and numpy objects.

```python
run = open_run("runs/train/2026-11-21_10-00-00")
run.series("blocks.0.attn", "std")          # pandas Series indexed by step
run.slot("blocks.0.attn").grad.series("l2") # the l2 norm of its gradient
run.value("blocks.0.attn", step=100)        # numpy array [samples, ...]
```
"""

from comgra_decl.store.checks import NotedCheck, NotedChecks
from comgra_decl.store.location import Location, Remote, location
from comgra_decl.store.reader import limit_cache

from .compare import compare, differences
from .group import Group, open_group
from .listing import RunSummary, list_runs
from .opening import open_run, require_folder
from .post_mortem import Ending
from .preview import Preview
from .run import Run
from .slot import Slot

__all__ = [
    "Ending",
    "Group",
    "Location",
    "NotedCheck",
    "NotedChecks",
    "Preview",
    "Remote",
    "Run",
    "RunSummary",
    "Slot",
    "compare",
    "differences",
    "limit_cache",
    "list_runs",
    "location",
    "open_group",
    "open_run",
    "require_folder",
]
