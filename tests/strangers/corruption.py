"""Damages one file of a run at random, and compares everything read with the run's content.

`python -m tests.strangers.corruption COUNT SEED` does so COUNT times and prints the outcomes; the
tests repeat a few. A read may end with an error of ours or lack data, but everything it returns
must be what was recorded. Each copy is read in a separate process, with limits on time and memory.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from comgra_decl.errors import ComgraError
from comgra_decl.query import Run, limit_cache, open_run
from comgra_decl.store.verify import verify
from tests.strangers.reading_folders import MEMORY

SECONDS = 180
NODES = ("0", "3")
STEPS = (0, 17, 31, 40, 44)

Found = dict[str, Any]
"""The results of reads, by name: flat mappings of places to numbers or texts."""


def reads(run: Run) -> dict[str, Callable[[], Mapping[Any, Any]]]:
    """Returns all kinds of reads; each returns a flat mapping, in which lost data is missing."""
    found: dict[str, Callable[[], Mapping[Any, Any]]] = {
        "steps": lambda: {int(step): 1 for step in run.steps},
        "nodes": lambda: dict(enumerate(run.nodes)),
        "slots": lambda: _cells(run.slots),
        "spec": lambda: {"spec": run.spec.model_dump_json()},
        "meta": lambda: {"facts": str(run.facts), "config": str(run.config), "at": run.started},
        "kpis": lambda: {(r.name, r.type, r.step): r.value for r in run.kpis().itertuples()},
        "notes": lambda: {str(row): 1 for row in run.notes().to_dict("records")},
        "records": lambda: _cells(run.records.set_index("step")),
        "modules": lambda: {"modules": str(run.modules)} if run.modules else {},
        "report": lambda: {k: str(v) for k, v in run.report.items() if k != "damage"},
        "findings": lambda: {"findings": run.findings().to_csv()},
        "edges": lambda: {"edges": str(run.edges())},
        "chunks": lambda: _of_chunks(run),
    }
    for statistic in ("std", "l2"):
        found[f"heat {statistic}"] = partial(_of_heat, run, statistic)
        for node in NODES:
            found[f"series {node} {statistic}"] = partial(_of_series, run, node, statistic)
    for node in NODES:
        found[f"histograms {node}"] = partial(_of_histograms, run, node)
    for step in STEPS:
        found[f"step {step}"] = partial(_of_step, run, step)
        for node in NODES:
            found[f"value {node} {step}"] = partial(_of_value, run, node, step)
            found[f"histogram {node} {step}"] = partial(_of_histogram, run, node, step)
    return found


def _cells(table: pd.DataFrame) -> dict[Any, Any]:
    return {(str(row), str(name)): v for name in table for row, v in table[name].items()}


def _flat(array: Any) -> dict[int, Any]:
    return dict(enumerate(np.asarray(array).ravel().tolist()))


def _of_heat(run: Run, statistic: str) -> dict[Any, Any]:
    return _cells(run.heat(statistic))


def _of_series(run: Run, node: str, statistic: str) -> dict[Any, Any]:
    sample = run.slot(node).samples(statistic)[1].items()
    return dict(run.series(node, statistic)) | {("sample", at): value for at, value in sample}


def _of_step(run: Run, step: int) -> dict[Any, Any]:
    samples = _cells(run.samples(step)).items()
    return _cells(run.row(step)) | {("sample", *at): value for at, value in samples}


def _of_value(run: Run, node: str, step: int) -> dict[Any, Any]:
    return _flat(run.value(node, step))


def _of_histogram(run: Run, node: str, step: int) -> dict[Any, Any]:
    return _flat(run.slot(node).histogram(step)[0])


def _of_histograms(run: Run, node: str) -> dict[Any, Any]:
    steps, counts, ranges = run.slot(node).histograms()
    return {int(s): (c.tolist(), r.tolist()) for s, c, r in zip(steps, counts, ranges, strict=True)}


def _of_chunks(run: Run) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for chunk in run.chunks():
        for step, row in zip(chunk.steps.tolist(), chunk.aggregates, strict=True):
            found |= {(step, at): number for at, number in _flat(row).items()}
    return found


def everything(path: Path) -> tuple[Found, list[str]]:
    """Returns the results of all reads of a run, and the errors of ours that others raised."""
    limit_cache(0)
    try:
        run = open_run(path)
    except ComgraError as error:
        return {}, [f"open: {error}"]
    found: Found = {}
    errors = []
    for name, read in reads(run).items():
        try:
            found[name] = dict(read())
        except ComgraError as error:
            errors.append(f"{name}: {error}")
    return found, errors


def differences(found: Found, truth: Found) -> list[str]:
    """Returns everything that was not recorded: a wrong number, or one where there was none."""
    wrong = []
    for name, said in found.items():
        known = truth[name]
        for place, value in said.items():
            if _nothing(value) or (place in known and _same(value, known[place])):
                continue
            wrong.append(f"{name} {place}: {value!r:.80} in place of {known.get(place)!r:.80}")
    return wrong


def _nothing(value: Any) -> bool:
    return (
        value is None
        or value is pd.NA
        or (isinstance(value, float | np.floating) and np.isnan(value))
    )


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or str(one) == str(other)


Damage = Callable[[bytearray, random.Random, list[Path]], bytearray | None]


def _flip(data: bytearray, rng: random.Random, _: list[Path]) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _byte(data: bytearray, rng: random.Random, _: list[Path]) -> bytearray:
    at = rng.randrange(len(data))
    data[at] = (data[at] + rng.randrange(1, 256)) % 256
    return data


def _zero(data: bytearray, rng: random.Random, _: list[Path]) -> bytearray:
    at, count = rng.randrange(len(data)), rng.choice([4, 64, 4096])
    data[at : at + count] = bytes(len(data[at : at + count]))
    return data


def _cut(data: bytearray, rng: random.Random, _: list[Path]) -> bytearray:
    return data[: rng.randrange(len(data))]


def _grow(data: bytearray, rng: random.Random, _: list[Path]) -> bytearray:
    return data + rng.randbytes(rng.choice([1, 50, 5000]))


def _dup(data: bytearray, rng: random.Random, _: list[Path]) -> bytearray:
    at = rng.randrange(len(data))
    return data[: at + 40] + data[at:]


def _twenty(data: bytearray, rng: random.Random, others: list[Path]) -> bytearray:
    for _ in range(20):
        data = _flip(data, rng, others)
    return data


def _swap(_: bytearray, rng: random.Random, others: list[Path]) -> bytearray:
    return bytearray(rng.choice(others).read_bytes())


def _delete(*_: object) -> None:
    return None


DAMAGES: dict[str, Damage] = {
    "flip": _flip,
    "byte": _byte,
    "zero": _zero,
    "cut": _cut,
    "grow": _grow,
    "dup": _dup,
    "twenty flips": _twenty,
    "swap": _swap,
    "delete": _delete,
}
SHARES = {"flip": 3, "swap": 3}


def damaged(run: Path, rng: random.Random) -> tuple[str, str, bool]:
    """Damages a file; returns its name, how, and whether the file changed."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    sizes = [max(1, path.stat().st_size) ** 0.5 for path in files]
    victim = rng.choices(files, sizes)[0]
    how = rng.choices([*DAMAGES], [SHARES.get(name, 1) for name in DAMAGES])[0]
    before = victim.read_bytes()
    after = DAMAGES[how if before else "grow"](bytearray(before), rng, files)
    if after is None:
        victim.unlink()
    else:
        victim.write_bytes(after)
    return str(victim.relative_to(run)), how, after is None or bytes(after) != before


