"""Tables of runs for the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from comgra_decl.query.post_mortem import LAST_SEEN
from comgra_decl.query.report import price_text, remarks, verify_command
from comgra_decl.terminal import console
from comgra_decl.visible import visible

if TYPE_CHECKING:
    import pandas as pd

    from comgra_decl.store.verify import Damage, Verdict

_STYLES = {
    "live": "green",
    "waiting": "yellow",
    "failed": "red",
    "stopped": "yellow",
    "damaged": "red",
    "unreadable": "red",
}
"""Colour of each state of a run; `finished` has none."""


class _Table(Table):
    """A table that escapes control characters before the layout, which would drop some of them."""

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        super().add_row(*(visible(c) if isinstance(c, str) else c for c in cells), **how)


def _name(text: str) -> str:
    """Return a name on a single line, because a line break could look like another row."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def runs_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Return the table of `ls`, one run per row."""
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("records", justify="right", no_wrap=True)
    table.add_column("last step", justify="right", no_wrap=True)
    table.add_column("started", no_wrap=True)
    table.add_column("", overflow="fold", style="red")
    counts = Counter((run["group"], run["name"]) for run in runs)
    for run in runs:
        alone = counts[run["group"], run["name"]] == 1  # otherwise, the groups are in other folders
        table.add_row(
            _name(f"{run['group']}/{run['name']}" if alone else run["path"]),
            state_text(run["state"]),
            str(run["records"]),
            _or_dash(run["last_step"]),
            time_text(run["started"]),
            run["error"] or "",
        )
    return table


def run_table(run: dict[str, Any]) -> Table:
    """Return the table of facts that `show` prints, one fact per row."""
    table = _Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _facts(run):
        table.add_row(name, text)
    return table


def slots_table(slots: Sequence[dict[str, Any]]) -> Table:
    """Return the table of recorded slots: one row per node and role, listing the passes."""
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("node", "role", "passes", "kind", "type", "shape"):
        table.add_column(heading, overflow="fold")
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for slot in slots:
        line = lines.setdefault((slot["node"], slot["role"]), {**slot, "passes": {}})
        line["passes"][slot["pass"]] = None
    for (node, role), line in lines.items():
        shape = "x".join(map(str, line["shape"])) or "-"
        names = _name(node), _name(role)
        table.add_row(*names, ", ".join(line["passes"]), line["kind"], line["dtype"], shape)
    return table


def state_text(state: str) -> Text:
    """Return the state of a run as coloured text."""
    return Text(state, style=_STYLES.get(state, ""))


def time_text(seconds: float | None) -> str:
    """Return a time in Unix seconds as local time."""
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _facts(run: dict[str, Any]) -> Iterator[tuple[str, str | Text]]:
    steps, facts = run["steps"], run["facts"]
    yield "run", run["path"]
    yield "state", state_text(run["state"])
    if run["error"]:
        yield "error", Text(run["error"], style="red")
    yield from _ending(run["ending"])
    yield "started", time_text(run["started"])
    yield "command", " ".join(facts.get("command") or ["-"])
    yield "git", _git_text(facts.get("git"))
    yield "versions", ", ".join(f"{k} {v}" for k, v in (facts.get("versions") or {}).items()) or "-"
    span = f" ({steps['first']} to {steps['last']})" if steps["count"] else ""
    yield "records", f"{run['records']}, {steps['count']} of them training steps{span}"
    yield from _writers(run)
    yield "types", ", ".join(run["types"]) or "-"
    yield "recorded", f"{len(run['nodes'])} nodes, {len(run['slots'])} slots"
    yield "statistics", ", ".join(run["statistics"])
    for kpi in run["kpis"]:
        yield kpi["name"], f"{_number(kpi['value'])} ({kpi['type']}, step {kpi['step']})"
    for tool, link in _pairs(run["links"]):
        places = dict(_pairs(link))
        text = str(places.get("where") or ", ".join(f"{k} {v}" for k, v in places.items()))
        yield f"in {tool}", text
    if source := dict(_pairs(run["imported"])).get("source"):
        yield "imported from", str(source)
    if writer := run["report"].get("writer"):
        share = f"{writer['share']:.1%} of a core ({writer['cpu']:.1f} s)"
        yield "cost of writing", f"{share}; training waited {writer['waited']:.1f} s"
    if price := price_text(run["report"]):
        yield "cost", price
    if run["damage"]:
        command = verify_command(run["path"])
        yield "damaged", Text(f"the rest of the run is shown; to check all of it: {command}", "red")
    for loss in run["damage"]:
        yield "lost", Text(str(loss), style="red")
    for remark in remarks(run["report"]):
        yield "warning", Text(remark, style="yellow")


def _pairs(document: Any) -> Iterable[tuple[str, Any]]:
    """Return the entries of a stored document, which is untrusted: it may not be a mapping."""
    return document.items() if isinstance(document, dict) else ()


def _ending(ending: dict[str, Any] | None) -> Iterator[tuple[str, str | Text]]:
    """If the program did not end normally, yield why, and its place or what was last seen."""
    if ending is None:
        return
    yield "ending", Text(ending["headline"], style="red")
    for part in ending["parts"]:
        if part["title"] in ("Where", LAST_SEEN):
            yield from (("", line) for line in part["lines"][:3])


