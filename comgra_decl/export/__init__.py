"""Export a run for other programs: tables, arrays, a trace, TensorBoard logs, or its graph.

`send_run` sends a run that has ended to a tracker.

```python
from comgra_decl.export import export_run
export_run(comgra.open_run("runs"), "tables", "parquet")
```
"""

from .exporting import FORMATS, export_run
from .sending import TOOLS, send_run

__all__ = ["FORMATS", "TOOLS", "export_run", "send_run"]