def judged(run: Path, truth: Found, report: Path) -> None:
    """In a child: reads a damaged run, and writes what is wrong with the results."""
    signal.alarm(SECONDS)
    found, errors = everything(run)
    told: dict[str, Any] = {"wrong": differences(found, truth)[:5], "errors": len(errors)}
    told["missing"] = sum(len(truth[name]) for name in truth) - sum(map(len, found.values()))
    try:
        verdict = verify(run)
        told["whole"] = verdict.whole
    except ComgraError:
        told["whole"] = False
    report.write_text(json.dumps(told))


def forked(work: Callable[[], None], errors: Path) -> int:
    """Runs something in a child, and returns how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        work()
        code = 0
    except BaseException:  # noqa: BLE001  (it is told)
        traceback.print_exc()
    finally:
        os._exit(code)


def fuzzed(runs: list[Path], count: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Damages copies of runs; returns the outcome for each.

    Must be called before any run is opened, because a forked child could not open one afterwards.
    """
    rng = random.Random(seed)
    truths = [_truth(run, folder / f"truth-{number}") for number, run in enumerate(runs)]
    results = []
    for number in range(count):
        which = rng.randrange(len(runs))
        victim = folder / "victim"
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(runs[which], victim)
        file, how, changed = damaged(victim, rng)
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        truth = truths[which]
        code = forked(lambda: judged(victim, truth, report), folder / "errors")  # noqa: B023
        told = json.loads(report.read_text()) if report.exists() else {}
        told |= {"number": number, "file": file, "how": how, "changed": changed, "code": code}
        if code:
            told["stderr"] = (folder / "errors").read_text()[-1500:]
        if code or told["wrong"]:
            shutil.copytree(victim, folder / f"kept-{seed}-{number}")
        results.append(told)
    return results


