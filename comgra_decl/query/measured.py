"""What was measured in the profiled steps and in the steps of the memory measurement, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from comgra_decl.errors import UnknownNameError
from comgra_decl.records import OTHER

_NO_PROFILE = (
    "this run has no profile. To create one, name the steps in the spec: `profile: {steps: [10, "
    "13]}`"
)
_TIMES = ("host", "host_self", "device", "device_self")
_COUNTS = ("kernels", "operations", "bytes")
_PHASES = ("data", "forward", "backward", "optimizer", "other", "total", "busy")


def profile_table(content: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return the profile by node and pass; see `Run.profile`.

    Raises:
        UnknownNameError: there is none.
    """
    content = _present(content)
    count = len(content["steps"])
    rows = pd.DataFrame(content["rows"]).set_index(["node", "pass"])
    table = pd.DataFrame({"calls": rows["calls"] / count}, rows.index)
    for name in _TIMES:
        table[f"{name}_ms"] = rows[name] / (1000 * count)
    for name in _COUNTS:
        table[name] = rows[name] / count
    device = rows["device_self"].sum()
    whole = device if device > 0 else sum(step["total"] for step in content["steps"])
    used = rows["device" if device > 0 else "host"]
    table["share"] = used / whole if whole > 0 else np.nan
    return table.sort_values("share", ascending=False, kind="stable")


def profile_steps(content: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return the phases of each profiled step, in milliseconds; see `Run.profile`.

    Raises:
        UnknownNameError: there is no profile.
    """
    rows = pd.DataFrame(_present(content)["steps"]).set_index("step")
    return rows[[*_PHASES]] / 1000


def _present(content: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if content is None or not content["steps"] or not content["rows"]:
        raise UnknownNameError(_NO_PROFILE)
    return content


_NO_TIMES = (
    "this run has no times of modules: they are measured in steps that are not recorded, from the "
    "first second on, unless code is compiled or the spec has `kpis: {automatic: false}`"
)


def times_table(content: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return the forward time of each node; see `Run.module_times`.

    Raises:
        UnknownNameError: nothing was timed.
    """
    if content is None or not content["rows"] or content["steps"] < 1:
        raise UnknownNameError(_NO_TIMES)
    rows = pd.DataFrame(content["rows"]).set_index("node")
    steps = content["steps"]
    table = pd.DataFrame({"calls": rows["calls"] / steps}, rows.index)
    table["forward_ms"] = rows["time"] * (1000 / steps)
    table["forward_self_ms"] = rows["self"] * (1000 / steps)
    whole = table["forward_self_ms"].sum()
    table["share"] = table["forward_ms"] / whole if whole > 0 else np.nan
    table.attrs["steps"] = steps
    return table.sort_values("share", ascending=False, kind="stable")


_NO_MEMORY = (
    "this run has no memory measurement. To create one, name a step in the spec: `memory: {steps: "
    "10}`"
)


def memory_table(content: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return what each node holds, in bytes; see `Run.memory`.

    Raises:
        UnknownNameError: it was not measured.
    """
    if content is None or not content["rows"]:
        raise UnknownNameError(_NO_MEMORY)
    rows = pd.DataFrame(content["rows"]).set_index("node")
    table = rows[["calls", "activations", "activations_self", "peak", "parameters", "gradients",
                  "optimizer"]].copy()  # fmt: skip
    table["allocated"] = rows["allocated"].astype(float) if content["exact"] else np.nan
    table["checkpoint_saves"] = (rows["activations"] - rows["inputs"]).clip(lower=0)
    held = table[["activations", "parameters", "gradients", "optimizer"]].sum(axis=1)
    if OTHER in table.index:
        held[OTHER] = table.loc[OTHER, "allocated"]
    return table.loc[held.sort_values(ascending=False, kind="stable").index]


_TOTALS = ("parameters", "optimizer", "gradients", "activations", "other")


def memory_steps(content: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return what the whole model holds in each measured step; see `Run.memory`.

    Raises:
        UnknownNameError: it was not measured.
    """
    rows = pd.DataFrame(_totals_of(content)).set_index("step")
    return rows.reindex(columns=[*_TOTALS]).astype(float)


def memory_moments(content: Mapping[str, Any] | None) -> pd.DataFrame:
    """Return what each node holds at each moment of the fullest step; see `Run.memory`.

    Raises:
        UnknownNameError: it was not measured.
    """
    totals = _totals_of(content)
    assert content is not None
    nodes, changes = content["moments"]["nodes"], content["moments"]["changes"]
    count = 1 + max((change[0] for change in changes), default=-1)
    grown = np.zeros((count, len(nodes)), np.int64)
    for at, node, size in changes:
        grown[at, node] += size
    table = pd.DataFrame(grown.cumsum(axis=0), pd.RangeIndex(count, name="moment"), nodes)
    step = content["moments"]["step"]
    table.attrs["totals"] = next((each for each in totals if each["step"] == step), totals[-1])
    return table


def _totals_of(content: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the totals of each measured step; older runs have none."""
    if content is None or not content.get("totals") or not _is_sound(content.get("moments")):
        raise UnknownNameError(_NO_MEMORY)
    return [*content["totals"]]


def _is_sound(moments: Mapping[str, Any] | None) -> bool:
    """Return whether the changes within a step name existing nodes and a plausible moment."""
    if moments is None:
        return False
    nodes = len(moments["nodes"])
    return all(
        len(change) == 3 and 0 <= change[0] < len(moments["changes"]) and 0 <= change[1] < nodes
        for change in moments["changes"]
    )
