"""Export a run for other programs: tables, arrays, a trace, TensorBoard logs, or its graph.

```python
from comgra_decl.export import export_run
export_run(comgra.open_run("runs"), "tables", "parquet")
```
"""

from .exporting import FORMATS, export_run

__all__ = ["FORMATS", "export_run"]