def _truth(run: Path, into: Path) -> Found:
    """Reads an entire run, in a child."""
    import pickle

    def read() -> None:
        found, errors = everything(run)
        assert not errors, errors
        into.write_bytes(pickle.dumps(found))

    assert forked(read, into.with_suffix(".err")) == 0, into.with_suffix(".err").read_text()
    found: Found = pickle.loads(into.read_bytes())
    return found


def bad(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what must not have happened: wrong numbers, crashes, hangs."""
    return [told for told in results if told["code"] or told["wrong"]]


def summary(results: list[dict[str, Any]]) -> str:
    """Returns a table: the count of each kind, how often `verify` reported it, what was wrong."""
    lines = [
        "how | tried | told by verify | wrong | crashed or hung",
        "--- | --: | --: | --: | --:",
    ]
    for how in sorted({told["how"] for told in results}):
        mine = [told for told in results if told["how"] == how]
        count: Counter[str] = Counter()
        for told in mine:
            count["told"] += not told.get("whole", True)
            count["wrong"] += bool(told.get("wrong"))
            count["dead"] += bool(told["code"])
        cells = [how, len(mine), count["told"], count["wrong"], count["dead"]]
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(lines)


def main() -> None:
    """Creates runs in another process, and damages copies of them."""
    from tests.support import forked as fresh

    count, seed = int(sys.argv[1]), int(sys.argv[2])
    folder = Path(tempfile.mkdtemp(prefix="corruption-"))
    made = fresh.forked(Path.cwd(), "-m", "tests.strangers.corruption", "make", folder)
    assert made.returncode == 0, made.stderr
    results = fuzzed([folder / "group" / "run", folder / "small"], count, seed, folder)
    sys.stdout.write(summary(results) + "\n")
    for told in bad(results):
        sys.stdout.write(json.dumps(told) + "\n")
    changed = sum(told["changed"] for told in results)
    sys.stdout.write(f"{len(results)} tried, {changed} changed a file, {len(bad(results))} bad\n")
    if not bad(results):
        shutil.rmtree(folder)
    sys.exit(bool(bad(results)))


def make(folder: Path) -> None:
    """Records a run, and makes a compacted copy of it."""
    from comgra_decl.store.copying import copy_run
    from tests.strangers.folders import make_run

    run = make_run(folder)
    copy_run(run, folder / "small", compact=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        main()
