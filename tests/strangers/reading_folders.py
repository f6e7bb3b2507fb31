"""Reads run folders in every way, each in a process with limits, and prints the outcome.

`python -m tests.strangers.reading_folders OUT RUN...` imports everything once and forks for each
run, so a folder needs no second start. Prints one line of JSON per run: the outcome of each way of
reading, what Python was asked to import, start or connect to, and how much memory it took.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from comgra_decl.cli.main import main as command_line
from comgra_decl.errors import ComgraError, UnknownNameError
from comgra_decl.export import FORMATS, export_run
from comgra_decl.query import Run, Slot, compare, differences, list_runs, open_group, open_run
from comgra_decl.rules import correlate, diagnose, diagnose_and_correlate, health, stored
from comgra_decl.store.verify import verify

MEMORY = 3 << 30
"""Address space beyond what is mapped when a read begins."""

SECONDS = 60
"""Wall time per read; must suffice on a loaded machine."""

_WATCHED = ("import", "exec", "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_REACHED = ("socket.connect", "socket.getaddrinfo", "urllib.Request")


def of_run(run: Run) -> dict[str, Callable[[], Any]]:
    """Returns one call for each public name of `Run`."""
    node = run.nodes[0] if run.nodes else "none"
    slots = run.slots
    role, pass_ = ("output", "forward")
    if len(slots):
        node, role, pass_ = (slots[name].iloc[0] for name in ("node", "role", "pass"))
    step = int(run.steps[-1]) if len(run.steps) else 0

    def slot() -> Slot:
        return run.slot(node, role=role, of=pass_)

    def pictures() -> None:
        for name in run.pictures:
            with contextlib.suppress(ComgraError):  # most need classes, values or several steps
                np.asarray(run.picture(name, node=node))

    def measured() -> None:
        reads: list[Callable[[], Any]] = [run.profile, run.module_times, run.memory]
        reads += [partial(run.memory, by=by) for by in ("step", "moment")] + [run.induction]
        reads += [partial(run.circuit, name) for name in run.interventions]
        reads += [partial(run.edge_effects, name) for name in run.interventions]
        reads += [partial(run.token_attributions, name) for name in run.spec.pictures]
        for read in reads:
            with contextlib.suppress(UnknownNameError):  # most runs have none
                read()

    calls: dict[str, Callable[[], Any]] = {
        "profile": measured,
        "memory": measured,
        "module_times": measured,
        "induction": measured,
        "token_attributions": measured,
        "circuit": measured,
        "edge_effects": measured,
        "slot": lambda: [slot(), slot().samples("mean")],
        "series": lambda: [run.series(node), slot().series("mean")],
        "row": lambda: run.row(step),
        "slot row": lambda: slot().row(step),
        "samples": lambda: run.samples(step),
        "samples_frame": lambda: run.samples_frame("mean"),
        "slot shape": lambda: slot().shape(step),
        "shapes": lambda: run.shapes(step),
        "slot shapes": lambda: slot().shapes(),
        "heat": lambda: run.heat("std"),
        "to_xarray": lambda: run.to_xarray("std"),
        "table": lambda: run.table("std"),
        "value": lambda: [run.value(node, step), slot().value(step)],
        "values_of": lambda: run.values_of(0),
        "histogram": lambda: slot().histogram(step),
        "extremes": lambda: slot().extremes(),
        "histograms": lambda: slot().histograms(),
        "document": lambda: [run.document(name) for name in ("findings", "modules", "report")],
        "chunks": lambda: [(c.aggregates, c.types) for c in run.chunks()],
        "between": lambda: run.between(node, run.nodes[-1]),
        "unusual": lambda: run.unusual(step),
        "picture": pictures,
        "picture_facts": lambda: run.picture_facts(step),
        "embedding": lambda: run.embedding(node),
        "similarity": lambda: run.similarity(node, node),
        "rank": lambda: run.rank(run.ranks[0]),
        "view": lambda: run.view("inspect"),
    }
    calls |= _named(run)
    names = [name for name in dir(Run) if not name.startswith("_")]
    plain = {name: _getting(run, name) for name in names if name not in calls}
    return plain | calls | {"repr": lambda: (repr(run), run._repr_html_())}


def _named(run: Run) -> dict[str, Callable[[], Any]]:
    """Returns calls that read everything that a run has under names of its own."""

    def shown() -> None:
        table = run.shown
        for name, step in zip(table["name"].tolist(), table["step"].tolist(), strict=True):
            run.shown_value(name, step)

    def plane() -> None:
        with contextlib.suppress(UnknownNameError):  # most have fewer than three checkpoints
            run.plane()

    return {
        "checkpoint": lambda: [run.checkpoint(step) for step in run.checkpoints],
        "plane": plane,
        "shown_value": shown,
        "effects": lambda: [run.effects(name) for name in run.interventions],
        "intervention_facts": lambda: [run.intervention_facts(n) for n in run.interventions],
    }


def _getting(run: Run, name: str) -> Callable[[], Any]:
    def get() -> Any:
        found = getattr(run, name)
        return found() if callable(found) else found

    return get


def of_folder(path: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """Returns a call for each function of the reading API and each command that takes a run."""

    def opened() -> Run:
        return open_run(path)

    calls: dict[str, Callable[[], Any]] = {
        "list_runs": lambda: list_runs(path.parent),
        "open_group": lambda: open_group(path.parent).runs,
        "differences": lambda: differences([opened(), opened()]),
        "compare": lambda: compare([opened(), opened()], opened().nodes[0], "std"),
        "stored": lambda: stored(opened()),
        "diagnose": lambda: health(diagnose(opened())),
        "correlate": lambda: correlate(opened()),
        "diagnose_and_correlate": lambda: diagnose_and_correlate(opened()),
        "verify()": lambda: verify(path),
    }
    for name in FORMATS:
        calls[f"export_run {name}"] = _exporting(path, out / f"api-{name}", name)
    commands = [
        ["ls", str(path.parent)],
        ["ls", str(path.parent), "--json"],
        ["show", str(path)],
        ["show", str(path), "--json"],
        ["diagnose", str(path)],
        ["diagnose", str(path), "--json"],
        ["verify", str(path)],
        ["verify", str(path), "--json"],
        ["thermometer", str(path)],
        *(["export", str(path), str(out / f"of-{name}"), "--format", name] for name in FORMATS),
        ["cp", str(path), str(out / "copy")],
        ["cp", str(path), str(out / "small"), "--compact"],
        ["compact", str(path)],
    ]
    return calls | {" ".join([c[0], *c[2:][-1:]]): _commanding(c) for c in commands}


def _exporting(path: Path, to: Path, name: str) -> Callable[[], Any]:
    return lambda: export_run(open_run(path), to, name)


def _commanding(arguments: list[str]) -> Callable[[], Any]:
    def run() -> str | None:
        said, errors = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
                command_line(arguments)
        except SystemExit as ended:
            if ended.code not in (None, 0, 2, 3):
                return f"code {ended.code}: {errors.getvalue()[-300:]}"
        text = said.getvalue() + errors.getvalue()
        raw = [c for c in text if ord(c) < 32 and c not in "\n\r\t\x1b"]
        if raw or "\x1b]" in text or "\x1b[2J" in text:
            return f"control characters on the terminal: {raw[:5]}"
        return None

    return run


def of_viewer(path: Path) -> dict[str, Callable[[], Any]]:
    """Returns a call for each section of the page."""
    from comgra_decl.viewer.dashboard import Dashboard
    from comgra_decl.viewer.model.catalogue import Catalogue
    from comgra_decl.viewer.model.runview import RunView
    from comgra_decl.viewer.model.verdicts import look
    from comgra_decl.viewer.state import SECTIONS

    page: list[Dashboard] = []

    def section(name: str) -> Callable[[], Any]:
        def show() -> None:
            if not page:
                page.append(Dashboard(Catalogue(path.parent)))
            page[0].change(section=name)
            page[0].poll()

        return show

    def looked() -> None:
        look(RunView(open_run(path))).wait()

    sections = {f"viewer {name}": section(name) for name in SECTIONS if name != "views"}
    return sections | {"viewer look": looked, "viewer": section("findings")}


def _told(call: Callable[[], Any]) -> str:
    """Returns "" for a result, our error message, or "!" and what must not happen."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = call()
        return f"! {found}" if isinstance(found, str) and found.startswith(("code", "cont")) else ""
    except ComgraError as error:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException as error:  # noqa: BLE001  (it is told)
        last = traceback.extract_tb(error.__traceback__)[-4:]
        places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(last))
        return f"! {type(error).__name__}: {error}"[:300] + f" @ {places}"


