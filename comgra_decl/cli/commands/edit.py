"""The command `comgra-decl edit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from comgra_decl.cli.printing import AsJson, print_json, print_line
from comgra_decl.cli.returned import returned_pair
from comgra_decl.errors import EditError

PANEL = "Look"


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION. The function takes no arguments and returns the model and a "
            "batch."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="File to create: .safetensors, or .pt for torch.load.")
    ],
    change: Annotated[
        list[str],
        typer.Option(
            help="An intervention as YAML, such as '{select: h.3.mlp, do: zero}'; can be repeated."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Save a model with interventions made permanent in its weights, where that is exact."""
    from comgra_decl.experiments.edit import check_target, edit

    if not target.name:
        raise EditError("the target must be a non-empty path, such as edited.safetensors")
    changes = [_parsed(text) for text in change]
    check_target(target)  # before the model is loaded
    model, batch = returned_pair(source, "(model, batch)", EditError)
    edited = edit(model, batch, changes)
    edited.save(target)
    if as_json:
        print_json(
            {"path": str(target), "changes": edited.changes, "difference": edited.difference}
        )
        return
    for line in edited.changes:
        print_line(line)
    print_line(
        f"{target}: differs from the model with the interventions by at most "
        f"{edited.difference:.2g} on the batch"
    )


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise EditError(f"--change is not valid YAML: {error}") from None
    if not isinstance(found, dict):
        raise EditError(
            f"--change must be a mapping such as '{{select: h.3, do: zero}}', got {text!r}"
        )
    return found
