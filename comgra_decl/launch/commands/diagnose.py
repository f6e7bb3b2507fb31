"""The command `comgra-decl diagnose`."""

from __future__ import annotations

from typing import Annotated

import typer

from comgra_decl.launch.printing import AsJson, RunPath, print_json

PANEL = "Look"

_Spec = Annotated[
    str | None,
    typer.Option("--rules", help="Rules instead of the run's own: a YAML file, or `default`."),
]
_All = Annotated[
    bool, typer.Option("--all", help="Show what other findings explain, too, and all advice.")
]


def command(
    run: RunPath, rules: _Spec = None, everything: _All = False, as_json: AsJson = False
) -> None:
    """Say what is wrong in a run, where it began, and what to do about it."""
    from comgra_decl.launch.diagnosing import described, rules_of
    from comgra_decl.query import open_run
    from comgra_decl.rules import correlate, diagnose

    opened = open_run(run)
    declared = rules_of(rules)
    diagnosis = diagnose(opened, declared)
    together = correlate(opened, declared)
    if as_json:
        print_json(described(opened, diagnosis, together))
    else:
        from comgra_decl.launch.diagnosis_tables import print_diagnosis

        print_diagnosis(opened, diagnosis, together=together, everything=everything)
