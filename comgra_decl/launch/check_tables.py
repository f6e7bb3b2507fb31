"""What the command line says of a run that was checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from comgra_decl.launch.tables import console

if TYPE_CHECKING:
    from comgra_decl.store.verify import Damage, Verdict


def print_verdict(verdict: Verdict) -> None:
    """Prints what a check has found, and what to do about it."""
    out, facts = console(), Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(verdict):
        facts.add_row(name, text)
    out.print(facts)
    if verdict.damages:
        out.print("", _damages(verdict.damages), sep="\n")


def print_beside(damages: Sequence[Damage]) -> None:
    """Prints what is damaged beside the databases of a run, which no version of them holds."""
    out = console()
    out.print("", Text("damaged beside the trace", style="red"), sep="\n")
    out.print(_damages(damages))
    out.print("Repeat the experiment with --for RUN: it notes its verdict anew.")


def _facts(verdict: Verdict) -> Iterator[tuple[str, str | Text]]:
    yield "run", str(verdict.path)
    if verdict.state is not None:
        yield "state", verdict.state
    yield "checked", f"{verdict.checked} chunks and keys, {verdict.records} records"
    if verdict.whole:
        yield "whole", Text("yes, everything can be read", style="green")
        return
    more = " or more" if verdict.more else ""
    yield "damaged", Text(f"in {len(verdict.damages)} places{more}", style="red")
    if all(damage.heals for damage in verdict.damages) and not verdict.more:
        yield "what to do", f"nothing is lost: comgra-decl compact {verdict.path}"
    elif verdict.whole_version is None:
        yield "what to do", "there is no earlier version that is whole"
    else:
        upto = "" if verdict.whole_step is None else f", up to step {verdict.whole_step}"
        yield (
            "whole until",
            f"version {verdict.whole_version}: {verdict.whole_records} records{upto}",
        )
        yield (
            "what to do",
            f"rescue that: comgra-decl cp --version {verdict.whole_version} {verdict.path} TARGET",
        )


def _damages(damages: Sequence[Damage]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("where", "steps", "what cannot be seen", "because"):
        table.add_column(heading, overflow="fold")
    for damage in damages:
        table.add_row(damage.where, _steps(damage), damage.lost, damage.reason)
    return table


def _steps(damage: Damage) -> str:
    if damage.steps is None:
        return "-"
    first, last = damage.steps
    return str(first) if first == last else f"{first} to {last}"
