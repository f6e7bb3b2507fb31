"""One page of Markdown about a run, as `comgra-decl explain` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from comgra_decl.query.report import remarks
from comgra_decl.rules import health
from comgra_decl.rules.finding import consequences_of, roots_of
from comgra_decl.visible import visible

if TYPE_CHECKING:
    from comgra_decl.query import Ending, Run
    from comgra_decl.rules import Diagnosis, Finding

_MOST_FINDINGS = 12
_MOST_METRICS = 24
_MOST_REMARKS = 10
_CODE = ("Where", "Stack, innermost last")
"""Parts of a post-mortem that are printed as code."""


def explained(run: Run, diagnosis: Diagnosis) -> str:
    """Return the page, with all text from the run escaped."""
    parts = [
        _facts(run),
        _verdict(run, diagnosis),
        _ended(run.ending),
        _findings(diagnosis),
        _metrics(run),
    ]
    lines = [f"# Run {_plain(run.group)}/{_plain(run.name)}"]
    for part in parts:
        found = [*part]
        lines += ["", *found] if found else []
    return "\n".join(lines) + "\n"


def _facts(run: Run) -> Iterator[str]:
    facts, steps = run.facts, run.steps
    started = datetime.fromtimestamp(run.started, UTC)
    versions = facts.get("versions") or {}
    host = facts.get("host") or {}
    git = facts.get("git") or {}
    span = f", training steps {steps[0]} to {steps[-1]}" if len(steps) else ""
    rows = [
        ("state", run.state if run.error is None else f"{run.state}: {run.error}"),
        ("started", f"{started:%Y-%m-%d %H:%M:%S} UTC"),
        ("command", " ".join(facts.get("command") or ["-"])),
        ("versions", ", ".join(f"{name} {text}" for name, text in versions.items())),
        ("machine", f"{host.get('system', '-')}, {host.get('cpus', '-')} CPUs"),
        ("commit", f"{git.get('commit') or '-'}{' (modified)' if git.get('dirty') else ''}"),
        ("recorded", f"{len(run.records)} records{span}; {len(run.slots)} series"),
    ]
    if parameters := _parameters(run):
        rows.append(("model", parameters))
    yield from (f"- **{name}**: {_plain(text)}" for name, text in rows)


def _parameters(run: Run) -> str:
    modules = run.modules
    held = [p for m in modules for p in m["parameters"].values() if p.get("tied_to") is None]
    if not modules:
        return ""
    total = sum(p["count"] for p in held)
    trained = sum(p["count"] for p in held if p["trainable"])
    first = modules[0]
    name = first.get("class") or first["node"]
    return f"{name}, {len(modules)} modules, {total:,} parameters, {trained:,} of them trained"


def _verdict(run: Run, diagnosis: Diagnosis) -> Iterator[str]:
    yield "## Verdict"
    yield ""
    ending = run.ending
    if ending is not None:
        yield f"{_plain(ending.headline)}."
    count = len(roots_of(diagnosis.findings))
    found = f"{count} finding{'s' * (count != 1)}" if count else "No findings"
    yield f"{found} in {diagnosis.records} records; {_rules(len(diagnosis.checked))} checked."
    against = [check for check in health(diagnosis) if check.colour in ("red", "amber")]
    for check in against:
        yield f"- not healthy: {_plain(check.question.text)} {_plain(check.evidence)}"
    noted = [*(f"damaged: {loss}" for loss in run.damage), *remarks(run.report)]
    yield from (f"- {_plain(remark)}" for remark in noted[:_MOST_REMARKS])


def _rules(count: int) -> str:
    return "1 rule was" if count == 1 else f"{count} rules were"


def _ended(ending: Ending | None) -> Iterator[str]:
    if ending is None:
        return
    yield "## Post-mortem"
    for title, lines in ending.parts:
        yield ""
        yield f"**{title}**"
        yield ""
        if title in _CODE:
            yield "```text"
            yield from (visible(line).replace("```", "'''") for line in lines)
            yield "```"
        else:
            for line in lines:
                below = line.startswith("- ")
                yield f"  - {_plain(line[2:])}" if below else f"- {_plain(line)}"


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    roots = roots_of(diagnosis.findings)
    if not roots:
        return
    yield "## Findings"
    for number, finding in enumerate(roots[:_MOST_FINDINGS], 1):
        yield ""
        yield f"{number}. **{finding.rule}** ({finding.severity}), {_plain(finding.span)}"
        yield from (f"   - {_plain(line)}" for line in _about(finding))
        explains = consequences_of(finding, diagnosis.findings)
        if explains:
            yield f"   - explains: {', '.join(other.rule for other in explains)}"
    if len(roots) > _MOST_FINDINGS:
        yield ""
        yield f"{len(roots) - _MOST_FINDINGS} more findings are left out."


def _about(finding: Finding) -> Iterator[str]:
    where = "the whole run" if finding.place is None else str(finding.place)
    more = f" and {finding.also} more" if finding.also else ""
    yield f"where: {where}{more}"
    yield finding.message
    if finding.evidence:
        yield "evidence: " + ", ".join(f"{n} = {_value(v)}" for n, v in finding.evidence.items())
    if finding.because:
        yield f"probably because of {finding.because}"
    yield f"what to do: {finding.advice}"


def _metrics(run: Run) -> Iterator[str]:
    table = run.kpis(automatic=True)
    if table.empty:
        return
    yield "## Metrics"
    yield ""
    yield "| metric | type | first | lowest | highest | last |"
    yield "|---|---|---:|---:|---:|---:|"
    groups = [*table.groupby(["name", "type"], sort=False)]
    for (name, type_), part in groups[:_MOST_METRICS]:
        values = part.sort_values("step", kind="stable")["value"].to_numpy(np.float64)
        finite = values[np.isfinite(values)]
        ends = (finite.min(), finite.max()) if len(finite) else (np.nan, np.nan)
        shown = " | ".join(_value(float(v)) for v in (values[0], *ends, values[-1]))
        yield f"| {_cell(name)} | {_cell(type_)} | {shown} |"
    if len(groups) > _MOST_METRICS:
        yield ""
        more = len(groups) - _MOST_METRICS
        yield f"{more} more metrics are left out; `run.kpis(automatic=True)` returns all."


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_MARKS = re.compile(r"([\\*<>|]|(?<!\w)_|_(?!\w)|^[#+-]|\](?=[(\[:]))")
"""Characters that Markdown would interpret."""


def _plain(text: str) -> str:
    """Return text as one line that Markdown shows literally, except for pairs of backticks."""
    line = visible(" ".join(text.split()))
    if line.count("`") % 2:
        line = line.replace("`", "'")
    code = line.split("`")
    return "`".join(part if i % 2 else _MARKS.sub(r"\\\1", part) for i, part in enumerate(code))


def _cell(text: object) -> str:
    return _plain(str(text))
