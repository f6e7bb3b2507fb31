"""The module tree, with sizes, frozen and tied parameters, and each module's share of changes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.modules import Key, Module, ModuleTree, Parameter, module_tree
from comgra_decl.viewer.model.numbers import MISSING, count, number, shape
from comgra_decl.viewer.model.tables import modules_csv
from comgra_decl.viewer.panes.base import SAVE, Pane, Shown, hand_table, html_view, save_button

_MOST_LINES = 60  # maximum number of lines that are visible at first
_EMPTY = (
    '<div class="notice"><h2>No modules yet</h2>'
    "<p>The modules appear with the first record.</p></div>"
)


class ModulesPane(Pane):
    """A line per module. A click on the triangle expands it; a click on the line selects it."""

    reads: ClassVar = frozenset({"run", "revision", "type", "step", "node", "gradient"})
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self._run: object = None
        self._node = ""
        self._opened: frozenset[Key] = frozenset()
        self.view = html_view()
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the visible part of the tree."""
        tree = module_tree(shown.view, shown.at)
        if shown.view is not self._run:
            self._run, self._node = shown.view, ""
            self._opened = tree.unfolded(_MOST_LINES)
        if shown.at.node != self._node:
            self._node = shown.at.node
            self._opened |= tree.above(shown.at.node)
        lines = tree.visible(self._opened)
        tokens = [f"node:{line.node}" for line in lines if line.node is not None]
        tokens += [SAVE, *(_fold(line) for line in lines if line.children)]
        self.view.param.update(html=self._table(tree, lines), tokens=tokens)

    def _table(self, tree: ModuleTree, lines: list[Module]) -> str:
        if not lines:
            return _EMPTY
        body = "".join(self._line(line) for line in lines)
        what = "change" if tree.measure is None else pass_label(tree.measure)
        heads = (
            f"<th>module {save_button('the modules')}</th><th>class</th><th>parameters</th>"
            "<th>output</th>"
            f'<th title="share of the squared norm of all {_e(what)}s at this step">'
            f"share of {_e(what)}</th>"
            f'<th title="norm of the {_e(what)} divided by the norm of the weights, at this step">'
            f"{_e(what)} \u00f7 weights</th>"
            '<th><span class="unseen">remarks</span></th>'
        )
        note = "" if tree.measure else f'<p class="note">{_HOW}</p>'
        return (
            f'<table class="modules"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
            f"{note}"
        )

    def _line(self, line: Module) -> str:
        chosen = line.node is not None and line.node == self._node
        mark = ' class="chosen" aria-selected="true"' if chosen else ""
        send = "" if line.node is None else f' tabindex="0" data-send="node:{_raw(line.node)}"'
        name = "" if line.node is not None else ' class="soft" title="nothing recorded here"'
        part = 0.0 if line.share is None or math.isnan(line.share) else 100 * line.share
        output = MISSING if line.output is None else shape(line.output)
        return (
            f"<tr{mark}{send}><td>"
            f'<span style="padding-left:{18 * line.depth}px">{self._triangle(line)}'
            f"<span{name}>{_e(line.label)}</span></span></td>"
            f"<td>{_e(line.module_class)}</td><td>{_size(line)}</td><td>{output}</td>"
            f'<td class="bar" style="--tint:#3f6fd8;--part:{part:.1f}%">{_percent(line.share)}</td>'
            f"<td>{MISSING if line.ratio is None else number(line.ratio, digits=3)}</td>"
            f"<td>{_remarks(line)}</td></tr>"
        )

    def _triangle(self, line: Module) -> str:
        if not line.children:
            return '<span class="fold"></span>'
        opened = line.key in self._opened
        return (
            f'<button type="button" class="fold" data-send="{_raw(_fold(line))}" '
            f'aria-expanded="{str(opened).lower()}" aria-label="{_e(line.label)}">'
            f"{'&#9662;' if opened else '&#9656;'}</button>"
        )

    def _on_message(self, message: Message) -> None:
        kind, _, rest = message["send"].partition(":")
        if message["send"] == SAVE:
            assert self._shown is not None
            table = modules_csv(self._shown.view, self._shown.at)
            hand_table(self.view, self._shown.at, "modules", table)
        elif kind == "node":
            self.act(node=rest)
        elif self._shown is not None:
            top, _, path = rest.partition(":")
            self._opened ^= {(int(top), path)}
            self.again()


_HOW = "The shares require the l2 statistic of <code>update</code> or <code>parameter_grad</code>."


def _fold(line: Module) -> str:
    return f"fold:{line.key[0]}:{line.key[1]}"


def _size(line: Module) -> str:
    own = "\n".join(_described(parameter) for parameter in line.parameters)
    return f'<span title="{_e(own)}">{count(line.count) if line.count else MISSING}</span>'


def _described(parameter: Parameter) -> str:
    text = f"{parameter.name}: {shape(parameter.shape)}"
    if parameter.tied_to is not None:
        return f"{text}, tied to {parameter.tied_to}"
    return text if parameter.trainable else f"{text}, frozen"


def _remarks(line: Module) -> str:
    chips = [line.frozen] if line.frozen else []
    chips += [f"tied to {p.tied_to}" for p in line.parameters if p.tied_to is not None]
    return "".join(f'<span class="chip">{_e(chip)}</span>' for chip in chips)


def _percent(share: float | None) -> str:
    if share is None:
        return MISSING
    return "NaN" if math.isnan(share) else f"{100 * share:.1f}%"
