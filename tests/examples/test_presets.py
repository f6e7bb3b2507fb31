"""The examples with the presets for images and language models: what their pictures show."""

from __future__ import annotations

import numpy as np
import pytest

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.examples.conftest import EXAMPLES, SHORT, Train
from tests.support.forked import forked


@pytest.fixture(scope="module")
def digits(train: Train) -> Run:
    outcome = train("digits", "+comgra=vision", "steps=120", "eval_every=120")
    return comgra.open_run(outcome.folder / "runs")


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, example = tmp_path_factory.mktemp("characters"), EXAMPLES / "characters"
    door = ["-m", "comgra_decl", "--spec", str(example / "letters.yaml"), str(example / "train.py")]
    result = forked(folder, *door, *SHORT["characters"], "steps=60")
    assert result.returncode == 0, result.stderr
    return comgra.open_run(folder / "runs")


@pytest.mark.slow
def test_the_digits_of_the_probe_are_recognised_in_the_course_of_training(digits: Run) -> None:
    counts = digits.picture("confusion").values
    right = counts.trace(axis1=1, axis2=2) / counts.sum((1, 2))
    assert counts.sum((1, 2)).tolist() == [8] * len(counts)
    assert right[0] < 0.5
    assert right[-1] > 0.6


@pytest.mark.slow
def test_each_convolution_and_the_image_have_pictures(digits: Run) -> None:
    assert [digits.picture("cam", node=f"block{i}.conv").values.shape for i in (1, 2)] == [
        (8, 8, 8),
        (8, 4, 4),
    ]
    assert digits.picture("edges").values.shape == (8, 1, 8, 8)
    paths = digits.picture("paths")
    total = np.abs(paths.values).sum((1, 2, 3))
    assert (np.abs(paths.facts["gap"]) < 0.1 * total).all()


@pytest.mark.slow
def test_a_character_is_predicted_with_more_certainty_by_later_blocks(characters: Run) -> None:
    last = characters.picture("lens", node="blocks.3")
    first = characters.picture("lens", node="blocks.0")
    assert last.values.mean() > first.values.mean()
    assert characters.picture("why").facts["target"] == last.facts["tokens"][:, -1].tolist()


@pytest.mark.slow
def test_attention_rollout_distributes_what_the_last_position_sees(characters: Run) -> None:
    np.testing.assert_allclose(characters.picture("read").values.sum(-1), 1, rtol=1e-5)
    assert characters.tokens is not None
