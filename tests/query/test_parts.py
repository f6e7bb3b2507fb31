"""A part of a value equals numpy's slice of the whole, and no more than that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from comgra_decl.errors import UnknownNameError
from comgra_decl.query import open_run
from comgra_decl.store import Reader, RunWriter
from comgra_decl.store.database import new_context
from comgra_decl.store.parts import cut
from tests.store.truth import Truth

_READ = "/tensorstore/kvstore/file/bytes_read"


@given(st.data(), array_shapes(max_dims=4, max_side=6, min_side=0))
def test_a_part_is_what_numpy_makes_of_the_whole(data: st.DataObject, shape: Any) -> None:
    part = data.draw(basic_indices(shape))
    array = np.arange(np.prod(shape)).reshape(shape)
    box, rest = cut(part, shape)
    assert np.array_equal(array[box][rest], array[part])
    assert all(0 <= one.start <= one.stop <= n for one, n in zip(box, shape, strict=True))
    assert array[part].size or not array[box].size, "nothing is read for an empty part"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (7, "dim 0 of these values has 2 elements; index 7 is out of range"),
        (np.s_[0, -4], "dim 1 of these values has 3 elements"),
        (np.s_[0, 0, 0], "have 2 dims, not 3"),
        (np.s_[..., 0, ...], "at most one"),
        ([0, 1], "integers, slices and"),
        (True, "integers, slices and"),
        (None, "integers, slices and"),
        ("0", "integers, slices and"),
    ],
)
def test_what_is_no_part_is_said(part: Any, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        cut(part, (2, 3))


def bytes_read() -> int:
    found = ts.experimental_collect_matching_metrics(_READ)
    return sum(int(value["value"]) for metric in found for value in metric["values"])


def test_a_slice_of_a_large_tensor_reads_a_slice_of_the_file(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    large = truth.rng.standard_normal((1, 2500, 4000), np.float32)
    writer.commit([truth.batch(1, range(2), values={1: large})])
    writer.close()
    view = Reader(tmp_path / "run", context=new_context(cache_bytes=0)).view
    for part in (np.s_[0, 1234, 5:50], np.s_[..., -10:, ::-7], np.s_[:, 100:300:50, 3]):
        before = bytes_read()
        found = view.value(0, 1, None, part)
        assert found is not None
        assert np.array_equal(found, large[part])
        assert 0 < bytes_read() - before < 3e6
    before = bytes_read()
    whole = view.value(0, 1, 0)
    assert whole is not None
    assert np.array_equal(whole, large[0])
    assert bytes_read() - before > 3e7


def test_a_run_gives_parts_of_all_samples_or_of_one(tmp_path: Path) -> None:
    truth = Truth()
    writer = RunWriter.create(tmp_path / "run", truth.meta)
    value = truth.rng.normal(size=(2, 5, 3)).astype("float16")
    writer.commit([truth.batch(1, range(2), values={1: value})])
    writer.close()
    run = open_run(tmp_path / "run")
    assert np.array_equal(run.value("node 1", 0), value)
    assert np.array_equal(run.value("node 1", 0, part=np.s_[:, 1:3]), value[:, 1:3])
    found = run.value("node 1", 0, sample=1, part=np.s_[..., 0])
    assert found.dtype == np.float16
    assert np.array_equal(found, value[1, :, 0])
    with pytest.raises(UnknownNameError, match="have 2 dims, not 3"):
        run.value("node 1", 0, sample=1, part=np.s_[0, 0, 0])
