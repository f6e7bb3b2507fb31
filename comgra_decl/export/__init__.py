"""Export a run for other programs: Parquet, CSV, zarr, npz, TensorBoard, or its graph.

```python
from comgra_decl.export import export_run
export_run(comgra.open_run("runs"), "tables", "parquet")
```
"""

from .exporting import FORMATS, export_run

__all__ = ["FORMATS", "export_run"]
