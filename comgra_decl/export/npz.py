"""npz: one file of numpy arrays, read with `numpy.load`, without pickle."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Form, forms, pieces, record_columns
from .content import KEYS, Content


def write(content: Content, to: Path) -> None:
    """Write the file `to`. Arrays are built on disk, so that long runs need little memory."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        for name, array in _small(content).items():
            np.save(Path(folder) / f"{name}.npy", array, allow_pickle=False)
        wanted = {form.name: _array(Path(folder), form) for form in forms(content)}
        for name, first, data in pieces(content):
            wanted[name][first : first + len(data)] = data
        for array in wanted.values():
            if isinstance(array, np.memmap):
                array.flush()
        with zipfile.ZipFile(to, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.write(path, path.name)


def _array(folder: Path, form: Form) -> NDArray[Any]:
    """Create an array in a file; an empty one cannot be mapped into memory."""
    path, dtype = folder / f"{form.name}.npy", np.dtype(form.dtype)
    if 0 not in form.shape:
        return np.lib.format.open_memmap(path, "w+", dtype, form.shape)
    empty = np.empty(form.shape, dtype)
    np.save(path, empty, allow_pickle=False)
    return empty


def _small(content: Content) -> dict[str, np.ndarray]:
    """Return everything except the arrays of statistics; names as strings, facts as JSON."""
    kpis = content.run.kpis()
    small = {
        **record_columns(content),
        "slot_id": content.ids,
        "statistic_names": np.array(content.statistics, str),
        "aggregate_names": np.array(content.facts["aggregates"], str),
        "type_names": np.array(content.run.types, str),
        "kpi_step": kpis["step"].to_numpy(np.int64),
        "kpi_type": kpis["type"].to_numpy(str),
        "kpi_name": kpis["name"].to_numpy(str),
        "kpi_value": kpis["value"].to_numpy(np.float64),
        "run_json": np.array(json.dumps(content.facts, default=str)),
    }
    for key in KEYS:
        kind = np.int64 if key == "iteration" else str
        small[f"slot_{key}"] = content.slots[key].to_numpy(kind)
    return small
