"""The first recorded batches: samples with their labels, and what each tensor contains."""

from __future__ import annotations

from typing import Any, ClassVar

from comgra_decl.query.batches import Summary
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.escaping import html_token as _raw
from comgra_decl.viewer.model.data import Batch, Data, Tensor, first_batches
from comgra_decl.viewer.model.numbers import MISSING, count, many, number, shape
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.panes.base import Pane, Shown, html_view
from comgra_decl.viewer.panes.gallery import CSS as GALLERY
from comgra_decl.viewer.panes.gallery import sample_tile

_CSS = """
.scrolled { overflow: auto; }
table.tensors { width: auto; }
.tensors td, .tensors th { padding: 3px 16px 3px 0; text-align: left; white-space: normal; }
.tensors th { white-space: nowrap; }
.classes { display: flex; flex-wrap: wrap; gap: 12px 24px; margin-bottom: 14px; }
.classes table { width: auto; }
.classes td.bar { min-width: 130px; }
"""

_MOST_CLASSES = 12

_EMPTY = """
<div class="notice"><h2>No inputs recorded</h2>
<p>These lines of the spec record the inputs and targets of the model, with the values of eight
samples:</p> <pre>nodes:
  all: {select: "**", capture: [output], values: true}
samples: {count: 8}</pre>
<p>The command <code>comgra-decl data</code> shows the first batches of a script before the training
starts.</p></div>
"""


