"""The joined statistics of all ranks equal those of all their numbers, as numpy computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from comgra_decl.query.ranks import joining
from comgra_decl.query.ranks.joining import Joint, Ranks, how_joined, join_histograms
from comgra_decl.records import Piece, SlotInfo, SlotKey
from tests.support.shortened import examples

STATISTICS: dict[str, Callable[[NDArray[np.float64]], float]] = {
    "mean": np.mean,
    "abs_mean": lambda x: np.abs(x).mean(),
    "std": np.std,
    "min": np.min,
    "max": np.max,
    "abs_max": lambda x: np.abs(x).max(),
    "l2": lambda x: np.sqrt((x**2).sum()),
    "zero_fraction": lambda x: (x == 0).mean(),
    "nonfinite": lambda x: (~np.isfinite(x)).sum(),
    "rms": lambda x: np.sqrt((x**2).mean()),
}


def slot(
    batch_dim: int | None = 0,
    *,
    kind: str = "computed",
    role: str = "output",
    pass_: str = "forward",
    piece: Piece | None = None,
    shape: tuple[int, ...] = (4, 3),
) -> SlotInfo:
    key = SlotKey("n", role, 0, pass_)
    return SlotInfo(0, key, kind, "float32", shape, batch_dim, "", piece=piece)


def shard(start: int, size: int, whole: int) -> SlotInfo:
    """A part of a parameter [whole]."""
    return slot(None, kind="parameter", piece=Piece((start,), (size,)), shape=(whole,))


def stored(samples: list[NDArray[np.float64]]) -> dict[str, float]:
    """Returns what a rank stores about its samples, by numpy, as float32."""
    columns: dict[str, float] = {"rows": len(samples)}
    for name, statistic in STATISTICS.items():
        values = np.array([statistic(sample) for sample in samples])
        columns[f"{name}.mean"] = values.mean()
        columns[f"{name}.std"] = values.std()
        columns[f"{name}.abs_max"] = np.abs(values).max()
    return {name: float(np.float32(value)) for name, value in columns.items()}


def joined(ranks: list[dict[str, float] | None], slots: list[SlotInfo | None]) -> dict[str, float]:
    """Returns all columns of some ranks' tables, joined."""
    names = next(rank for rank in ranks if rank is not None)
    one = Ranks([[s] for s in slots])

    def read(column: str) -> NDArray[np.float64]:
        if column not in names:
            raise KeyError(column)
        return np.array([[np.nan if r is None else r[column]] for r in ranks])

    return {name: float(one.column(name, read)[0]) for name in names}


