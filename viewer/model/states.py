"""Notices and page header: no run, no records, damaged, newer format, deleted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from comgra_decl.errors import (
    DamagedRunError,
    FormatError,
    RunNotFoundError,
    UnwrittenRunError,
)
from comgra_decl.query.report import remarks, verify_command
from comgra_decl.records import ENDED
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.about import schedule
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.headline import ending_of
from comgra_decl.viewer.model.numbers import count, many
from comgra_decl.viewer.model.ranks import spoken
from comgra_decl.viewer.model.runview import RunView


@dataclass(frozen=True, slots=True)
class Notice:
    """A message shown instead of the page. `tone` is "wait" or "bad"; `code` is a command."""

    tone: str
    title: str
    lines: tuple[str, ...]
    code: str = ""


_COMMAND = "python train.py +comgra=debug\n# or, for any script:\npython -m comgra_decl train.py"

STATE_HELP = {
    "live": "training is running, and new records are being added",
    "waiting": "training has started, but nothing has been recorded yet",
    "finished": "training ended normally",
    "failed": "an error ended the program",
    "stopped": "the training process ended without closing the run",
}


_TITLES = {
    FormatError: "This run was written in another format",
    RunNotFoundError: "Run not found",
    UnwrittenRunError: "This run is empty",
    DamagedRunError: "This run is damaged",
}

_NOT_HERE = "It was renamed, moved or deleted. If it becomes available again, this page shows it."


def notice_for(catalogue: Catalogue, run: str, error: BaseException | None) -> Notice:
    """Return a notice about the problem of `run` ("" if there are no runs), with advice."""
    if error is not None:
        return _unreadable(catalogue, run, error)
    if not run:
        return _no_run(catalogue)
    entry = catalogue.entry(run)
    if entry is not None and entry.state in ENDED:
        return _no_records(catalogue, run, entry.state)
    return Notice("wait", "Waiting for the first record", (
        f"{run} has started. The page updates as soon as a step is recorded.",
    ))  # fmt: skip


def _no_records(catalogue: Catalogue, run: str, state: str) -> Notice:
    """Return a notice that explains why a run without records ended, if the reason is known."""
    view = catalogue.open(run)
    damage = damage_of(view)
    if damage is not None:
        lost = "All of its records are damaged, or it has none:"
        return Notice("bad", damage.title, (run, lost, *damage.lines, _ADVICE), damage.code)
    asked = schedule(view)
    why = "Either training ended before its first step, or no optimizer step was detected"
    return Notice("bad", "This run has no records", (
        f"{run} is {state}: {STATE_HELP[state]}. No steps were recorded.",
        *([view.run.error] if view.run.error else []),
        *remarks(view.run.report or {}),
        f"{why}, or the schedule excluded all steps{':' if asked else '.'}",
    ), asked)  # fmt: skip


BRAND = '<h1 class="brand">comgra<span>_decl</span></h1>'
"""Product name for the page header."""


def head_of(view: RunView, name: str) -> str:
    """Return the run's name and state as HTML for the page header."""
    state = view.run.state
    ending = ending_of(view)
    if state == "finished" and ending is not None and ending.failed:
        state = "failed"  # recorded by a version that did not say so
    text = "stopped unexpectedly" if state == "stopped" else state
    text = f"{text} \u00b7 {many(len(view.run.records), 'record')}"
    silent = view.whole.run.first_stopped if state == "live" and len(view.ranks) > 1 else None
    warning = "" if silent is None else f' <span class="state stopped">{_e(silent)}</span>'
    return (
        f'{BRAND}<span class="name" title="{_e(view.run.path)}">'
        f'{_e(spoken(name))}</span><span class="state {state}" '
        f'title="{STATE_HELP.get(state, "")}">{text}</span>{warning}'
    )


def _no_run(catalogue: Catalogue) -> Notice:
    if catalogue.problem:
        return Notice("bad", "Cannot read the folder of runs", (catalogue.problem,))
    root = catalogue.root
    if isinstance(root, Path) and root.is_file():
        return Notice("bad", "Not a folder of runs", (
            f"{root.absolute()} is a file. Open the folder that contains the runs:",
        ), "comgra-decl view FOLDER")  # fmt: skip
    gone = isinstance(root, Path) and not root.exists()
    missing = " (the folder does not exist yet)" if gone else ""
    return Notice("wait", "No runs yet", (
        f"No runs found in {root.absolute()}{missing}.",
        "Start training with tracing enabled. This page updates automatically:",
    ), _COMMAND)  # fmt: skip


_ADVICE = "To see which data is lost and which can be recovered, run:"
_LISTED = 3
"""Maximum number of damaged parts to list above the page."""


def damage_of(view: RunView) -> Notice | None:
    """Return a notice with the damaged parts, which the page lacks; None if none are known."""
    losses = view.run.damage
    if not losses:
        return None
    more = [f"{count(len(losses) - _LISTED)} more"] * (len(losses) > _LISTED)
    lines = (*losses[:_LISTED], *more)
    return Notice("bad", _TITLES[DamagedRunError], lines, verify_command(view.run.path))


def _unreadable(catalogue: Catalogue, run: str, error: BaseException) -> Notice:
    title = next(
        (title for kind, title in _TITLES.items() if isinstance(error, kind)),
        "Cannot read this run",
    )
    lines = [run, str(error)]
    if isinstance(error, RunNotFoundError):
        lines.append(_NOT_HERE)
    if any(entry.name != run and entry.readable for entry in catalogue.entries):
        lines.append("Other runs are not affected; choose one on the left.")
    path = catalogue.path(run)
    if path is None or title != _TITLES[DamagedRunError]:
        return Notice("bad", title, tuple(lines))
    lines.append(_ADVICE)
    return Notice("bad", title, tuple(lines), verify_command(path))
