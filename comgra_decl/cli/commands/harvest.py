"""The command `comgra-decl harvest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comgra_decl.cli.printing import AsJson, print_json, print_line
from comgra_decl.cli.returned import returned_pair
from comgra_decl.cli.targets import fault_of_folder
from comgra_decl.errors import HarvestError

PANEL = "Look"


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION. The function takes no arguments and returns the model and the "
            "batches."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="Folder to create or to continue.")],
    select: Annotated[
        list[str], typer.Option(help="Modules, as a pattern of paths; can be repeated.")
    ],
    role: Annotated[str, typer.Option(help="output or input.")] = "output",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Largest number of rows; by default, all.")
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(help="Key of the mask of rows in each batch, such as attention_mask."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32 or float64; default: as it is.")
    ] = None,
    features: Annotated[
        int, typer.Option(help="Dim that becomes the columns; 1 for convolutions.")
    ] = -1,
    as_json: AsJson = False,
) -> None:
    """Store the activations of modules on a data set, to be read in batches.

    If the folder contains a part of the same harvest, it goes on where that part ends.
    """
    from comgra_decl.experiments.harvest import harvest

    if (fault := fault_of_folder(target)) is not None:  # before the model is loaded
        raise HarvestError(f"{str(target)!r} cannot be created: {fault}")
    model, batches = returned_pair(source, "(model, batches)", HarvestError)
    try:
        found = harvest(
            model,
            batches,
            target,
            select=select,
            role=role,
            rows=rows,
            mask=mask,
            dtype=dtype,
            features=features,
        )
    except ValueError as error:
        if isinstance(error, HarvestError):
            raise
        raise typer.BadParameter(str(error)) from error
    if as_json:
        facts = {"rows": found.rows, "complete": found.complete, "nodes": found.nodes}
        print_json({"path": str(found.path), **facts, "dtype": found.dtype})
    else:
        print_line(f"{found.path}: {found.rows} rows of {', '.join(found.nodes)}")
