"""The presets for images and for language: they fit common models without further keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.probing.attention import TOKENS, Language


def trained(
    preset: str | dict[str, Any], root: Path, model: nn.Module, loss: Callable[[nn.Module], Tensor]
) -> tuple[Run, list[str]]:
    """Return the run of two steps, and the warnings in its report."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace(preset, root=root) as session:
        for _ in range(2):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    return run, run.document("report")["warnings"]


def pictured(run: Run) -> dict[str, str]:
    """Return the reason of each picture of the first step; "" if it was made."""
    (probe,) = (type_ for type_ in run.types if type_.startswith("probe:"))
    return {n: fact.get("refused", "") for n, fact in run.picture_facts(0, type=probe).items()}


def classify(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 1, 8, 8, generator=generator)
    return F.cross_entropy(model(x), torch.arange(12) % 3)


def predict(model: nn.Module) -> Tensor:
    words = torch.randint(TOKENS, (6, 9), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_an_image_classifier_has_every_picture_of_vision(tmp_path: Path) -> None:
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(64, 3))
    run, warnings = trained("vision", tmp_path, model, classify)
    assert pictured(run) == {"cam": "", "edges": "", "paths": ""}
    assert warnings == []
    assert run.picture("cam", 0, "2").axes == ("sample", "height", "width")
    assert run.picture("edges", 0).values.shape == (8, 1, 8, 8)
    labels = run.picture("cam", 0, "0").labels["sample"]
    assert np.bincount([int(label) for label in labels]).tolist() == [3, 3, 2]  # `by: target`


def test_a_language_model_has_every_picture_of_language(tmp_path: Path) -> None:
    class Normed(Language):
        """Has a last norm, as the logit lens requires of a model with a head."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(self.head.in_features)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    model = Normed()
    run, warnings = trained("language", tmp_path, model, predict)
    assert pictured(run) == {"why": "", "read": "", "lens": ""}
    assert warnings == []  # in particular not that `torch.softmax` was never called
    assert run.picture("lens", 0, "blocks.1").axes == ("sample", "position")
    read = run.picture("read", 0).values
    np.testing.assert_allclose(read.sum(-1), 1.0, atol=1e-6)
    assert len(run.token_attributions("why", 0)) == 4 * 8


def test_what_does_not_fit_a_model_is_said_in_one_sentence_each(tmp_path: Path) -> None:
    class Dense(nn.Conv2d):
        """Returns an image, as segmentation does."""

    _, warnings = trained(
        "vision",
        tmp_path / "dense",
        Dense(1, 3, 3, padding=1),
        lambda m: F.mse_loss(m(torch.randn(4, 1, 8, 8)), torch.zeros(4, 3, 8, 8)),
    )
    (sentence,) = (w for w in warnings if "picture" in w)
    assert sentence.startswith(
        "probe 'images': there are no pictures 'cam', 'edges', 'paths': the model returns"
    )

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell = nn.Embedding(TOKENS, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.cell(self.embed(x))
            return self.head(hidden)

    run, warnings = trained("language", tmp_path / "recurrent", Recurrent(), predict)
    reasons = pictured(run)
    assert reasons["why"] == ""
    assert reasons["read"].startswith("the model has no self-attention")
    assert reasons["lens"].startswith("the model has no nn.ModuleList of equal layers")
    (sentence,) = (w for w in warnings if "optional functions" in w)
    names = "'torch.nn.functional.scaled_dot_product_attention', 'torch.softmax'"
    assert sentence == f"comgra.nodes: none of the optional functions was called: {names}"


def test_an_optional_entry_may_match_nothing(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"select": ["nowhere.*", {"class": "Conv9d"}]}
    for optional, found in ((False, 2), (True, 0)):
        nodes = {"all": {"select": "**"}, "more": {**entry, "optional": optional}}
        spec = {"nodes": nodes, "schedule": {"first": 2}}
        run, _ = trained(spec, tmp_path / str(optional), Language(), predict)
        assert len(run.report["unmatched"]) == found
