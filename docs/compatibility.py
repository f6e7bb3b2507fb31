"""Generate `compatibility.md` from the newest table of the zoo and the pages in `compatibility/`.

python -m benchmarks.neutrality && python -m benchmarks.scripts && python -m docs.compatibility
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.neutrality.explained import explanation
from benchmarks.scripts import page as scripts
from benchmarks.scripts.catalogue import entries
from benchmarks.verdicts import Table

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("compatibility.md")
PIECES = Path(__file__).with_name("compatibility")
RESULTS = ROOT / "benchmarks" / "results"
JUDGED = PIECES / "judged.md"
BESIDE = ("ways.md", "distributed.md", "judged.md")
"""Pages included in this one. All except `judged.md` are handwritten."""

Verdict = dict[str, Any]

INTRODUCTION = """\
# Compatibility

This page lists the programs and training techniques that comgra_decl supports, states what is
recorded, and presents the evidence that tracing changes nothing.
{contents}
## A zoo of models, compared bit for bit

`make neutrality` trains each program in a zoo for {steps} steps, once without tracing and once with
full tracing. In the traced run, every step is recorded, with the graph, values, all modules and all
captures: outputs, inputs, their gradients, parameters, their gradients before and after clipping,
updates, buffers and optimizer states. Both runs start from the same seed. The following items are
compared bit for bit:

- the loss, all parameters, gradients and buffers after each step;
- optimizer states and the states of the random generators of Python, NumPy and torch;
- `requires_grad`, training flags, attributes of modules and parameters, keys of the state dict;
- hooks on modules, tensors and optimizers, global hooks, modes, torch's global flags, threads,
  signal handlers, and every function in torch and in the model's library that tracing could have
  replaced.

The records are checked as well. They must contain each module that returned a tensor, as observed
by a torch hook. The recorded mean of that tensor must match a separate computation in float64, and
the recorded losses must be identical to those of the program.

{measured}\
Of {tried} programs, {equal} are bit-identical{close}. In total, {compared:,} items were compared,
{means:,} recorded values were checked, and {called:,} modules were found. All verdicts are in
[neutrality-{date}.json](../benchmarks/results/neutrality-{date}.json). Measured on {date}.
{machine}.

{families}

## Exceptions

{exceptions}

## The programs

{programs}
"""

FAMILIES = {
    "torch": "torch layers, custom networks, training techniques",
    "examples": "examples of this repository",
    "transformers": "models from transformers in tiny configurations",
    "timm": "image models from timm",
    "torchvision": "models from torchvision",
}


_MEASURED = """\
Programs that are bit-identical are trained once more, while only time and memory are measured: two
steps are profiled, the memory of two others is measured, and all others are timed. This training is
compared in the same way.

