"""What works with a model whose parameters are distributed over processes, and needs no copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.pictures.test_induction import by_loops
from tests.probing.attention import HEADS, outputs
from tests.ranks.launching import run_ranks
from tests.ranks.sharded_language import language, words

pytestmark = pytest.mark.slow  # starts two processes


def test_each_rank_harvests_what_the_whole_model_computes(tmp_path: Path) -> None:
    for code, output in run_ranks("-m", "tests.ranks.harvesting", tmp_path, timeout=120):
        assert code == 0, output
        assert "distributed over processes" in output  # `look`, which needs a copy
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs")
    for code, text in run_ranks("-m", "tests.ranks.sharded_language", out, timeout=120):
        assert code == 0, text
        assert "distributed over processes" in text  # the probe, which needs a copy
    return comgra.open_run(out / "sharded" / "run")


def tokens() -> torch.Tensor:
    return torch.cat([words(rank) for rank in range(2)])


def test_the_records_of_the_training_are_those_of_the_whole_model(run: Run) -> None:
    found = outputs(language(), tokens())
    assert len(found) > 10
    for path, (value,) in found.items():
        recorded = run.slot(path or "Language").value(0)
        np.testing.assert_allclose(recorded, value.numpy(), atol=1e-6, err_msg=path)


def test_the_logit_lens_is_computed_from_the_records(run: Run) -> None:
    model = language()
    final = outputs(model, tokens())
    top = final["head"][0].argmax(-1, keepdim=True)
    picture = run.picture("lens_from_records", 0)
    assert picture.labels["node"] == ["blocks.0", "blocks.1"]
    for node, values in zip(picture.labels["node"], picture.values, strict=True):
        with torch.no_grad():
            likely = model.head(final[node][0]).log_softmax(-1).gather(-1, top)[..., 0]
        np.testing.assert_allclose(values, likely.numpy(), atol=1e-5)


def test_induction_scores_are_those_of_the_whole_models_attention(run: Run) -> None:
    model = language()
    given = outputs(model, tokens())
    scores = run.induction(0)["score"].unstack("head").to_numpy()
    assert scores.shape == (2, HEADS)
    for block, found in enumerate(scores):
        q, k, _ = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in given[f"blocks.{block}.attn.qkv"][0].chunk(3, -1)
        )
        hidden = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        scaled = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        wanted = by_loops(F.softmax(scaled, -1).numpy(), tokens().numpy())
        np.testing.assert_allclose(found, wanted, atol=1e-6)
