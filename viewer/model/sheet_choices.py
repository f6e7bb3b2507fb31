"""Selectors of the Values section: pass, sample, placement of dims, order."""

from __future__ import annotations

from comgra_decl.viewer.model.choices import Field, Groups, Option
from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.sheet import Tensor
from comgra_decl.viewer.model.slicing import COLOUR, COLUMNS, ROWS, Slicing

_ALL = "all"
_PLACES = (Option(ROWS, "down (rows)"), Option(COLUMNS, "across (columns)"))
_ORDERS = (
    Option("", "by position"),
    Option("high", "highest first", "sorted, all dims"),
    Option("low", "lowest first", "sorted, all dims"),
    Option("largest", "largest magnitude first", "sorted, all dims"),
    Option("smallest", "smallest magnitude first", "sorted, all dims"),
)
_FILES = (Option("copy", "Copy"), Option("csv", "CSV"), Option("npy", ".npy"))


def pass_field(view: RunView, at: Selection, chosen: str) -> Field:
    """Return the selector of the passes recorded for the selected tensor."""
    passes = view.passes(at.node, at.role, at.iteration)
    options = tuple(Option(name, pass_label(name)) for name in passes)
    shown = chosen if chosen in passes else "forward"
    return Field("pass_", "Pass", shown, options, "Values, gradients or updates", _style(options))


def sheet_choices(
    view: RunView, at: Selection, tensor: Tensor, *, slicing: Slicing, order: str, pass_: str
) -> Groups:
    """Return all selectors for the displayed values, in groups."""
    what = (pass_field(view, at, pass_), *_sample(view, at, tensor))
    if tensor.missing is not None:
        return (("Values", what),)
    files = Field("file", "Export", "", _FILES, _HELP, "actions")
    ordered = Field("order", "Order", order, _ORDERS, "Sorted lists start with NaN and infinity")
    return (
        ("Values", what),
        ("Dims", tuple(f for i in range(len(tensor.dims)) for f in _dim(tensor, slicing, i))),
        ("List", (ordered, files)),
    )


_HELP = "Copy: the visible cells. CSV: the whole slice or list. .npy: all selected values."


def sample_of(value: str) -> str:
    """Return the `Selection.batch` value for a sample choice."""
    return "mean" if value == _ALL else value


def _sample(view: RunView, at: Selection, tensor: Tensor) -> tuple[Field, ...]:
    if tensor.slot is None or tensor.slot.batch_dim is None:
        return ()
    labels = dict(enumerate(view.sample_labels(at.step, at.type)))
    numbers = range(view.run.sample_count)
    names = [f"{i} | {labels[i]}" if i in labels else str(i) for i in numbers]
    each = [Option(str(i), name) for i, name in zip(numbers, names, strict=True)]
    chosen = _ALL if at.sample is None else str(at.sample)
    options = (Option(_ALL, "all"), *each)
    return (Field("sample", "Sample", chosen, options, "One recorded sample, or all samples"),)


def _dim(tensor: Tensor, slicing: Slicing, i: int) -> tuple[Field, ...]:
    if i == 0 and tensor.fixed is not None:
        return ()
    dim, place = tensor.dims[i], slicing.places[i]
    options = [*_PLACES, Option("index", "fixed index")]
    options += [Option(COLOUR, "red, green, blue")] if dim.size == 3 else []
    label = f"{dim.name} ({dim.size})"
    chosen = place if isinstance(place, str) else "index"
    fields = [
        Field(
            f"place:{i}", label, chosen, tuple(options), "Where this dimension appears in the table"
        )
    ]
    if not isinstance(place, str):
        fields.append(Field(f"index:{i}", f"index of {dim.name}", str(place), (),
                            f"0 to {dim.size - 1}", "number", 0, dim.size - 1))  # fmt: skip
    return tuple(fields)


def _style(options: tuple[Option, ...]) -> str:
    return "buttons" if 1 < len(options) <= 3 else "menu"
