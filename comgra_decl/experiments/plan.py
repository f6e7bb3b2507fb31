"""The plan of a spec: what it would record from a program, and what that would cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from comgra_decl.hooks.schedule.budget import Times
from comgra_decl.records import StepBatch
from comgra_decl.terminal import console

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.query import Run
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location

HORIZONS = (1_000, 10_000, 100_000)
"""Lengths of training, in steps, for which a plan forecasts records and disk space."""

OK, INCOMPLETE = 0, 3


class Measured:
    """Measurements of a dry run.

    Attributes:
        plain: durations of timed steps without a record.
        recorded: durations of timed steps with a record.
        parts: uncompressed bytes of the records, by content.
        records: number of records.
        first_bytes: size of the run on disk with its first record.
        last_bytes: size of the run on disk at the end.
    """

    def __init__(self) -> None:
        self.plain, self.recorded = Times(), Times()
        self.parts = dict.fromkeys(("statistics", "samples", "histograms", "values"), 0)
        self.records = 0
        self.first_bytes = 0
        self.last_bytes = 0

    def count(self, batch: StepBatch) -> None:
        """Add the sizes of a batch of records."""
        histograms = 0 if batch.counts is None else batch.counts.nbytes
        histograms += 0 if batch.ranges is None else batch.ranges.nbytes
        self.parts["statistics"] += batch.aggregates.nbytes
        self.parts["samples"] += batch.samples.nbytes
        self.parts["histograms"] += histograms
        self.parts["values"] += sum(v.nbytes for by in batch.values for v in by.values())
        self.records += len(batch.steps)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The data that a spec records from a model, and the cost of recording it.

    Attributes:
        entries: by entry of the spec: matched, fired, written, never_called.
        tensors: one per series: node, role, iteration, pass, shape, dtype, kind, samples.
        bytes: per record, by content, before compression, and `on_disk` as measured.
        price: ms of a plain and of a recorded step, and the added ms, by the device's clock if
            there is one; also the added ms by either clock. None if not measured.
        forecast: by length of training in steps: records, bytes, share of the time.
        unmatched: a sentence for each pattern that matched nothing.
        warnings: all other warnings.
        cuts: places where the graph could not be followed.
        edges: number of edges in the graph.
        remarks: what the forecast omits.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    bytes: dict[str, int | None] = field(default_factory=dict)
    price: dict[str, float | None] | None = None
    forecast: list[dict[str, Any]] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    edges: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or 3 if a pattern matched nothing or nothing at all was recorded."""
        return INCOMPLETE if self.unmatched or not self.tensors else OK


def make_plan(spec: Spec, path: Location | None, measured: Measured) -> Plan:
    """Return the plan for `spec`, after a dry run that was recorded to `path`."""
    run = _opened(path)
    if run is None or not len(run.records):
        return Plan(remarks=[_why_nothing(spec)])
    report, price, size = run.report, _price(measured), _bytes(measured)
    structure = run.structure() if len(run.steps) else None
    return Plan(
        entries=report.get("entries", {}),
        tensors=_tensors(run),
        bytes=size,
        price=price,
        forecast=[_forecast(spec, n, price=price, size=size["on_disk"]) for n in HORIZONS],
        unmatched=report.get("unmatched", []),
        warnings=_warnings(report),
        cuts=[] if structure is None else structure.cuts,
        edges=0 if structure is None else len(structure.edges),
        remarks=_remarks(spec),
    )


def recorded_steps(spec: Spec, steps: int) -> int:
    """Return how many of the first `steps` training steps the schedule records."""
    from comgra_decl.spec import Scheduler

    scheduler, count, step = Scheduler(spec.schedule), 0, -1
    while (following := scheduler.next_after(step)) is not None and following < steps:
        step, count = following, count + 1
    return count


def _opened(path: Location | None) -> Run | None:
    from comgra_decl.query import open_run

    try:
        return None if path is None else open_run(path)
    except OSError:
        return None


def _why_nothing(spec: Spec) -> str:
    if not spec.enabled:
        return "enabled is false: nothing would be recorded"
    return "the program ended before any tensor was recorded"


def _tensors(run: Run) -> list[dict[str, Any]]:
    slots = run.slots
    return [_tensor(slots.loc[i], run.sample_count) for i in slots.index]


def _tensor(slot: pd.Series[Any], samples: int) -> dict[str, Any]:
    import pandas as pd

    shape = [int(size) for size in slot["shape"]]
    batch_dim = slot["batch_dim"]
    batched = not pd.isna(batch_dim)
    return {
        "node": str(slot["node"]),
        "role": str(slot["role"]),
        "iteration": int(slot["iteration"]),
        "pass": str(slot["pass"]),
        "shape": shape,
        "dtype": str(slot["dtype"]),
        "kind": str(slot["kind"]),
        "samples": min(samples, shape[int(batch_dim)]) if batched and shape else None,
    }


def _price(measured: Measured) -> dict[str, float | None] | None:
    clocks = {clock: _price_by(measured, clock) for clock in ("device", "host")}
    price = clocks["device"] or clocks["host"]
    if price is None:
        return None
    added = {
        f"{name}_added_ms": None if by is None else by["added_ms"] for name, by in clocks.items()
    }
    return {**price, **added}


def _price_by(measured: Measured, clock: str) -> dict[str, float] | None:
    plain, recorded = (kind.medians()[clock] for kind in (measured.plain, measured.recorded))
    if plain is None or recorded is None:
        return None
    added = max(recorded - plain, 0.0)
    return {"plain_ms": 1e3 * plain, "recorded_ms": 1e3 * recorded, "added_ms": 1e3 * added}


