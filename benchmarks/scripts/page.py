"""Format verdicts for storage, the terminal and the documentation."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from typing import Any

from benchmarks.verdicts import Table

PROMISES = ("neutral", "records", "modules", "numbers", "gradients", "losses", "graph", "said")


def stored(verdict: Any) -> dict[str, Any]:
    """Return a verdict in its stored form."""
    return asdict(verdict) | {"sound": verdict.sound}


def line(verdict: dict[str, Any]) -> str:
    """Return one verdict as lines for a terminal, with one line per broken promise."""
    if verdict["skipped"] or verdict["broken"]:
        why = f"skipped: {verdict['skipped']}" if verdict["skipped"] else verdict["broken"]
        return f"{verdict['name']:44} {why}"
    seconds = verdict["seconds"]
    head = f"{verdict['name']:44} {'sound' if verdict['sound'] else 'NOT SOUND':10}"
    head += f"{seconds['plain']:.1f} -> {seconds['traced']:.1f} s  {_facts(verdict)}"
    wrong = [
        f"        {name}: {text}"
        for name, promise in verdict["promises"].items()
        for text in promise["wrong"]
    ]
    found = [
        f"        {f['severity']} {f['rule']}: {f['message'][:160]}" for f in verdict["findings"]
    ]
    messages = [f"        message: {text[:200]}" for text in verdict["messages"][:6]]
    return "\n".join([head, *wrong, *found, *messages])


def _facts(verdict: dict[str, Any]) -> str:
    facts = verdict["facts"]
    return ", ".join(f"{value} {name}" for name, value in facts.items())


def summary(table: Table) -> str:
    """Return the counts of verdicts and of broken promises."""
    counts: Counter[str] = Counter()
    for verdict in table.verdicts.values():
        counts["skipped" if verdict["skipped"] else "broken" if verdict["broken"] else "tried"] += 1
        counts["sound"] += verdict["sound"]
        for name, promise in verdict["promises"].items():
            counts[f"not {name}"] += bool(promise["wrong"])
    return ", ".join(f"{number} {name}" for name, number in counts.items())


# -- the page --------------------------------------------------------------------------------------

_PAGE = """\
# Public scripts, judged

`make scripts` runs {tried} unmodified training scripts from {repositories} public repositories, of
which {sound} pass every check below. None of their code is part of this repository. It is fetched
at the commits listed below. Small generated data sets, in memory or in files, replace downloads.
The scripts' own arguments keep the runs short; otherwise, a run ends with Ctrl-C after the given
number of steps. All results are in
[scripts-{date}.json](../../benchmarks/results/scripts-{date}.json). Measured on {date}. {machine}.

Each script runs three times:

1. **Watched**, without tracing. Global torch hooks count the script's optimizer steps and record
   which modules it calls in which mode. They also record the outputs of these modules, the norms of
   all gradients, the tensors on which the script calls `backward`, and the connections made by
   autograd.
2. **Plain**, without tracing or hooks. After each optimizer step, the program computes digests of
   all parameters, gradients and states, and of the random generators of torch, NumPy and Python.
3. **Traced** with `COMGRA=debug` (or `+comgra=debug`), with the same digests.

| column | check |
| --- | --- |
| neutral | plain and traced runs have the same digests after every step, print the same lines \
(except for times) and write the same files |
| records | there is one run, with exactly the steps that `debug` declares, and a record of each \
evaluation of a model that is trained |
| modules | each module with parameters that the script calls has a recorded output, or the report \
states that it is not part of a model |
| numbers | at each recorded step, the mean of each module's first output in training equals the \
mean observed in the watched run |
| gradients | each parameter that had a gradient when its optimizer stepped has a gradient with \
the same norm in the record |
| losses | for every step, recorded or not, the values of the tensors on which `backward` was \
called are stored |
| graph | the graph connects everything that autograd connects, inputs and targets reach a loss, \
and no node is isolated |
| messages | no module that was called is reported as never called, and no error is logged |

[catalogue.yaml](../../benchmarks/scripts/catalogue.yaml) states what counts as a step in each
script and lists the classes whose `forward` the script calls directly. These facts were determined
by reading the scripts. If several optimizers step at different rates (`steps: seen`), the
comparison uses the steps that the traced run has counted. Each loss must belong to exactly one
step, in order, and each step must contain the calls observed between its losses.

The comparison of means excludes calls beyond the recorded ones, modules called before any module
that has parameters, and modules in the call that creates them. It also excludes models that are
evaluated only after another model in the same phase (`evaluated`).

Each cell contains the number of successful comparisons or, in **bold**, the number of failed
comparisons and the total. Findings are counted as errors / warnings / hints. This page does not
evaluate whether they are correct. CPU is the processor time of the whole program in seconds, plain
→ traced, including the start of tracing{forked}. The JSON file contains the text of each finding
and message.

{table}

## Failed checks

{wrong}

## Findings

{findings}

## Messages

{messages}

## Scripts that could not be run

{skipped}

## The scripts