"""
"""The paragraph on the third training; older tables have none."""


def main() -> None:
    """Write `judged.md` and `compatibility.md`."""
    tables = sorted(RESULTS.glob("scripts-*.json"))
    if tables:
        table = Table(**json.loads(tables[-1].read_text()))
        JUDGED.write_text(scripts.documentation(table, entries()))
    PAGE.write_text(page(newest()))
    sys.stdout.write(f"wrote {PAGE}\n")


def newest() -> dict[str, Any]:
    """Return the newest table of verdicts on the zoo."""
    files = sorted(RESULTS.glob("neutrality-*.json"))
    content: dict[str, Any] = json.loads(files[-1].read_text())
    return content


def page(table: dict[str, Any]) -> str:
    """Return `compatibility.md` for a table of verdicts."""
    verdicts: dict[str, Verdict] = table["verdicts"]
    counts = Counter(verdict["status"] for verdict in verdicts.values())
    close = (
        f" and {counts['close']} differ slightly under `torch.compile` "
        "(see [exceptions](#exceptions))"
        if counts["close"]
        else ""
    )
    pieces = _pieces()
    zoo = INTRODUCTION.format(
        contents="".join(f"\n{_link(text)}" for text in pieces) + ("\n" if pieces else ""),
        steps=10,
        measured=_MEASURED if any("measured" in v["seconds"] for v in verdicts.values()) else "",
        tried=len(verdicts),
        equal=counts["equal"],
        close=close,
        compared=_sum(verdicts, "compared"),
        means=_sum(verdicts, "means"),
        called=_sum(verdicts, "called"),
        machine=_machine(table["machine"]),
        date=table["date"],
        families=_families(verdicts),
        exceptions=_exceptions(verdicts),
        programs=_programs(verdicts),
    )
    return "\n".join([zoo, *pieces])


def _pieces() -> list[str]:
    """Return the pages in `compatibility/`, with headings one level lower and adapted links."""
    found = [PIECES / name for name in BESIDE if (PIECES / name).exists()]
    return [
        re.sub(r"^(?=#+ )", "#", path.read_text(), flags=re.MULTILINE).replace("](../", "](")
        for path in found
    ]


def _link(text: str) -> str:
    title = text.splitlines()[0].lstrip("# ")
    anchor = "".join(c for c in title.lower() if c.isalnum() or c in " -").replace(" ", "-")
    return f"- [{title}](#{anchor})"


def _sum(verdicts: dict[str, Verdict], key: str) -> int:
    return sum(verdict.get(key, 0) for verdict in verdicts.values())


def _machine(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {v}" for name, v in machine["packages"].items() if v)
    cores, threads = machine["cores"], machine["torch_threads"]
    thread = "one thread" if threads == 1 else f"{threads} threads"
    where = f"{machine['processor']}, {cores} cores, {thread} each"
    return f"{where}, Python {machine['python']}, {packages}"


def _of(verdicts: dict[str, Verdict], family: str) -> dict[str, Verdict]:
    return {name: v for name, v in verdicts.items() if name.partition("/")[0] == family}


def _families(verdicts: dict[str, Verdict]) -> str:
    lines = [
        "| family | programs | bit-identical | recorded modules | items compared |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for family, what in FAMILIES.items():
        mine = _of(verdicts, family)
        if not mine:
            continue
        equal = sum(v["status"] == "equal" for v in mine.values())
        called = _sum(mine, "called")
        recorded = called - sum(len(v.get("missing", ())) for v in mine.values())
        lines.append(
            f"| {what} | {len(mine)} | {equal} | {recorded:,} of {called:,} | "
            f"{_sum(mine, 'compared'):,} |"
        )
    return "\n".join(lines)


def _exceptions(verdicts: dict[str, Verdict]) -> str:
    lines = []
    for name, verdict in sorted(verdicts.items()):
        if verdict["sound"] and verdict["status"] == "equal":
            continue
        lines.append(f"- **`{name}`**: {_facts(verdict)} {explanation(name)}".rstrip())
    return "\n".join(lines) or "None."


def _facts(verdict: Verdict) -> str:
    """Return a sentence that describes an exception."""
    parts = [verdict["status"]]
    if verdict.get("largest"):
        loss, parameter = verdict["largest"]["loss"], verdict["largest"]["parameter"]
        parts.append(f"losses differ by up to {loss:.2g}, parameters by up to {parameter:.2g}")
    parts += [
        f"{key}: {'; '.join(f'`{text}`' for text in verdict[key][:3])}"
        for key in ("missing", "wrong", "faults")
        if verdict.get(key)
    ]
    if verdict.get("error"):
        parts.append(verdict["error"])
    return "; ".join(parts) + "."


def _programs(verdicts: dict[str, Verdict]) -> str:
    sections = []
    for family, what in FAMILIES.items():
        mine = _of(verdicts, family)
        if not mine:
            continue
        named = ", ".join(
            name.partition("/")[2]
            + ("" if v["sound"] and v["status"] == "equal" else " (see above)")
            for name, v in sorted(mine.items())
        )
        sections.append(f"**{what[0].upper()}{what[1:]}** ({len(mine)}): {named}.")
    return "\n\n".join(sections)


if __name__ == "__main__":
    main()
