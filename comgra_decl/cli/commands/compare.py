"""The command `comgra-decl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json, print_line
from comgra_decl.errors import ComgraError, Exit

if TYPE_CHECKING:
    from comgra_decl.query import Difference, Parting

PANEL = "Look"

_Other = Annotated[Path, typer.Argument(help="The run to compare with, such as a reference.")]
_Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        help="HERE=THERE: the names of a module in the two runs, if they differ. Can be repeated.",
    ),
]
_Tolerance = Annotated[
    float | None,
    typer.Option(
        help="Relative difference to treat as rounding error; by default, it depends on the dtype."
    ),
]
_Type = Annotated[str | None, typer.Option("--type", help="Type of execution; default: training.")]
_SHOWN = 10


def command(
    run: RunPath,
    other: _Other,
    name: _Names = None,
    tolerance: _Tolerance = None,
    type_: _Type = None,
    as_json: AsJson = False,
) -> None:
    """Find the first step and tensor, in the order of execution, at which two runs differ.

    Exits with code 3 if they differ by more than rounding error, and with code 4 if training may
    merely have amplified rounding error.
    """
    from comgra_decl.query import open_run, part

    found = part(
        open_run(run), open_run(other), names=_names(name or []), tolerance=tolerance, type=type_
    )
    if as_json:
        print_json(_described(found))
    else:
        for line in _lines(found):
            print_line(line)
    if found.first is not None:
        raise typer.Exit(Exit.UNCLEAR if found.gradual else Exit.WANTING)


def _names(pairs: list[str]) -> dict[str, str]:
    names = {}
    for pair in pairs:
        here, equals, there = pair.partition("=")
        if not (here and equals and there):
            raise ComgraError(f"--name must be HERE=THERE, got {pair!r}.")
        names[here] = there
    return names


def _lines(found: Parting) -> list[str]:
    from comgra_decl.query import sentences

    lines = sentences(found)
    if len(found.differences) > 1:
        more = len(found.differences) - 1
        lines += ["", f"Also different at step {found.differences[0].step}:"]
        lines += [f"  {each.name}: {each.numbers}" for each in found.differences[1 : 1 + _SHOWN]]
        lines += [f"  and {more - _SHOWN} more"] * (more > _SHOWN)
    for title, nodes in (("this run", found.only_here), ("the other run", found.only_there)):
        if nodes:
            rest = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
            lines += ["", f"Only in {title}: {', '.join(nodes[:_SHOWN])}{rest}"]
    if len(found.settings):
        lines += ["", "Settings that differ:"]
        lines += [f"  {key}: {here} | {there}" for key, here, there in found.settings.itertuples()]
    return lines


def _described(found: Parting) -> dict[str, Any]:
    """Return the result as JSON data; infinite and missing numbers become None."""
    import pandas as pd

    from comgra_decl.cli.describe import plain

    settings = found.settings.astype(object)
    settings = settings.mask(settings.map(lambda value: value is pd.NA), None)
    return {
        "first": None if found.first is None else _difference(found.first),
        "same_until": found.same_until,
        "gradual": found.gradual,
        "differences": [_difference(each) for each in found.differences],
        "steps": found.steps.tolist(),
        "drift": [plain(value) for value in found.drift.tolist()],
        "compared": found.compared,
        "only_here": list(found.only_here),
        "only_there": list(found.only_there),
        "settings": {
            str(key): {"here": plain(here), "there": plain(there)}
            for key, here, there in settings.itertuples()
        },
    }


def _difference(each: Difference) -> dict[str, Any]:
    from comgra_decl.cli.describe import plain

    found = {name: plain(value) for name, value in each._asdict().items()}
    found["pass"] = found.pop("pass_")
    return found