def _bytes(measured: Measured) -> dict[str, int | None]:
    records = max(measured.records, 1)
    size: dict[str, int | None] = {k: round(v / records) for k, v in measured.parts.items()}
    growth = measured.last_bytes - measured.first_bytes
    further = measured.records - 1
    size["on_disk"] = round(growth / further) if further > 0 and measured.first_bytes else None
    return size


def _forecast(
    spec: Spec, steps: int, *, price: dict[str, float | None] | None, size: int | None
) -> dict[str, Any]:
    records = recorded_steps(spec, steps)
    captured = steps if spec.keep is not None else records
    share = None
    plain, added = (price or {}).get("plain_ms"), (price or {}).get("added_ms")
    if plain and added is not None:
        share = captured * added / (steps * plain)
    return {
        "steps": steps,
        "records": records,
        "bytes": None if size is None else records * size,
        "share": share,
    }


def _warnings(report: dict[str, Any]) -> list[str]:
    unmatched = {*report.get("unmatched", [])}
    warnings = [w for w in report.get("warnings", []) if w not in unmatched]
    refused = [f"{name} is not recorded: {why}" for name, why in report.get("refused", {}).items()]
    return [*warnings, *(sentence for sentence in refused if sentence not in warnings)]


def _remarks(spec: Spec) -> list[str]:
    remarks = ["recorded evaluations are not included"] if spec.schedule.eval else []
    if spec.schedule.types:
        remarks.append("schedule.types is not forecast: types are unknown until they occur")
    if spec.schedule.seconds is not None:
        remarks.append("schedule.seconds is not forecast: it adds records by elapsed time")
    budgets = (spec.schedule.budget, *spec.schedule.type_budgets.values())
    if any(budget.time or budget.disk for budget in budgets):
        remarks.append("schedule.budget thins out records that cost more than it allows")
    beside = [f"probe {name}" for name in spec.probes]
    beside += [f"intervention {name}" for name in spec.interventions]
    if spec.checkpoints is not None:
        beside.append("checkpoints")
    if beside:
        remarks.append(
            f"not forecast, because they have their own schedules: {', '.join(beside)}. The sizes "
            "of a record are averages that include theirs"
        )
    if spec.keep is not None:
        remarks.append(
            "the share includes capturing every step for keep, but not storing the steps that it "
            "keeps"
        )
    return remarks


def print_plan(plan: Plan) -> None:
    """Print a plan to standard output."""
    out = console()
    if plan.tensors:
        out.print(Text("What the spec records", style="bold"))
        for table in (
            _entry_table(plan),
            _tensor_table(plan),
            _byte_table(plan),
            _forecast_table(plan),
        ):
            out.print(table, "", sep="\n")
    for sentence in plan.unmatched:
        out.print(Text(f"matches nothing: {sentence}", style="red"))
    for sentence in plan.warnings:
        out.print(Text(f"warning: {sentence}", style="yellow"))
    for place in plan.cuts:
        out.print(Text(f"graph cut: {place}", style="yellow"))
    for sentence in plan.remarks:
        out.print(Text(f"note: {sentence}"))
    if plan.tensors:
        out.print("This was a dry run: the program was stopped, and nothing was stored.")


_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(size: float | None) -> str:
    """Return a number of bytes as text: "42 kB"."""
    if size is None:
        return "-"
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def _entry_table(plan: Plan) -> Table:
    table = _table("entry", "selected", "seen", "series", "never called", right=(1, 2, 3))
    for name, entry in plan.entries.items():
        silent = entry["never_called"]
        shown = ", ".join(silent[:4]) + (f", ... ({len(silent)})" if len(silent) > 4 else "")
        counts = [str(entry[key]) for key in ("matched", "fired", "written")]
        table.add_row(name, *counts, shown or "-")
    return table


def _tensor_table(plan: Plan) -> Table:
    table = _table("node", "role", "passes", "kind", "type", "shape", "samples", right=(6,))
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for tensor in plan.tensors:
        key = (tensor["node"], tensor["role"])
        line = lines.setdefault(key, {**tensor, "passes": {}, "last": 0})
        line["passes"][tensor["pass"]] = None
        line["last"] = max(line["last"], tensor["iteration"])
    for (node, role), line in lines.items():
        shape = "x".join(map(str, line["shape"])) or "-"
        times = f" ({line['last'] + 1} iterations)" if line["last"] else ""
        samples = "-" if line["samples"] is None else str(line["samples"])
        passes = ", ".join(line["passes"])
        table.add_row(node, role + times, passes, line["kind"], line["dtype"], shape, samples)
    return table


def _byte_table(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    parts = [f"{name} {size_text(n)}" for name, n in plan.bytes.items() if name != "on_disk"]
    table.add_row("a record", ", ".join(parts) + " before compression")
    table.add_row("on disk", f"{size_text(plan.bytes['on_disk'])} per record, as measured")
    table.add_row("series", f"{len(plan.tensors)}, with {plan.edges} edges")
    if plan.price is None:
        table.add_row("cost", "not measured: the program ended too early")
    else:
        plain, recorded = plan.price["plain_ms"], plan.price["recorded_ms"]
        added = plan.price["added_ms"]
        text = f"{added:.3g} ms per recorded step ({recorded:.3g} ms; {plain:.3g} ms without)"
        if plan.price["device_added_ms"] is not None:
            text += f", by the device's clock; {plan.price['host_added_ms']:.3g} ms on the host"
        table.add_row("cost", text)
    return table


def _forecast_table(plan: Plan) -> Table:
    table = _table("steps", "records", "disk", "share of time", right=(0, 1, 2, 3))
    for line in plan.forecast:
        share = "-" if line["share"] is None else f"{line['share']:.2%}"
        records = f"{line['records']:,}"
        table.add_row(f"{line['steps']:,}", records, size_text(line["bytes"]), share)
    return table


def _table(*headings: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left", overflow="fold")
    return table
