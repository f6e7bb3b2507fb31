"""Text and JSON output of `comgra-decl diagnose`, and the rules given with `--rules`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from comgra_decl.cli.describe import describe_ending
from comgra_decl.errors import SpecError
from comgra_decl.query.report import verify_command
from comgra_decl.terminal import console

if TYPE_CHECKING:
    from comgra_decl.query import Run
    from comgra_decl.rules import Check, Correlation, Diagnosis, Finding
    from comgra_decl.spec.rules import Rules


def rules_of(text: str | None) -> Rules | None:
    """Return the rules declared in a YAML file, at its top level or under `rules`.

    Raises:
        SpecError: the file does not exist or does not declare rules.
    """
    if text is None or text == "default":
        return None if text is None else "default"
    import yaml
    from pydantic import TypeAdapter, ValidationError

    from comgra_decl.spec import rules as declared
    from comgra_decl.store.location import require_path

    require_path(text)

    try:
        content = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise SpecError([f"--rules: {text} cannot be read as YAML: {error}"]) from None
    if isinstance(content, dict) and set(content) == {"rules"}:
        content = content["rules"]
    try:
        found: Rules = TypeAdapter(declared.Rules).validate_python(content)
    except ValidationError:
        raise SpecError([f"--rules: {text} must be a mapping of rules to parameters"]) from None
    return found


def described(
    run: Run, diagnosis: Diagnosis, together: Sequence[Correlation] = ()
) -> dict[str, Any]:
    """Return a diagnosis as plain JSON data."""
    from comgra_decl.rules import health, unseen

    return {
        "run": str(run.path),
        "state": run.state,
        "ending": describe_ending(run),
        "records": diagnosis.records,
        "health": [_answered(check) for check in health(diagnosis)],
        "unseen": unseen(diagnosis),
        "findings": [finding.to_json() for finding in diagnosis.findings],
        "together": [correlation.to_json() for correlation in together],
        "checked": diagnosis.checked,
        "damage": [*diagnosis.damage],
        "unchecked": {entry.rule: entry.reason for entry in diagnosis.unchecked},
    }


def _answered(check: Check) -> dict[str, Any]:
    return {
        "part": check.question.part,
        "question": check.question.text,
        "colour": check.colour,
        "state": check.state,
        "numbers": check.numbers,
        "evidence": check.evidence,
        "findings": [finding.rule for finding in check.findings],
    }


_SIGNS = {
    "red": ("\u2717", "bold red"),
    "amber": ("!", "bold yellow"),
    "green": ("\u2713", "bold green"),
    "partly": ("\u25d0", "cyan"),
    "unchecked": ("?", "dim"),
    "absent": ("\u2013", "dim"),
}
_STYLES = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


def print_diagnosis(
    run: Run,
    diagnosis: Diagnosis,
    *,
    together: Sequence[Correlation] = (),
    everything: bool = False,
) -> None:
    """Print findings, most important first, and the rules that could not be checked."""
    from comgra_decl.rules.finding import consequences_of, roots_of

    out = console()
    first = roots_of(diagnosis.findings)
    if diagnosis.damage:
        out.print(_damage(run, diagnosis), "", sep="\n")
    if (ended := _ended(run)) is not None:
        out.print(ended, "", sep="\n")
    out.print(_title(run, diagnosis, len(first), len(diagnosis.findings) - len(first)))
    out.print("", _health(diagnosis), sep="\n")
    for number, finding in enumerate(first, 1):
        consequences = consequences_of(finding, diagnosis.findings)
        out.print("", _block(f"{number}.", finding), sep="\n")
        if everything:
            for place, consequence in enumerate(consequences, 1):
                block = _block(f"{number}.{place}", consequence)
                out.print(Padding(block, (0, 0, 0, 3)))
        elif consequences:
            names = ", ".join(f"{f.rule} ({f.severity})" for f in consequences)
            text = Text(f"explains: {names}; use --all to show them", style="dim")
            out.print(Padding(text, (0, 0, 0, 3)))
    if together:
        out.print("", Text("Correlations", style="bold"), sep="\n")
        for correlation in together:
            out.print(Padding(Text(f"- {correlation.sentence}"), (0, 0, 0, 3)))
    if diagnosis.unchecked:
        out.print("", _unchecked(diagnosis), sep="\n")


def _ended(run: Run) -> Group | None:
    """Return why the program ended, or which rank no longer responds."""
    ending = run.ending
    if ending is None:
        silent = run.first_stopped
        return None if silent is None else Group(Text(silent, style="bold red"))
    lines: list[Text | Padding] = [Text(ending.headline, style="bold red")]
    for title, part in ending.parts:
        lines.append(Text(title, style="bold"))
        lines += [Padding(Text(line), (0, 0, 0, 3)) for line in part]
    return Group(*lines)


def _damage(run: Run, diagnosis: Diagnosis) -> Group:
    """Return what could not be checked because it is damaged, and what to do."""
    lines = [Padding(Text(f"- {loss}"), (0, 0, 0, 3)) for loss in diagnosis.damage]
    head = Text("Part of this run is damaged and was not checked:", style="bold red")
    advice = f"To see which data is lost and which can be recovered: {verify_command(run.path)}"
    return Group(head, *lines, Text(advice))


def _title(run: Run, diagnosis: Diagnosis, count: int, explained: int) -> Text:
    text = Text(f"{run.group}/{run.name}", style="bold")
    records = f"{diagnosis.records} record{'s' * (diagnosis.records != 1)}"
    text.append(f"  {records} of training steps checked, ", style="not bold")
    if not count:
        failed = _denied(diagnosis)
        plain = failed or diagnosis.damage
        text.append("nothing found", style="bold" if plain else "bold green")
        if diagnosis.damage:
            text.append(" in the undamaged part")
        if failed:
            text.append(f", but {failed} of the checks below failed")
        return text
    text.append(f"{count} finding{'s' * (count != 1)}", style="bold red")
    if explained:
        text.append(f" that explain {explained} more", style="not bold")
    return text


def _denied(diagnosis: Diagnosis) -> int:
    """Return how many checklist questions are answered "no"."""
    from comgra_decl.rules import health

    return sum(check.colour in ("red", "amber") for check in health(diagnosis))


def _health(diagnosis: Diagnosis) -> Group:
    """Return the checklist, one line per question, followed by what it could not check."""
    from comgra_decl.rules import health, unseen

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    part = ""
    for check in health(diagnosis):
        if check.question.part != part:
            part = check.question.part
            table.add_row("", Text(part.upper(), style="bold"), "")
        sign, style = _SIGNS[check.colour]
        dim = "dim" if check.colour in ("unchecked", "absent") else ""
        table.add_row(
            Text(sign, style=style), Text(check.question.text, style=dim), Text(_numbers(check))
        )
    notes = [Text(sentence, style="dim") for sentence in unseen(diagnosis)]
    return Group(table, *notes)


def _numbers(check: Check) -> str:
    """Return the text next to an answer: values or findings, and how many rules were checked."""
    parts = [check.state] if check.colour in ("partly", "unchecked", "absent") else []
    told = check.numbers or ", ".join(dict.fromkeys(each.rule for each in check.findings))
    return "; ".join([*parts, *([told] if told else [])])


def _block(number: str, finding: Finding) -> Group:
    head = Text(f"{number} ")
    head.append(f"{finding.severity} ", style=_STYLES[finding.severity])
    head.append(finding.rule, style="bold")
    head.append(f"  {finding.span}", style="dim")
    lines = [Padding(line, (0, 0, 0, 3)) for line in _lines(finding)]
    return Group(head, *lines)


def _lines(finding: Finding) -> Iterator[Text]:
    yield Text(finding.message)
    if finding.also:
        names = ", ".join(str(place) for place in finding.others[:4])
        more = ", ..." if finding.also > 4 else ""
        yield Text(f"same in {finding.also} more: {names}{more}", style="dim")
    if finding.chain:
        yield Text("begins: " + " → ".join(str(link.place) for link in finding.chain), style="cyan")
    if finding.because:
        yield Text(f"probably because of {finding.because}", style="dim")
    yield Text(f"What to do: {finding.advice}", style="green")


def _unchecked(diagnosis: Diagnosis) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=f"{len(diagnosis.checked)} rules were checked; these could not be",
        title_justify="left",
        title_style="bold",
        show_header=False,
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", style="dim")
    for entry in diagnosis.unchecked:
        table.add_row(entry.rule, entry.reason)
    return table