def looks(path: Path, out: Path, *, viewer: bool = True) -> Iterator[tuple[str, str]]:
    """Reads a run in every way; yields the outcome of each."""
    for name, call in (of_viewer(path) if viewer else {}).items():
        yield name, _told(call)
    try:
        run = open_run(path)
    except ComgraError:
        pass
    else:
        try:
            calls = of_run(run)
        except ComgraError:
            calls = {}
        for name, call in calls.items():
            yield name, _told(call)
    for name, call in of_folder(path, out).items():
        yield name, _told(call)


def _space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limited(path: Path, out: Path, report: Path, *, viewer: bool) -> None:
    """In a child: reads a run within limits."""
    events: list[str] = []

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _WATCHED or event in _REACHED:
            what = arguments[0] if event == "import" else getattr(arguments[0], "co_filename", "?")
            events.append(f"{event} {what}"[:200])

    limit = _space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.addaudithook(heard)
    found: dict[str, str] = {}
    signal.alarm(SECONDS)  # ends the process: a read that hangs in C calls no handler
    for name, told in looks(path, out, viewer=viewer):
        signal.alarm(SECONDS)
        found[name] = told
        report.write_text(json.dumps({"looks": found, "events": events, "after": name}))


def main(out: Path, runs: list[Path], *, viewer: bool = True) -> None:
    """Forks for each run, and prints what its process reported."""
    out.mkdir(exist_ok=True)
    if viewer:
        import comgra_decl.viewer.dashboard  # noqa: F401
    for number, path in enumerate(runs):
        mine, report = out / str(number), out / f"{number}.json"
        mine.mkdir()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(os.open(out / f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
                _limited(path, mine, report, viewer=viewer)
                code = 0
            finally:
                os._exit(code)
        _, status, used = os.wait4(child, 0)
        told = json.loads(report.read_text()) if report.exists() else {"looks": {}, "events": []}
        told |= {"run": str(path), "code": os.waitstatus_to_exitcode(status)}
        if told["code"]:
            told["stderr"] = (out / f"{number}.err").read_text(errors="replace")[-600:]
        told["rss_mb"] = used.ru_maxrss // 1024
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--no-viewer"]
    main(Path(arguments[0]), [Path(a) for a in arguments[1:]], viewer="--no-viewer" not in sys.argv)