numbers = st.floats(-1e3, 1e3, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
samples = st.lists(numbers, min_size=3, max_size=3).map(np.array)
batches = st.lists(st.lists(samples, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=examples(150))
@given(batches)
def test_samples_of_ranks_have_the_statistics_of_the_global_batch(
    ranks: list[list[NDArray[np.float64]]],
) -> None:
    found = joined([stored(rank) for rank in ranks], [slot() for _ in ranks])
    whole = stored([sample for rank in ranks for sample in rank])
    for name, value in whole.items():
        scale = max(abs(whole[name.rpartition(".")[0] + ".abs_max"]) if "." in name else 1, 1e-30)
        # each stored mean is off by half a unit in the last place of float32
        assert found[name] == pytest.approx(value, rel=3e-7, abs=3e-7 * scale), name
        if name.endswith("abs_max"):
            assert found[name] == value, name


@settings(max_examples=examples(100))
@given(st.lists(samples, min_size=1, max_size=5), st.booleans())
def test_parts_of_a_tensor_have_the_statistics_of_the_whole(
    parts: list[NDArray[np.float64]], twice: bool
) -> None:
    """Ranks that hold the same part, as with replicated shards, count once."""
    count = len(parts)
    slots: list[SlotInfo | None] = [shard(3 * i, 3, 3 * count) for i in range(count)]
    tables = [stored([part]) for part in parts]
    if twice:
        slots, tables = [*slots, slots[0]], [*tables, tables[0]]
    found = joined(tables, slots)  # type: ignore[arg-type]
    whole = stored([np.concatenate(parts)])
    for name, value in whole.items():
        scale = max(float(np.abs(np.concatenate(parts)).max()), 1e-30)
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6 * scale), name
        if name.partition(".")[0] in ("min", "max", "abs_max", "nonfinite"):
            assert found[name] == value, name


def test_what_parts_do_not_determine_is_missing() -> None:
    tables = [{**stored([np.ones(3)]), "q50.mean": 1.0, "q50.std": 0.0, "q50.abs_max": 1.0}] * 2
    found = joined([*tables], [shard(0, 3, 6), shard(3, 3, 6)])
    assert np.isnan(found["q50.mean"])
    assert found["mean.mean"] == 1.0


def test_a_rank_with_an_empty_part_changes_nothing() -> None:
    empty = dict.fromkeys(stored([np.ones(3)]), np.nan)
    empty |= {"rows": 1.0, "l2.mean": 0.0, "nonfinite.mean": 0.0}
    part = stored([np.array([1.0, -2.0, 0.0])])
    slots = [shard(0, 3, 3), shard(3, 0, 3)]
    assert joined([part, empty], [*slots]) == pytest.approx(part, rel=1e-6)


def test_without_one_of_its_parts_a_tensor_has_no_statistics() -> None:
    """The rank of the other part is not recorded."""
    part = stored([np.array([1.0, -2.0, 0.0])])
    found = joined([part, part], [shard(0, 3, 6), shard(0, 3, 6)])
    assert np.isnan([value for name, value in found.items() if name != "rows"]).all()


def test_a_rank_without_the_slot_is_left_out() -> None:
    part = stored([np.array([1.0, -2.0, 0.0])])
    assert joined([part, None], [slot(), None]) == part
    assert joined([None, part], [None, slot()]) == part


def test_an_empty_batch_on_one_rank_changes_nothing() -> None:
    part = stored([np.array([1.0, -2.0, 0.0]), np.ones(3)])
    nothing = {name: 0.0 if name.startswith("nonfinite") else np.nan for name in part}
    assert joined([part, nothing | {"rows": 0.0}], [slot(), slot()]) == pytest.approx(part)
    both = joined([nothing | {"rows": 0.0}] * 2, [slot(), slot()])
    assert both["nonfinite.mean"] == 0.0
    assert np.isnan(both["mean.mean"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spreads_as_it_does_in_one_process(bad: float) -> None:
    good, ill = np.array([1.0, 2.0, 3.0]), np.array([1.0, bad, 3.0])
    with np.errstate(all="ignore"):
        ranks, whole = [stored([good, good]), stored([ill])], stored([good, good, ill])
    found = joined([*ranks], [slot(), slot()])
    for name in ("mean.mean", "mean.std", "mean.abs_max", "l2.abs_max", "max.mean"):
        np.testing.assert_equal(found[name], whole[name], err_msg=name)
    assert found["nonfinite.mean"] == pytest.approx(1 / 3)


def test_of_copies_the_first_counts() -> None:
    ranks = [stored([np.ones(3)]), stored([np.zeros(3)])]
    slots = [slot(None, kind="parameter", role="weight")] * 2
    assert joined([*ranks], [*slots]) == ranks[0]
    assert joined([None, ranks[1]], [None, slots[1]]) == ranks[1]


@pytest.mark.parametrize(
    ("one", "joint"),
    [
        (slot(), Joint.SAMPLES),
        (slot(None), Joint.SAMPLES),
        (slot(None, kind="buffer", role="running_mean"), Joint.SAMPLES),
        (slot(None, kind="parameter", pass_="grad:raw"), Joint.SAMPLES),
        (slot(None, kind="parameter"), Joint.COPIES),
        (slot(None, kind="parameter", pass_="grad"), Joint.COPIES),
        (slot(None, kind="parameter", pass_="update"), Joint.COPIES),
        (slot(None, kind="buffer", role="weight.exp_avg"), Joint.COPIES),
        (slot(None, kind="parameter", piece=Piece((0,), (2,))), Joint.PIECES),
    ],
)
def test_a_slot_says_how_its_ranks_are_joined(one: SlotInfo, joint: Joint) -> None:
    assert how_joined(one) is joint


values = st.lists(st.floats(-100, 100, width=16), min_size=0, max_size=30)


@settings(max_examples=examples(200))
@given(st.lists(values, min_size=1, max_size=4), st.integers(2, 9))
def test_joined_histograms_lose_nothing_and_misplace_little(
    ranks: list[list[float]], bins: int
) -> None:
    tables, low, high = [], [], []
    for rank in ranks:
        x = np.array(rank)
        edges = (x.min(), x.max()) if x.size else (np.nan, np.nan)
        flat = x.size and edges[0] == edges[1]
        whole = np.array([x.size] + [0] * (bins - 1))
        tables.append(whole if flat or not x.size else np.histogram(x, bins, range=edges)[0])
        low.append(edges[0])
        high.append(edges[1])
    counts = np.array(tables)
    found = join_histograms(counts, np.array(low), np.array(high))
    everything = np.concatenate([np.array(rank) for rank in ranks])
    assert found.sum() == everything.size
    assert (found >= 0).all()
    if not everything.size or everything.min() == everything.max():
        return
    edges_ = np.linspace(everything.min(), everything.max(), bins + 1)
    for edge, below in zip(edges_[1:-1], np.cumsum(found)[:-1], strict=True):
        cut = sum(_in_the_bin_of(edge, *rank) for rank in zip(counts, low, high, strict=True))
        assert abs(below - (everything < edge).sum()) <= cut + 0.5 + 1e-9


def _in_the_bin_of(edge: float, counts: NDArray[np.int64], low: float, high: float) -> int:
    """Returns how many of a rank's elements are in bins that the edge touches."""
    if not low <= edge <= high:
        return 0
    edges = np.linspace(low, high, len(counts) + 1)
    slack = 1e-9 * max(abs(low), abs(high), 1.0)
    touched = (edges[:-1] <= edge + slack) & (edges[1:] >= edge - slack)
    return int(counts[touched].sum())


def test_equal_histograms_add_up_bin_by_bin() -> None:
    counts = np.array([[1, 2, 3, 4], [10, 20, 30, 40]])
    found = join_histograms(counts, np.array([-1.0, -1.0]), np.array([3.0, 3.0]))
    np.testing.assert_array_equal(found, [11, 22, 33, 44])


def test_every_statistic_of_samples_is_joined() -> None:
    assert set(joining._WEIGHED) | set(joining._EXTREMES) <= {*STATISTICS, "negative_fraction"}
