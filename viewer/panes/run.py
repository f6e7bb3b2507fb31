"""Shows the declared spec, the recorded data, and facts about the run."""

from __future__ import annotations

from typing import Any, ClassVar

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.about import About, Entry, Facts, about
from comgra_decl.viewer.model.headline import counted, ending_of
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.verdicts import found
from comgra_decl.viewer.panes.base import Pane, Shown, html_view

_WIDE = ' class="wide"'


class RunPane(Pane):
    """The spec and config as YAML, the capture report, run facts, and warnings."""

    reads: ClassVar = frozenset({"run", "revision"})
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view()
        return self.view

    def update(self, shown: Shown) -> None:
        """Rewrite all content."""
        self.view.html = _page(about(shown.view))


class FactsPane(Pane):
    """A short summary of the run and its findings, with links to details."""

    reads: ClassVar = frozenset({"run", "revision", "looked"})

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view(sizing_mode="stretch_both")
        self.view.tokens = ["findings", "run"]
        self.view.on_message(lambda message: self.act(section=message["send"]))
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite all content."""
        facts = about(shown.view)
        ending = ending_of(shown.view)
        remarks = facts.remarks if ending is None else (f"{ending.headline}.", *facts.remarks)
        problems = "".join(f"<li>{_e(remark[:1].upper() + remark[1:])}</li>" for remark in remarks)
        self.view.html = (
            f'<div class="findings facts"><ul class="remarks">{problems}</ul>'
            f'<h3>Run</h3>{_table(facts.summary)}<p class="bar">{_e(_found(shown))} '
            '<button type="button" data-send="findings">Findings</button>'
            '<button type="button" data-send="run">Config and spec</button></p></div>'
        )


def _found(shown: Shown) -> str:
    """Return the number of findings as a sentence. The end of a failed run counts as one."""
    diagnosis = found(shown.view).diagnosis
    rules = "" if diagnosis is None else counted(diagnosis.findings)
    end = "" if ending_of(shown.view) is None else "how the program ended"
    if diagnosis is None:
        return f"Findings: {end}; not checked yet." if end else "This run has not been checked yet."
    return f"Findings: {' and '.join(filter(None, (end, rules))) or 'none'}."


def _page(facts: About) -> str:
    remarks = "".join(f"<li>{_e(remark[:1].upper() + remark[1:])}</li>" for remark in facts.remarks)
    config = f"<div><h3>Program config</h3>{_text('Configuration', facts.config)}</div>"
    parts = [
        f'<ul class="remarks wide">{remarks}</ul>' if remarks else "",
        f"<div><h3>Run</h3>{_table(facts.summary)}</div>",
        f"<div><h3>Spec entries and what they recorded</h3>{_entries(facts.entries)}</div>",
        f"<div{'' if facts.config else _WIDE}><h3>Spec</h3>{_text('Spec', facts.spec)}</div>",
        config if facts.config else "",
        f"<div{_WIDE}><h3>Facts</h3>{_table(facts.facts)}</div>",
    ]
    return f'<div class="run">{"".join(parts)}</div>'


def _text(name: str, text: str) -> str:
    """Return a text block that is scrollable by keyboard."""
    return f'<pre tabindex="0" role="region" aria-label="{name}">{_e(text)}</pre>'


def _table(facts: Facts) -> str:
    lines = "".join(f"<tr><td>{_e(key)}</td><td>{_e(text)}</td></tr>" for key, text in facts)
    return f"<table><tbody>{lines}</tbody></table>"


def _entries(entries: tuple[Entry, ...]) -> str:
    if not entries:
        return '<p class="note">Available after the first record.</p>'
    silent = any(entry.never_called for entry in entries)
    lines = "".join(_entry(entry) for entry in entries)
    heads = (
        '<th>entry</th><th title="modules that match the patterns">matched</th>'
        '<th title="matched modules that ran in the recorded step">fired</th>'
        '<th title="series written for these modules">written</th>'
        f"<th>{'never called' if silent else ''}</th>"
    )
    return f'<table class="entries"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'


def _entry(entry: Entry) -> str:
    silent = ", ".join(entry.never_called[:8])
    if len(entry.never_called) > 8:
        silent += f" and {len(entry.never_called) - 8} more"
    numbers = (entry.matched, entry.fired, entry.written)
    cells = "".join(f"<td>{count(n)}</td>" for n in numbers)
    return f"<tr><td>{_e(entry.name)}</td>{cells}<td>{_e(silent)}</td></tr>"