def _writers(run: dict[str, Any]) -> Iterator[tuple[str, str | Text]]:
    """If more than one process wrote the run, yield its ranks and resumed sessions."""
    if len(run["ranks"]) > 1 or run["missing_ranks"]:
        yield "ranks", ", ".join(map(str, run["ranks"]))
    if run["missing_ranks"]:
        missing = ", ".join(map(str, run["missing_ranks"]))
        yield "missing", Text(f"no data from rank {missing}", style="yellow")
    if run["first_stopped"] is not None:
        yield "stopped", Text(run["first_stopped"], style="red")
    for session in run["sessions"][1:]:
        step = "no step yet" if session["step"] is None else f"from step {session['step']}"
        yield "resumed", f"{time_text(session['started'])}, {step}"


def _git_text(git: dict[str, Any] | None) -> str:
    if not git:
        return "-"
    changed = ", with uncommitted changes" if git.get("dirty") else ""
    return f"{str(git.get('commit'))[:12]} on {git.get('branch') or 'no branch'}{changed}"


def _number(value: float | None) -> str:
    return "not a finite number" if value is None else f"{value:.6g}"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def print_verdict(verdict: Verdict) -> None:
    """Print the result of `verify`, with advice if the run is damaged."""
    out, facts = console(), Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _checked_facts(verdict):
        facts.add_row(name, text)
    out.print(facts)
    if verdict.damages:
        out.print("", _damages(verdict.damages), sep="\n")


def print_beside(damages: Sequence[Damage]) -> None:
    """Print damage in the unversioned files next to a run's databases."""
    out = console()
    out.print("", Text("damaged files next to the databases", style="red"), sep="\n")
    out.print(_damages(damages))
    out.print("To store the verdict again, repeat the experiment with --for RUN.")


def _checked_facts(verdict: Verdict) -> Iterator[tuple[str, str | Text]]:
    yield "run", str(verdict.path)
    if verdict.state is not None:
        yield "state", verdict.state
    yield "checked", f"{verdict.checked} chunks and keys, {verdict.records} records"
    if verdict.whole:
        yield "intact", Text("yes, everything can be read", style="green")
        return
    more = " or more" if verdict.more else ""
    yield "damaged", Text(f"in {len(verdict.damages)} places{more}", style="red")
    if all(damage.heals for damage in verdict.damages) and not verdict.more:
        yield (
            "what to do",
            f"no data is lost; to repair the run: comgra-decl compact {verdict.path}",
        )
    elif verdict.whole_version is None:
        yield "what to do", "no earlier version is intact"
    else:
        upto = "" if verdict.whole_step is None else f", up to step {verdict.whole_step}"
        yield (
            "intact up to",
            f"version {verdict.whole_version}: {verdict.whole_records} records{upto}",
        )
        yield (
            "what to do",
            f"to copy it: comgra-decl cp --version {verdict.whole_version} {verdict.path} TARGET",
        )


def _damages(damages: Sequence[Damage]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("where", "steps", "lost data", "reason"):
        table.add_column(heading, overflow="fold")
    for damage in damages:
        table.add_row(damage.where, _steps(damage), damage.lost, damage.reason)
    return table


def _steps(damage: Damage) -> str:
    if damage.steps is None:
        return "-"
    first, last = damage.steps
    return str(first) if first == last else f"{first} to {last}"


def phases_table(steps: pd.DataFrame) -> Table:
    """Return the milliseconds of each phase of the profiled steps."""
    table = _numbers("step", *steps.columns)
    for step, row in steps.iterrows():
        table.add_row(str(step), *(f"{value:.2f}" for value in row))
    return table


def profile_table(profile: pd.DataFrame) -> Table:
    """Return what nodes used in each pass; times in milliseconds."""
    on_device = bool(profile["device_ms"].any())
    columns = {"calls": "calls", "host_ms": "host", "host_self_ms": "host self"}
    if on_device:
        columns |= {"device_ms": "device", "device_self_ms": "device self", "kernels": "kernels"}
    columns |= {"operations": "operations"}
    table = _numbers("node", "pass", *columns.values(), "memory", "share")
    for key, row in profile.iterrows():
        node, pass_ = cast(tuple[str, str], key)
        cells = [
            f"{row[name]:.2f}" if name.endswith("ms") else f"{row[name]:.3g}" for name in columns
        ]
        memory = f"{row['bytes'] / 1e6:.2f} MB"
        table.add_row(_name(node), _name(pass_), *cells, memory, f"{row['share']:.1%}")
    return table


def times_table(times: pd.DataFrame) -> Table:
    """Return the forward time of nodes; times in milliseconds."""
    table = _numbers("node", "calls", "including modules within", "excluding them", "share")
    for node, row in times.iterrows():
        cells = (f"{row[name]:.3f}" for name in ("forward_ms", "forward_self_ms"))
        table.add_row(_name(str(node)), f"{row['calls']:.3g}", *cells, f"{row['share']:.1%}")
    return table


def memory_table(memory: pd.DataFrame) -> Table:
    """Return what nodes hold, in megabytes."""
    columns = ["activations", "activations_self", "peak", "parameters", "gradients", "optimizer"]
    if memory["allocated"].notna().any():
        columns.append("allocated")
    columns.append("checkpoint_saves")
    table = _numbers("node", *(name.replace("_", " ") for name in columns))
    for node, row in memory.iterrows():
        table.add_row(_name(str(node)), *(f"{row[name] / 1e6:.2f}" for name in columns))
    return table


def _numbers(*names: str) -> Table:
    """Return an empty table of numbers, with names in the first columns."""
    table = _Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        text = name in ("node", "pass")
        table.add_column(
            name, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    return table
