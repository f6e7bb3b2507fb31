"""Tensors with very many samples: the first are recorded individually, and all are aggregated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.records import STATISTICS
from comgra_decl.stats import Reducer, device, finalise, moments
from comgra_decl.stats.moments import KEPT, MOST_ROWS
from comgra_decl.stats.sample_selection import choose_samples

from .recording import Tensors, check, raw_step, reduce, reducer
from .test_device import elsewhere


@pytest.fixture(params=["host", pytest.param("device without Triton", marks=pytest.mark.slow)])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reducer:
    monkeypatch.setattr(device, "launcher_class", lambda _: None)
    return reducer() if request.param == "host" else elsewhere(None)


def many(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def test_their_statistics_are_those_of_all_samples(by: Reducer) -> None:
    x = many(MOST_ROWS + 300_000, 5)
    x[1000:200_000] += 1e4
    x[7] = 0
    made: Tensors = [
        (x, 0),
        (x[: MOST_ROWS + 1].T, 1),  # not contiguous
        (x[: MOST_ROWS + 1, 0], 0),
        (x.to(torch.bfloat16), 0),
        (x > 0, 0),
        (torch.complex(x, x), 0),
    ]
    reduced = reduce(made, by)
    check(made, reduced)
    assert reduced.rows.tolist() == [KEPT] * len(made)
    assert reduced.raw.nbytes == KEPT * len(made) * 64


def test_one_that_is_not_finite_shows_in_the_aggregates(by: Reducer) -> None:
    x = many(MOST_ROWS + 3000, 4)
    y = x.clone()
    x[-1, 0], y[-1, 0], y[-2, 1] = torch.inf, torch.nan, -torch.inf
    check([(x, 0), (y, 0)], reduce([(x, 0), (y, 0)], by))


def test_fewer_have_rows_each(by: Reducer) -> None:
    x = many(MOST_ROWS, 2)
    reduced = reduce([(x, 0), (many(3, 0), 0), (many(MOST_ROWS + 1, 0), 0)], by)
    assert reduced.rows.tolist() == reduced.samples.tolist() == [MOST_ROWS, 3, MOST_ROWS + 1]
    assert reduced.aggregates == {}


def test_samples_are_chosen_among_those_that_have_rows() -> None:
    x = many(MOST_ROWS + 9, 2)
    step = raw_step(reduce([(x, 0)]))
    step.info.batch_size = len(x)
    labels = ["a"] * len(x)
    labels[KEPT - 1] = labels[KEPT] = "b"
    step.labels = lambda: labels
    choose_samples(step, 3)
    assert step.info.samples == [0, KEPT - 1, 1]
    (batch,) = finalise([step], statistics=STATISTICS, sample_count=3, bins=None)
    mean = batch.samples[0, 0, :, STATISTICS.index("mean")]
    np.testing.assert_allclose(mean, x[[0, KEPT - 1, 1]].mean(1), rtol=1e-6)


def test_parts_are_joined_as_if_they_were_one() -> None:
    raw = reduce([(many(1000, 7) + 50, 0)]).raw.T
    parts = [moments.moments(raw[:, a:b], 7) for a, b in ((0, 1), (1, 600), (600, 1000))]
    (whole,) = [moments.joined(moments.moments(raw, 7)[None])]
    np.testing.assert_allclose(moments.joined(np.stack(parts)), whole, rtol=1e-12)


def test_opt_in_statistics_are_aggregated_over_all_samples_too(tmp_path: Path) -> None:
    """Like the recorded ones; a tensor without samples has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    x = many(MOST_ROWS + 9, 2)
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**", "capture": ["output"]}},
        "stats": ["mean", "rms", {"name": "q50", "nodes": ["1"]}],
        "samples": {"count": 2},
    }
    with comgra.trace(spec, root=tmp_path, group="g") as session, torch.no_grad():
        outputs = [model[0](x), model(x)]
    assert session.path is not None
    run = comgra.open_run(session.path)
    for node, output in zip(("0", "1"), outputs, strict=True):
        rows = output.double().numpy()
        found = {
            "mean": rows.mean(1),
            "rms": np.sqrt(np.square(rows).mean(1)),
            "q50": np.median(rows, 1) if node == "1" else np.full(len(rows), np.nan),
        }
        for name, expected in found.items():
            for over, by_hand in (("mean", expected.mean()), ("std", expected.std())):
                series = run.series(node, name, over_batch=over)
                np.testing.assert_allclose(series.iloc[0], by_hand, rtol=1e-5, err_msg=name)
            single = run.slot(node).samples(name)[1]
            np.testing.assert_allclose(single.iloc[0], expected[1], rtol=1e-5)
