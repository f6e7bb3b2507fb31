"""npz: one file of numpy arrays, read with `numpy.load`, without pickle."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from .arrays import forms, pieces, record_columns
from .content import KEYS, Content


def write(content: Content, to: Path) -> None:
    """Write the file `to`. Arrays are built on disk, so that long runs need little memory."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        for name, array in _small(content).items():
            np.save(Path(folder) / f"{name}.npy", array, allow_pickle=False)
        wanted = {
            form.name: np.lib.format.open_memmap(
                Path(folder) / f"{form.name}.npy", "w+", np.dtype(form.dtype), form.shape
            )
            for form in forms(content)
            if 0 not in form.shape
        }
        for name, first, data in pieces(content):
            wanted[name][first : first + len(data)] = data
        for array in wanted.values():
            array.flush()
        with zipfile.ZipFile(to, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.write(path, path.name)


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
