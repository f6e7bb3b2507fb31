"""Whatever happens to a run's files: no number is wrong, and intact data can be read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comgra_decl.errors import ComgraError
from comgra_decl.records import Note, ScalarBatch, SlotKey, Structure
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.database import new_context
from comgra_decl.store.scalars import LOST
from comgra_decl.store.view import View
from tests.store.truth import Truth
from tests.support.shortened import shortened

Item = tuple[str, Callable[[View], Any]]
GRAPH = Structure("abc", [SlotKey("a", "output", 0, "forward")], ["computed"], [(0, 0, True)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with blocks, rows, raw values, scalars, notes, a graph and a document, in 9 commits."""
    run = tmp_path_factory.mktemp("whole") / "run"
    truth = Truth()
    writer = RunWriter.create(run, truth.meta)
    for turn, size in enumerate((1, 255, 3, 1, 40, 2, 1)):
        values = {0: truth.rng.normal(size=(2, 50)), 1: truth.rng.normal(size=(2, 300))}
        batch = truth.batch(
            size,
            range(4),
            values=values,
            structure=GRAPH if turn == 1 else None,
            documents={"report": {"turn": turn}},
        )
        said = ScalarBatch(np.arange(3), truth.rng.normal(size=3), ["loss"] * 3, ["train"] * 3)
        said.notes = [Note(turn, "train", float(turn), f"note {turn}")]
        writer.commit([batch], [said])
    writer.close()
    return run


def items(view: View) -> Iterator[Item]:
    """Yields everything that can be read from the run, piece by piece."""
    yield "slots", lambda v: v.slots
    yield "graph", lambda v: v.structure("abc")
    yield "document", lambda v: v.document("report")
    yield "scalars", lambda v: v.scalars.tolist()
    for column in range(0, 12, 5):
        yield f"series {column}", series_of(column)
    yield "sample series", lambda v: v.series("smp", 1, 0, 1)
    yield "heat", lambda v: v.heat("agg", 2)
    for record in (0, 1, 150, 255, 256, 258, 259, 260, 284, 299, 300, 301, 302):
        yield from items_of(record)
    assert view.n == 303


def series_of(column: int) -> Callable[[View], Any]:
    return lambda view: view.series("agg", 1, column)


def items_of(record: int) -> Iterator[Item]:
    """Returns everything that can be read from one record."""
    yield f"facts {record}", lambda v: v.records[record]
    yield f"row {record}", lambda v: v.row("agg", record)
    yield f"histogram {record}", lambda v: v.row("hist", record)
    yield f"value {record}", lambda v: v.value(record, 1)
    yield f"samples {record}", lambda v: (v.samples(record), v.extra(record))


def open_alone(run: Path) -> View:
    """A view that shares no cache with any other."""
    return Reader(run, context=new_context(cache_bytes=0)).view


def outcome(view: View, read: Callable[[View], Any]) -> Any:
    """Returns the result of a query; None if it is rejected as damaged."""
    try:
        return read(view)
    except ComgraError:
        return None


def agree(a: Any, b: Any) -> bool:
    if isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=b.dtype.kind == "f"))
    return bool(a == b)


def flip(place: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[min(len(content) - 1, int(len(content) * place))] ^= 0x10
        file.write_bytes(content)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "half": cut(0.5),
    **{f"flipped at {place}": flip(place) for place in (0, 0.6, 1, 0.1, 0.35, 0.85)},
    "empty": cut(0),
    "short": cut(0.99),
}


@pytest.mark.parametrize("kind", shortened(DAMAGES, tried=3))
def test_no_damage_to_any_file_gives_a_wrong_number(whole: Path, tmp_path: Path, kind: str) -> None:
    truth = open_alone(whole)
    expected = {name: read(truth) for name, read in items(truth)}
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    assert len(files) >= 9
    opened = 0
    for number, file in enumerate(files):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        DAMAGES[kind](run / file)
        try:
            view = open_alone(run)
        except ComgraError:
            continue
        opened += 1
        lost = {record for record in range(view.n) if view.records[record, 0] < 0}
        for name, read in items(view):
            found = outcome(view, read)
            if found is None or _about_lost(name, lost):
                continue
            agreed = agree(found, expected[name])
            assert agreed or view.damage, (kind, str(file), name)
            assert agreed or _missing(found, expected[name]), (kind, str(file), name)
        assert not lost or view.damage
        assert all(view.superseded[record] for record in lost)
    assert opened >= 5, "most files are about few records"


def _missing(found: Any, expected: Any) -> bool:
    """Whether everything that differs is reported as missing: nothing was made up."""
    if isinstance(found, list):  # the scalars
        return all(a in (b, (LOST, *a[1:])) for a, b in zip(found, expected, strict=True))
    if isinstance(found, tuple):  # samples and facts of a record: empty if they are damaged
        return all(a == b or not a for a, b in zip(found, expected, strict=True))
    if not isinstance(found, np.ndarray):
        return False
    same = (found == expected) | ((found != found) & (expected != expected))
    rest = found[~same]
    return bool(np.isnan(rest).all() if found.dtype.kind == "f" else (rest == 0).all())


def _about_lost(name: str, lost: set[int]) -> bool:
    """Whether an item concerns lost records, or all records, and then has NaN for the lost ones."""
    last = name.split()[-1]
    if name.startswith(("series", "sample series", "heat")):
        return bool(lost)
    return last.isdigit() and int(last) in lost


def test_the_loss_of_one_commit_leaves_the_others(whole: Path, tmp_path: Path) -> None:
    truth = open_alone(whole)
    expected = {name: read(truth) for name, read in items(truth)}
    most = 0
    for number, file in enumerate(sorted((whole / "trace.ocdbt" / "d").iterdir())):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        (run / "trace.ocdbt" / "d" / file.name).unlink()
        try:
            view = open_alone(run)
        except ComgraError:
            continue
        whole_items = [
            name for name, read in items(view) if agree(outcome(view, read), expected[name])
        ]
        most = max(most, len(whole_items))
    assert most >= 0.8 * len(expected)
