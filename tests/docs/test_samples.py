"""The page about scikit-learn, SHAP and Captum: its code runs, and its numbers are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "samples.md"


def sections() -> dict[str, list[str]]:
    """Return the blocks of code by the title of their section; "" before the first one."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    titles = ["", *parts[1::2]]
    return {
        title: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for title, text in zip(titles, parts[::2], strict=True)
    }


CODE = sections()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page has defined after the sections that every other one needs."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("samples"))
        for title in ("", "The data", "scikit-learn"):
            execute(title, found)
    return found


def execute(title: str, names: dict[str, Any]) -> None:
    for number, block in enumerate(CODE[title]):
        exec(compile(block, f"samples.md, {title}, block {number}", "exec"), names)


@pytest.mark.slow
def test_the_frame_contains_numpys_statistics_of_each_sample(names: dict[str, Any]) -> None:
    run, frame, probe = names["run"], names["frame"], names["probe"]
    assert [*frame.columns[:2]] == ["place", "label"]
    steps = frame.index.get_level_values("step").unique()
    assert steps.tolist() == [0, 10, 20, 30, 40]
    for step in (0, 40):
        values = run.value("2", step, type=probe)
        there = frame.loc[step]
        np.testing.assert_allclose(there["2/output/forward/std"], values.std(axis=1), rtol=1e-5)
        np.testing.assert_allclose(there["2/output/forward/mean"], values.mean(axis=1), atol=1e-6)
    assert frame.loc[40, "label"].value_counts().tolist() == [10] * 10


def test_later_layers_separate_the_classes(names: dict[str, Any]) -> None:
    accuracy = names["accuracy"]
    assert 0.5 < accuracy["0"] <= 1
    assert 0.5 < accuracy["2"] <= 1


def test_parts_of_shap_add_up_to_the_prediction(names: dict[str, Any]) -> None:
    pytest.importorskip("shap")
    execute("SHAP", names)
    told = names["explainer"].expected_value + names["parts"].sum(axis=1)
    np.testing.assert_allclose(told, names["forest"].predict(names["features"]), rtol=1e-6)
    assert names["ranking"][0] in names["features"]


def test_captum_explains_the_model_of_the_checkpoint(names: dict[str, Any]) -> None:
    pytest.importorskip("captum")
    execute("Captum", names)
    then, inputs, classes = names["then"], names["inputs"], names["classes"].to_numpy()
    logits = then(inputs).detach().numpy()
    np.testing.assert_array_equal(logits, names["run"].value("2", 10, type=names["probe"]))
    assert isinstance(names["attributions"], torch.Tensor)
    gained = names["attributions"].sum(1).detach().numpy()
    rows = np.arange(len(classes))
    base = then(torch.zeros_like(inputs)).detach().numpy()
    np.testing.assert_allclose(gained, (logits - base)[rows, classes], atol=0.05)