class DataPane(Pane):
    """A table of the inputs and targets, the samples, and the classes. A click selects."""

    reads: ClassVar = frozenset({"run", "revision", "type", "step", "batch"})
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view(GALLERY + _CSS)
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the tables and the samples."""
        found = first_batches(shown.view, shown.at)
        tokens = [f"node:{tensor.node}" for tensor in found.tensors]
        tokens += [
            f"sample:{batch.step}:{tile.sample}"
            for tensor in found.tensors
            for batch in tensor.batches
            for tile in batch.tiles
        ]
        html = _page(found, shown.at) if found.tensors else _EMPTY
        self.view.param.update(html=html, tokens=tokens)

    def _on_message(self, message: Message) -> None:
        kind, _, rest = message["send"].partition(":")
        if kind == "node":
            self.act(node=rest)
        else:
            step, _, sample = rest.partition(":")
            self.act(step=int(step), batch=sample, follow=False)


def _page(found: Data, at: Selection) -> str:
    steps = ", ".join(count(step) for step in found.steps)
    first = len(found.steps)
    title = "The first recorded batch" if first == 1 else f"The first {first} recorded batches"
    which = "Step" if first == 1 else "Steps"
    parts = [f"<h2>{title}</h2>", f'<p class="note">{which} {steps}. {_compared(found)}</p>']
    parts.append(_table(found.tensors))
    parts += [_samples(tensor, found, at) for tensor in found.tensors if tensor.batches]
    classes = "".join(_classes(tensor) for tensor in found.tensors if tensor.classes)
    if classes:
        parts.append(f'<h3>how often each value occurs</h3><div class="classes">{classes}</div>')
    return "".join(parts)


def _compared(found: Data) -> str:
    """Return from what the numbers are computed."""
    if all(tensor.facts is None for tensor in found.tensors):
        return "Neither values nor statistics of samples were recorded, so there are no numbers."
    text = "All numbers are those of the recorded samples."
    if all(tensor.counted for tensor in found.tensors):
        return text
    return (
        f"{text} Where no values were recorded, they are computed from the statistics of each "
        "sample, and channels, duplicates and classes are unknown."
    )


def _table(tensors: tuple[Tensor, ...]) -> str:
    lines = "".join(_line(tensor) for tensor in tensors)
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("tensor", "shapes", "dtype", "range", "mean &plusmn; std", "channels", "")
    )
    return (
        f'<div class="scrolled"><table class="tensors"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _line(tensor: Tensor) -> str:
    facts = tensor.facts
    shapes = ", ".join(shape(dims) for dims in tensor.shapes)
    between = spread = channels = MISSING
    if facts is not None and facts.low is not None and facts.high is not None:
        exact = facts.dtype.startswith(("int", "uint", "bool"))
        low, high = (str(int(x)) if exact else number(x) for x in (facts.low, facts.high))
        between = f"{low} to {high}"
    if facts is not None and facts.mean is not None and facts.std is not None:
        spread = _spread(facts.mean, facts.std)
    if facts is not None and len(facts.channels) > 1:
        channels = ", ".join(_spread(*pair) for pair in facts.channels)
    remarks = "".join(f'<span class="chip">{_e(text)}</span> ' for text in _remarks(facts))
    name = tensor.role if tensor.role == tensor.node else f"{tensor.node}: {tensor.role}"
    return (
        f'<tr tabindex="0" data-send="node:{_raw(tensor.node)}"><td>{_e(name)}</td>'
        f"<td>{shapes}</td><td>{_e(tensor.dtype)}</td><td>{between}</td><td>{spread}</td>"
        f"<td>{channels}</td><td>{remarks}</td></tr>"
    )


def _spread(mean: float, std: float) -> str:
    return f"{number(mean, digits=3)} &plusmn; {number(std, digits=3)}"


def _remarks(facts: Summary | None) -> list[str]:
    if facts is None:
        return []
    said = []
    if facts.nonfinite:
        said.append(f"{many(facts.nonfinite, 'value')} NaN or infinite")
    if facts.repeated:
        said.append(f"{count(facts.repeated)} of {count(facts.samples)} samples twice in a batch")
    if facts.shared:
        said.append(f"{count(facts.shared)} of {count(facts.samples)} samples in an earlier batch")
    if facts.fewest == 1 and len(facts.classes) > 1:
        said.append("only one value in some batch: the data may not be shuffled")
    return said


def _samples(tensor: Tensor, found: Data, at: Selection) -> str:
    title = tensor.role if tensor.role == tensor.node else f"{tensor.node}: {tensor.role}"
    images = any(tile.image for batch in tensor.batches for tile in batch.tiles)
    how = ""
    if images and tensor.dtype != "uint8":
        undone = (
            "The declared mean and standard deviation are undone; values outside 0 to 1 are cut "
            "off."
            if found.undone
            else "Each image is scaled to its own range. To undo a normalization, declare "
            "<code>show: {image: {mean: ..., std: ...}}</code> for a probe."
        )
        how = f'<p class="note">{undone}</p>'
    rows = "".join(_batch(batch, at) for batch in tensor.batches)
    return f"<h3>{_e(title)}</h3>{how}{rows}"


def _batch(batch: Batch, at: Selection) -> str:
    chosen = at.sample if at.step == batch.step else None
    tiles = "".join(
        sample_tile(tile, tile.sample == chosen, send=f"sample:{batch.step}:{tile.sample}")
        for tile in batch.tiles
    )
    some = batch.samples is not None and len(batch.tiles) < batch.samples
    of = f": {count(len(batch.tiles))} of {count(batch.samples or 0)} samples" if some else ""
    averaged = "" if batch.whole else " (preview, averages of several places)"
    text = f"step {count(batch.step)}{of}{averaged}"
    return (
        f'<p class="note">{text}</p>'
        f'<div class="gallery" role="group" aria-label="Samples of step {batch.step}">{tiles}</div>'
    )


def _classes(tensor: Tensor) -> str:
    total = max(number for _, number in tensor.classes)
    lines = "".join(
        f'<tr><td>{_e(name)}</td><td class="bar" style="--tint:#3f6fd8;'
        f'--part:{100 * times / total:.1f}%">{count(times)}</td></tr>'
        for name, times in tensor.classes[:_MOST_CLASSES]
    )
    left = len(tensor.classes) - _MOST_CLASSES
    more = f'<p class="note">and {many(left, "other value")}</p>' if left > 0 else ""
    return (
        f"<div><table><thead><tr><th>{_e(tensor.role)}</th><th>times</th></tr></thead>"
        f"<tbody>{lines}</tbody></table>{more}</div>"
    )
