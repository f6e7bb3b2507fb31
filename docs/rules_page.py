"""Generate `rules.md` from the rules: `python -m docs.rules_page`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import PydanticUndefined

from comgra_decl.rules import Rule, SlotRule
from comgra_decl.rules.catalogue import FAMILIES, known
from comgra_decl.spec.described import descriptions

PAGE = Path(__file__).with_name("rules.md")

HEAD = """\
# Rules

What each rule looks for, its options and defaults, where they come from, and how to respond to a
finding. This page is generated from the rules by `python -m docs.rules_page`; a test fails if it is
out of date. [Findings](findings.md) explains how to choose, tune and write rules.

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")


def page() -> str:
    """Return the whole page."""
    rules = known().values()
    parts = [HEAD, "| rule | finds | severity |\n|---|---|---|\n"]
    parts += [f"| [{r.name}](#{r.name}) | {_title(r)} | {r.severity} |\n" for r in rules]
    for family in FAMILIES:
        parts.append(f"\n## {family.capitalize()}\n")
        of_family = [r for r in rules if r.__module__.split(".")[2] == family]
        parts += [line for rule in of_family for line in _section(rule)]
    return "".join(parts)


def _section(rule: type[Rule]) -> Iterator[str]:
    yield f"\n### {rule.name}\n\n{_title(rule)} ({rule.severity})\n\n"
    yield f"{rule.definition}\n\n"
    yield f"*What to do.* {rule.advice}\n\n"
    yield f"*Source.* {rule.source}\n\n"
    if issubclass(rule, SlotRule):
        names = ", ".join(f"`{name}`" for name in rule.statistics)
        which = "statistics" if len(rule.statistics) > 1 else "statistic"
        yield f"*Needs* {rule.needs}{f'; the {which} {names}' if names else ''}.\n\n"
    causes = (*rule.explained_by, *rule.explained_by_earlier)
    if causes:
        yield f"*Explained by* {', '.join(causes)}, if found.\n\n"
    yield "| option | default | meaning |\n|---|---|---|\n"
    for name, field in rule.Parameters.model_fields.items():
        default = "" if field.default is PydanticUndefined else f"`{field.default}`"
        about = " ".join(descriptions(rule.Parameters).get(name, "").split()).replace("|", "\\|")
        if name != "severity":
            yield f"| `{name}` | {default} | {about} |\n"
    yield "| `severity` | | `error`, `warning` or `hint`; by default the rule's own severity. |\n"


def _title(rule: type[Rule]) -> str:
    return (rule.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    main()
