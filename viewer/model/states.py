"""What to say instead of a picture, and above it: no run, no record, damaged, newer, deleted."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from comgra_decl.errors import DamagedRunError, FormatError, RunNotFoundError
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.ranks import spoken
from comgra_decl.viewer.model.runview import RunView


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that takes the place of the page. `tone` is "wait" or "bad"; `code` a command."""

    tone: str
    title: str
    lines: tuple[str, ...]
    code: str = ""


_COMMAND = "python train.py +comgra=debug\n# or, for any script:\npython -m comgra_decl train.py"

STATE_HELP = {
    "live": "a training is writing this run",
    "waiting": "the training has started and has recorded nothing yet",
    "finished": "the training ended",
    "stopped": "the process that wrote this run is gone; it did not end the run",
}


_TITLES = {
    FormatError: "This run was written in another format",
    RunNotFoundError: "This run is gone",
    DamagedRunError: "This run is damaged",
}


def notice_for(catalogue: Catalogue, run: str, error: BaseException | None) -> Notice:
    """Returns what is the matter with `run` ("" for no run at all) and what to do."""
    if error is not None:
        return _unreadable(catalogue, run, error)
    if not run:
        return _no_run(catalogue)
    entry = catalogue.entry(run)
    if entry is not None and entry.state in ("finished", "stopped"):
        return Notice("bad", "This run has no records", (
            f"{run} is {entry.state}: {STATE_HELP[entry.state]}. It recorded no step.",
            "Either no optimizer step happened, or the schedule left all of them out.",
        ))  # fmt: skip
    return Notice("wait", "Waiting for the first record", (
        f"{run} has started. The page fills by itself as soon as a step is recorded.",
    ))  # fmt: skip


BRAND = '<h1 class="brand">comgra<span>_decl</span></h1>'
"""The product's name, for the head of the page."""


def head_of(view: RunView, name: str) -> str:
    """Returns the name and the state of the run, as HTML for the head of the page."""
    state = view.run.state
    text = f"{state} \u00b7 {count(len(view.run.records))} records"
    return (
        f'{BRAND}<span class="name" title="{html.escape(str(view.run.path))}">'
        f'{html.escape(spoken(name))}</span><span class="state {state}" '
        f'title="{STATE_HELP.get(state, "")}">{text}</span>'
    )


def _no_run(catalogue: Catalogue) -> Notice:
    if catalogue.problem:
        return Notice("bad", "The folder of runs cannot be read", (catalogue.problem,))
    root = catalogue.root
    gone = isinstance(root, Path) and not root.exists()
    missing = " (the folder does not exist yet)" if gone else ""
    return Notice("wait", "Waiting for the first record", (
        f"There is no run below {root.absolute()}{missing}.",
        "Start a training with tracing; this page fills by itself:",
    ), _COMMAND)  # fmt: skip


def _unreadable(catalogue: Catalogue, run: str, error: BaseException) -> Notice:
    others = any(entry.name != run and entry.readable for entry in catalogue.entries)
    hint = ("Other runs are not affected: choose one on the left.",) if others else ()
    title = next(
        (title for kind, title in _TITLES.items() if isinstance(error, kind)),
        "This run cannot be read",
    )
    return Notice("bad", title, (run, str(error), *hint))
