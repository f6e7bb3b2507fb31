"""The command `comgra-decl diagnose`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from comgra_decl.cli.printing import AsJson, RunPath, print_json
from comgra_decl.errors import Exit

if TYPE_CHECKING:
    from comgra_decl.rules import Correlation

PANEL = "Look"


class FailOn(StrEnum):
    """Lowest severity that causes exit code 3."""

    warning = "warning"
    error = "error"
    never = "never"


_FAILS = {
    FailOn.warning: frozenset({"warning", "error"}),
    FailOn.error: frozenset({"error"}),
    FailOn.never: frozenset[str](),
}

_FailOn = Annotated[FailOn, typer.Option(help="Lowest severity that causes exit code 3.")]
_Spec = Annotated[
    str | None,
    typer.Option(
        "--rules", help="Rules to use instead of the run's own: a YAML file, or `default`."
    ),
]
_All = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Also show findings that are explained by others, with their advice. With --json, "
        "print everything, whatever its size.",
    ),
]


_Together = Annotated[
    bool,
    typer.Option("--together/--no-together", help="Look for correlations, which takes longer."),
]


_Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import and run the custom rules that the run refers to."),
]


def command(
    run: RunPath,
    rules: _Spec = None,
    everything: _All = False,
    correlations: _Together = True,
    trust: _Trust = False,
    fail_on: _FailOn = FailOn.error,
    as_json: AsJson = False,
) -> None:
    """Report problems in a run, where they began, and what to do about them.

    Begins with the post-mortem if the program failed. Exits with code 3 if the program failed or an
    error is found; with `--fail-on warning`, a warning is enough. Damaged records, which cannot be
    checked, count as an error. JSON of more than 20 kB is shortened; "left_out" tells what is
    missing.
    """
    from comgra_decl.cli.diagnosis import described, rules_of
    from comgra_decl.query import open_run
    from comgra_decl.rules import diagnose, diagnose_and_correlate

    opened = open_run(run)
    declared = rules_of(rules)
    together: list[Correlation] = []
    if correlations:
        diagnosis, together = diagnose_and_correlate(opened, declared, trust=trust)
    else:
        diagnosis = diagnose(opened, declared, trust=trust)
    if as_json:
        content = described(opened, diagnosis, together)
        print_json(content, everything=everything)
    else:
        from comgra_decl.cli.diagnosis import print_diagnosis

        print_diagnosis(opened, diagnosis, together=together, everything=everything)
    severities = {finding.severity for finding in diagnosis.findings}
    failed = opened.ending is not None and opened.ending.failed
    severities |= {"error"} if diagnosis.incomplete or failed else set()
    if severities & _FAILS[fail_on]:
        raise typer.Exit(Exit.WANTING)
