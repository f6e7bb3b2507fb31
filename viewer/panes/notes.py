"""Notes of the run; a click on a note jumps to its step."""

from __future__ import annotations

from typing import Any, ClassVar

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.notes import Note, notes
from comgra_decl.viewer.model.numbers import count
from comgra_decl.viewer.model.selection import nearest
from comgra_decl.viewer.model.tables import notes_csv
from comgra_decl.viewer.panes.base import SAVE, Pane, Shown, hand_table, html_view, save_button

_EMPTY = (
    '<div class="notice"><h2>No notes</h2><p>Log a note from your program with</p>'
    "<pre>comgra_decl.note(&quot;learning rate halved&quot;)</pre></div>"
)


class NotesPane(Pane):
    """A line per note, newest last. A click shows the nearest recorded step."""

    reads: ClassVar = frozenset({"run", "revision", "step"})
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self._drawn: object = None
        self.view = html_view()
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the table if there are new notes or another step is shown."""
        known = notes(shown.view)
        key = (known, shown.at.step)
        if key != self._drawn:
            tokens = [SAVE, *(f"step:{step}" for step in {note.step for note in known})]
            self.view.param.update(html=_table(known, shown.at.step), tokens=tokens)
            self._drawn = key

    def _on_message(self, message: Message) -> None:
        if self._shown is None:
            return
        if message["send"] == SAVE:
            hand_table(self.view, self._shown.at, "notes", notes_csv(self._shown.view))
        else:
            steps = self._shown.view.steps(self._shown.at.type)
            wanted = int(message["send"].removeprefix("step:"))
            self.act(step=nearest(steps, wanted), follow=False)


def _table(known: tuple[Note, ...], step: int | None) -> str:
    if not known:
        return _EMPTY
    lines = "".join(_line(note, note.step == step) for note in known)
    heads = f"<th>step</th><th>time</th><th>note {save_button('the notes')}</th>"
    return f'<table class="notes"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'


def _line(note: Note, chosen: bool) -> str:
    mark = ' class="chosen"' if chosen else ""
    return (
        f'<tr tabindex="0" data-send="step:{note.step}"{mark}><td>{count(note.step)}</td>'
        f"<td>{note.time}</td><td>{_e(note.text)}</td></tr>"
    )
