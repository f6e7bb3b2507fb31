"""Run folders as an attacker could create them: copies of a good run with one change."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.store.database import Database, encode, new_context
from tests.store.test_damage import change_json, overwrite, sealed

STEPS = 45
SPEC = {
    "nodes": {
        "all": {"select": "**", "capture": ["output", "output_grad"], "values": True},
        "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
    },
    "histogram": {"bins": 8, "elements": 256},
    "samples": {"count": 2},
    "schedule": {"first": 1, "every": 1},
    "store": {"commit_interval": 0},
}


def train(steps: int = STEPS) -> None:
    """Trains a small network; each number follows from its step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, 8, generator=drawn), torch.randint(3, (6,), generator=drawn)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        comgra.kpi("lr", 0.001 * step)


def make_run(root: Path, name: str = "run", **changes: Any) -> Path:
    """Records a good run, `root/group/name`."""
    with comgra.trace({**SPEC, **changes}, root=root, group="group", name=name):
        train()
        comgra.note("half-way")
    return root / "group" / name


Attack = Callable[[Path], None]


def read(run: Path, key: str) -> Any:
    return Database(run, new_context(cache_bytes=0)).read_json(key)


def keys(run: Path, start: str) -> list[str]:
    found = Database(run, new_context(cache_bytes=0)).keys(start, start + "\x7f")
    assert found, start
    return found


def meta(**changes: Any) -> Attack:
    return lambda run: change_json(run, "meta/run.json", **changes)


def many_statistics(count: int) -> Attack:
    return lambda run: meta(statistics=[f"s{n}" for n in range(count)])(run)


def head(**changes: Any) -> Attack:
    return lambda run: change_json(run, "head", **changes)


def spec(**changes: Any) -> Attack:
    def apply(run: Path) -> None:
        old = read(run, "meta/run.json")["spec"]
        change_json(run, "meta/run.json", spec={**old, **changes})

    return apply


def slots(change: Callable[[int, dict[str, Any]], None]) -> Attack:
    def apply(run: Path) -> None:
        for key in keys(run, "slots/"):
            rows = read(run, key)
            for number, row in enumerate(rows):
                change(number, row)
            overwrite(run, key, encode(rows, key))

    return apply


def each_slot(**changes: Any) -> Attack:
    return slots(lambda _, row: row.update(changes))


def document(name: str, content: Any) -> Attack:
    def apply(run: Path) -> None:
        known = read(run, "head")["documents"]
        revision = known.get(name, 3)
        key = f"docs/{name}.json"
        overwrite(run, key, encode(content, f"{key}@{revision}"))
        change_json(run, "head", documents={**known, name: revision})

    return apply


def meta_text(value: bytes) -> Attack:
    """Replaces the configuration with text that `json.dumps` would never produce."""

    def apply(run: Path) -> None:
        key = "meta/run.json"
        text = json.dumps({**read(run, key), "config": 0}).encode()
        overwrite(run, key, sealed(text.replace(b'"config": 0', b'"config": ' + value), key))

    return apply


def long_text(size: int) -> Attack:
    """Like `meta_text`, but takes no memory before it is used."""
    return lambda run: meta_text(b'"' + b"x" * size + b'"')(run)


def arrays(**changes: Any) -> Attack:
    def apply(run: Path) -> None:
        key = keys(run, "arrays/")[0]
        rows = read(run, key)
        for row in rows:
            row.update(changes)
        overwrite(run, key, encode(rows, key))

    return apply


def bomb(start: str, value: Callable[[], bytes]) -> Attack:
    return lambda run: overwrite(run, keys(run, start)[0], value())


def graphs(run: Path) -> None:
    for key in keys(run, "graphs/"):
        overwrite(run, key, encode({"nodes": [[]] * 10, "edges": [[0, 10**9, True]]}, key))


