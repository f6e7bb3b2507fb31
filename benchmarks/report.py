"""The report as Markdown and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.results import Ratio, ScenarioResult, Summary, recording_cost
from benchmarks.targets import Verdict

COLUMNS = (
    "",
    "step",
    "ratio (quartiles)",
    "with store",
    "ratio",
    "CPU",
    "ratio",
    "other threads",
    "commit",
    "B/record",
    "fixed B",
    "series",
    "first step",
    "close",
    "neutral",
)

LEGEND = """\
Times in ms per training step, medians over rounds. *step*: wall time of a step; its ratio is the
median of the per-round ratios to nothing attached, with their quartiles in brackets. *with store*:
from the first measured step until everything is on disk, per step. *CPU*: processor time of all
threads in that span; *other threads*: the part not spent by the training thread. *commit*: time in
the function that writes, per record. *B/record*: growth of the run's folder per recorded step,
before compaction; *fixed B*: remaining size of a run. *series*: (tensor, pass) pairs per record.
*first step*: discovers the model, not part of the other columns; *close*: time spent waiting for
the store, once per block. *neutral*: every loss is bit-identical to that of plain training."""


def to_markdown(
    results: Sequence[ScenarioResult], verdicts: Sequence[Verdict], *, machine: Mapping[str, Any]
) -> str:
    """Return the whole report as Markdown."""
    parts = ["# What tracing costs", facts_line(machine), LEGEND]
    parts += [_scenario(result) for result in results]
    parts += ["## Targets", table([("target", "measured", "met"), *map(verdict_row, verdicts)])]
    return "\n\n".join(parts) + "\n"


def save(
    folder: Path,
    results: Sequence[ScenarioResult],
    *,
    verdicts: Sequence[Verdict],
    machine: Mapping[str, Any],
) -> Path:
    """Write `<date>.json` and `<date>.md` into `folder`; return the path of the latter."""
    document = {
        "machine": dict(machine),
        "scenarios": [asdict(result) for result in results],
        "targets": [asdict(verdict) for verdict in verdicts],
    }
    return write(folder, document, to_markdown(results, verdicts, machine=machine))


def write(folder: Path, document: Mapping[str, Any], page: str, *, prefix: str = "") -> Path:
    """Write `page` as `<prefix><date>.md` and `document` as `.json`; return the former's path."""
    folder.mkdir(parents=True, exist_ok=True)
    day = date.today().isoformat()
    path = folder / f"{prefix}{day}.md"
    path.with_suffix(".json").write_text(json.dumps({"date": day, **document}, indent=1) + "\n")
    path.write_text(page)
    return path


def publish(folder: Path | None, document: Mapping[str, Any], body: str, *, prefix: str) -> None:
    """Print what was measured below a line about the machine, and store both in a folder, if any.

    Args:
        folder: where to store them; None for nowhere.
        document: the figures; `machine` contains the facts about it.
        body: the figures as Markdown.
        prefix: what the names of the files begin with.
    """
    page = f"{facts_line(document['machine'])}\n\n{body}\n"
    print(page)
    if folder is not None:
        print(f"written to {write(folder, document, page, prefix=prefix)}", file=sys.stderr)


def facts_line(machine: Mapping[str, Any]) -> str:
    """Return one line about the machine and its software."""
    packages = ", ".join(f"{name} {v}" for name, v in machine["packages"].items() if v)
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, {packages}; "
        f"{machine['torch_threads']} thread, load before {machine['load_before']}."
    )


def _scenario(result: ScenarioResult) -> str:
    title = f"## {result.name}: {result.description}"
    facts = f"{result.parameters:,} parameters, {result.rounds} rounds."
    lines = [_line(summary) for summary in result.tools.values()]
    notes = [f"Left out: {label} ({why})." for label, why in result.left_out.items()]
    return "\n\n".join([title, facts, table([COLUMNS, *lines]), *_costs(result), *notes])


def _line(summary: Summary) -> tuple[str, ...]:
    seconds, size = summary.seconds, summary.size
    ratio = summary.ratios["step"]
    return (
        summary.label,
        _ms(seconds["step"]),
        f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
        _ms(seconds["stored"]),
        _plain(summary.ratios["stored"]),
        _ms(seconds["cpu"]),
        _plain(summary.ratios["cpu"]),
        _ms(seconds["background"]),
        "-" if size.commit is None else _ms(size.commit),
        _count(size.per_step),
        _count(size.fixed),
        _count(size.series),
        _ms(seconds["first"]),
        _ms(seconds["close"]),
        "yes" if summary.same_losses else "NO",
    )


def _costs(result: ScenarioResult) -> list[str]:
    """Compare the cost added by recording, which ratios hide if training is slow."""
    tools = result.tools
    if not {"nothing", "comgra"} <= tools.keys():
        return []
    theirs = recording_cost(tools, "comgra")
    costs = [
        f"{tools[name].label} {_ms(recording_cost(tools, name))} ms "
        f"({theirs / recording_cost(tools, name):.1f} times less than comgra's kpis)"
        for name in ("record", "like", "debug")
        if name in tools and recording_cost(tools, name) > 0
    ]
    added = f"Added per recorded step, store included: comgra's kpis {_ms(theirs)} ms; "
    return [added + "; ".join(costs) + "."] if costs else []


def verdict_row(verdict: Verdict) -> tuple[str, ...]:
    """Return a verdict as a row of a table."""
    met = {True: "yes", False: "NO", None: "-"}[verdict.met]
    return verdict.target, verdict.measured or "not run", met


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], rule, *lines[1:]])


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _plain(ratio: Ratio) -> str:
    return f"{ratio.value:.3f}" if ratio.value < 10 else f"{ratio.value:.0f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