{scripts}
"""

_COLUMNS = {"said": "messages"}
"""Column headings that differ from the stored name of the promise."""

_MEANINGS = {
    r"step \d+ (has begun and not ended|was not completed)": (
        "The program ended within a step: it called `backward()`, but no optimizer step followed. "
        "The losses of this step are stored, but it has no record. Scripts:"
    ),
    r"comgra: (\w+): ": (
        r"A finding from the rule `\1` was logged but is not in the final diagnosis. Scripts:"
    ),
    r"comgra_decl/\S+ (UserWarning: [^.(]{1,80})": (
        r"A torch warning attributed to a line in comgra_decl (`\1`...). Scripts:"
    ),
}
"""Sentences that replace messages of several scripts, by a pattern that occurs in the messages."""

_ORDER = {"error": 0, "warning": 1, "hint": 2}


def documentation(table: Table, known: dict[str, Any]) -> str:
    """Return the page for this table.

    Args:
        table: all verdicts.
        known: the entries of the catalogue by name.
    """
    tried = {n: v for n, v in table.verdicts.items() if not v["skipped"] and not v["broken"]}
    tried = {name: tried[name] for name in known if name in tried}
    return _PAGE.format(
        repositories=len({known[name].repo for name in tried}),
        tried=len(tried),
        sound=sum(v["sound"] for v in tried.values()),
        machine=_machine(table.machine),
        date=table.date,
        forked=table.machine.get("remark", ""),
        table=_table(tried),
        wrong=_wrong(tried),
        findings=_findings(tried),
        messages=_messages(tried),
        skipped=_skipped(table, known),
        scripts=_scripts(known),
    )


def _machine(machine: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {v}" for name, v in machine.get("packages", {}).items() if v)
    return f"One thread each, Python {machine.get('python', '?')}, {packages}"


def _table(tried: dict[str, dict[str, Any]]) -> str:
    promises = " | ".join(_COLUMNS.get(promise, promise) for promise in PROMISES)
    lines = [
        f"| script | {promises} | steps | train + eval | graph | findings | CPU |",
        "| --- |" + " ---: |" * (len(PROMISES) + 5),
    ]
    for name, verdict in tried.items():
        cells = [_cell(verdict["promises"].get(promise)) for promise in PROMISES]
        facts, seconds = verdict["facts"], verdict["seconds"]
        counts = Counter(finding["severity"] for finding in verdict["findings"])
        records = f"{facts.get('records', 0)} + {facts.get('evaluations', 0)}"
        found = " / ".join(str(counts[severity]) for severity in _ORDER)
        graph = f"{facts.get('nodes', 0)}, {facts.get('edges', 0)}"
        spent = f"{seconds['plain']:.1f} → {seconds['traced']:.1f}"
        steps = facts.get("steps", facts.get("optimizer steps", 0))
        lines.append(
            f"| {name} | {' | '.join(cells)} | {steps} | {records} | {graph} | {found} | {spent} |"
        )
    return "\n".join(lines)


def _cell(promise: dict[str, Any] | None) -> str:
    if promise is None:
        return "-"
    number, wrong = promise["compared"], len(promise["wrong"])
    return f"**{wrong} of {number}**" if wrong else str(number)


def _wrong(tried: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, verdict in tried.items():
        broken = [
            f"  - {promise}: {_escaped(text)}"
            for promise, content in verdict["promises"].items()
            for text in content["wrong"][:5]
        ]
        if broken:
            lines += [f"- **{name}**", *broken]
    return "\n".join(lines) or "None."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _findings(tried: dict[str, dict[str, Any]]) -> str:
    found: dict[tuple[int, str, str], Counter[str]] = {}
    for name, verdict in tried.items():
        for finding in verdict["findings"]:
            severity = finding["severity"]
            key = (_ORDER.get(severity, len(_ORDER)), severity, finding["rule"])
            found.setdefault(key, Counter())[name] += 1
    lines = ["| severity | rule | scripts |", "| --- | --- | --- |"]
    for (_, severity, rule), counts in sorted(found.items()):
        names = (f"{name} ({n})" if n > 1 else name for name, n in counts.items())
        lines.append(f"| {severity} | [`{rule}`](../rules.md#{rule}) | {', '.join(names)} |")
    return "\n".join(lines)


def _messages(tried: dict[str, dict[str, Any]]) -> str:
    texts: dict[str, list[str]] = {}
    for name, verdict in tried.items():
        rules = {finding["rule"] for finding in verdict["findings"]}
        shown = [m for m in verdict["messages"] if not any(f" {rule}: " in m for rule in rules)]
        for message in shown[:3]:
            texts.setdefault(_meaning(message), []).append(name)
    lines = [f"- {text} {', '.join(dict.fromkeys(names))}." for text, names in texts.items()]
    return "\n".join(lines) or "None."


def _meaning(message: str) -> str:
    """Return the sentence that introduces the scripts with this message or a similar one."""
    for pattern, sentence in _MEANINGS.items():
        if found := re.search(pattern, message):
            return found.expand(sentence)
    return f'"{_escaped(message[:300])}":'


def _skipped(table: Table, known: dict[str, Any]) -> str:
    lines = []
    for name in known:
        verdict = table.verdicts.get(name)
        if verdict is None:
            lines.append(f"- **{name}**: not run for this table")
        elif verdict["skipped"] or verdict["broken"]:
            lines.append(f"- **{name}**: {_escaped(verdict['skipped'] or verdict['broken'])}")
    return "\n".join(lines) or "None."


def _scripts(known: dict[str, Any]) -> str:
    lines = ["| script | repository | command | training loop |", "| --- | --- | --- | --- |"]
    for name, entry in known.items():
        address = f"https://github.com/{entry.repo}/tree/{entry.commit}"
        where = f"{entry.folder}/{entry.at}".replace("./", "").replace("/.", "").strip(".")
        command = f"`python {entry.command.replace('|', '')}`"
        command += f" in `{where}`" if where else ""
        command += f", Ctrl-C after {entry.stop} steps" if entry.stop else ""
        lines.append(f"| {name} | [{entry.repo}]({address}) | {command} | {entry.shape} |")
    return "\n".join(lines)