def in_place_of(name: str, make: Callable[[Path], Any]) -> Attack:
    """Replaces a file in the folder with something else ("d/*" is the first data file)."""

    def apply(run: Path) -> None:
        path = run / name
        if name.endswith("*"):
            path = sorted(path.parent.iterdir())[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            path.rename(run.parent / "elsewhere")
        else:
            path.unlink(missing_ok=True)
        make(path)

    return apply


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def ranks_garbage(run: Path) -> None:
    for name in ("9" * 20, "9" * 200, "-1", "²", "a b"):
        (run / "ranks" / name / "trace.ocdbt").mkdir(parents=True)


def many_ranks(run: Path) -> None:
    for number in range(1, 400):
        folder = run / "ranks" / str(number)
        folder.mkdir(parents=True)
        (folder / "trace.ocdbt").symlink_to(run / "trace.ocdbt")


def logs_of_a_billion_rows(run: Path) -> None:
    found = read(run, "head")["logs"]
    change_json(run, "head", logs=dict.fromkeys(found, (1 << 26) - 1))


CHECK = "checks/batch_mixing.json"
MARKUP = "<img src=x onerror=alert(1)>"
TARGET = "strangers_payload.ran"
ENTRY = {"_target_": TARGET}
HEAVY = {
    f"r{n}": {
        "when": "mean ** (9.0**99) > 1 or " + " or ".join(["early(mean) > 1"] * 40),
        "node": "*" * 20 + "a" + "*a" * 30 + "b",
    }
    for n in range(20)
}
DUNDER = [
    "().__class__.__bases__",
    "__import__('os').system('true')",
    "9**9**9**9**9 > mean",
    "1" * 400 + " > mean",
]

ATTACKS: dict[str, Attack] = {
    "nodes that climb": slots(
        lambda i, row: row.update(
            node=["../../../../tmp/x", "/tmp/x", "..\\z", "CON", ".", "..", "a\0b"][i % 7]
        )
    ),
    "markup everywhere": each_slot(
        node=MARKUP, role=MARKUP, dtype="<b>", module_class="<script>", kind="<i>"
    ),
    "a slot of 1e30 elements": each_slot(shape=[10**15, 10**15]),
    "a slot of negative size": each_slot(shape=[-1]),
    "a batch dim that there is not": each_slot(batch_dim=99),
    "a shape of text": each_slot(shape=["a"]),
    "a shape that is true": each_slot(shape=[True, 3]),
    "names that are numbers": each_slot(node=7, role=None),
    "two million names": slots(lambda _, row: row.update(names=["n"] * 200_000)),
    "a billion bins": meta(bins=10**9),
    "bins that are negative": meta(bins=-1),
    "a trillion samples": meta(sample_count=10**12),
    "samples that are negative": meta(sample_count=-3),
    "other samples than the arrays have": meta(sample_count=7),
    "other bins than the arrays have": meta(bins=9),
    "three million statistics": many_statistics(3 * 10**6),
    "statistics of one name": meta(statistics=["mean"] * 9),
    "facts of another form": meta(facts={"versions": 3, "git": [1], "host": "x", "command": {}}),
    "terminal escapes in facts": meta(
        facts={"command": "\x1b]0;owned\x07\x1b[2J\x1b[31mFAKE", "script": "[bold red]rich[/]"}
    ),
    "terminal escapes in names": slots(
        lambda i, row: row.update(node=f"\x1b[2Jn{i}", module_class="[link=http://evil]x[/link]")
    ),
    "a config 900 deep": meta_text(b"[" * 900 + b"]" * 900),
    "a config 100,000 deep": meta_text(b"[" * 100_000 + b"]" * 100_000),
    "a config of 500 MB": long_text(500 << 20),
    "a config of 30 million lists": meta_text(b"[" + b"[]," * 30_000_000 + b"1]"),
    "a config that is no mapping": meta(config=[1, 2]),
    "a time that is not": meta(started=float("nan")),
    "a spec that is none": meta(spec={"nodes": 3, "nonsense": []}),
    "an interpolation in the spec": spec(run={"root": "${oc.env:HOME}"}),
    "addresses in the spec": spec(
        run={"root": "s3://127.0.0.1:9/x"},
        on_finding={"notify": {"url": "http://127.0.0.1:9/x", "severity": "hint"}, "log": "hint"},
    ),
    "heavy rules": spec(rules=HEAVY),
    "a heavy glob": spec(rules={"r": {"when": "mean > 1", "node": "a" + "**a" * 40 + "b"}}),
    "rules that reach for Python": spec(rules={f"r{n}": {"when": w} for n, w in enumerate(DUNDER)}),
    "rules that name code": spec(rules={"mine": ENTRY, "os": {"_target_": "os.system"}}),
    "code wherever the spec takes it": spec(
        rules={"mine": ENTRY},
        stats=["mean", {"name": "own", **ENTRY}],
        samples={"count": 2, "by": ENTRY},
        types={"by": ENTRY},
        keep={"when": [ENTRY]},
    ),
    "16 million records": head(n=(1 << 24) - 1),
    "67 million numbers": head(scalars=(1 << 26) - 1),
    "logs of 67 million rows": logs_of_a_billion_rows,
    "documents that climb": head(documents={"../../x": 1, "findings": 1 << 60}),
    "documents of no revision": head(documents={"findings": [], "report": {}, "modules": "x"}),
    "sessions that are none": head(
        sessions=[{"record": 10**9, "scalar": -5, "note": "x", "time": "y"}] * 1000
    ),
    "sessions that are text": head(sessions="abc"),
    "times before the world": head(time=-1e308, step=10**30),
    "a writer that is none": head(writer=[1], error={"a": 1}, usage=7),
    "numbers that unpack to 2 GB": bomb("scalars/", lambda: zlib.compress(b"\0" * (2 << 30), 1)),
    "numbers that are noise": bomb("scalars/", lambda: b"noise"),
    "arrays with a path": arrays(name="../../../../etc"),
    "arrays of another store": arrays(kvstore={"driver": "http"}, driver="n5"),
    "findings with markup": document(
        "findings",
        {
            "findings": [
                {"rule": MARKUP, "severity": "<b>", "message": MARKUP, "advice": "[x](javascript:)"}
            ],
            "unchecked": {MARKUP: MARKUP},
        },
    ),
    "findings that are none": document("findings", [1, 2]),
    "modules that are none": document("modules", [{"name": ["x"], "class": 5}, 5, None]),
    "modules that are text": document("modules", "abc"),
    "a report that is none": document(
        "report", {"entries": 5, "warnings": "abc", "writer": 3, "refused": [1]}
    ),
    "a keep that is none": document("keep", {"steps": 5, "unseen": "x"}),
    "ranks that are none": document("ranks", {"rank": "x", "recorded": 5}),
    "graphs that are none": graphs,
    "links beside the database": in_place_of("spec.yaml", link("/etc/passwd")),
    "code beside the database": in_place_of(
        "custom.py", lambda path: path.write_text("raise SystemExit(9)")
    ),
    "a link in the place of the database": in_place_of("trace.ocdbt", link("../elsewhere")),
    "a link in the place of the data": in_place_of("trace.ocdbt/d", link("../../elsewhere")),
    "a link in the place of a data file": in_place_of("trace.ocdbt/d/*", link("/etc/passwd")),
    "a pipe as a data file": in_place_of("trace.ocdbt/d/*", os.mkfifo),
    "a folder as a data file": in_place_of("trace.ocdbt/d/*", Path.mkdir),
    "a device as a data file": in_place_of("trace.ocdbt/d/*", link("/dev/zero")),
    "a pipe as the manifest": in_place_of("trace.ocdbt/manifest.ocdbt", os.mkfifo),
    "a device as the manifest": in_place_of("trace.ocdbt/manifest.ocdbt", link("/dev/zero")),
    "a manifest of a terabyte": in_place_of("trace.ocdbt/manifest.ocdbt", sparse),
    "a data file of a terabyte": in_place_of("trace.ocdbt/d/*", sparse),
    "tags of YAML": in_place_of(
        "spec.yaml", lambda path: path.write_text("!!python/object/apply:os.system ['true']\n")
    ),
    "a pipe as an experiment": in_place_of(CHECK, os.mkfifo),
    "a device as an experiment": in_place_of(CHECK, link("/dev/zero")),
    "a link as an experiment": in_place_of(CHECK, link("/etc/passwd")),
    "a folder of experiments elsewhere": in_place_of("checks", link("/etc")),
    "an experiment of a terabyte": in_place_of(CHECK, sparse),
    "an experiment 100,000 deep": in_place_of(CHECK, lambda path: path.write_text("[" * 100_000)),
    "a pipe beside the database": in_place_of("notes.txt", os.mkfifo),
    "ranks that are no numbers": ranks_garbage,
    "400 ranks": many_ranks,
}


def made(good: Path, attack: str, into: Path) -> Path:
    """Returns a copy of a good run, corrupted, in its own group."""
    run = into / attack.replace(" ", "-").replace(",", "") / "group" / "run"
    shutil.copytree(good, run)
    ATTACKS[attack](run)
    return run
