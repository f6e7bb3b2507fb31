"""Induction scores follow their definition, on hand-made attention and on recorded attention."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures.units import induction
from comgra_decl.query import Run
from comgra_decl.viewer.plotting import plotted, save
from tests.probing.attention import HEADS, TOKENS, Language

Array = NDArray[np.floating]

REPEATED = np.array([[7, 1, 4, 7, 1, 4]])


def test_heads_made_by_hand() -> None:
    perfect = np.zeros((6, 6))
    perfect[[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]] = 1  # the position after the same token
    even = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    itself = np.eye(6)
    previous = np.zeros((6, 6))
    previous[[0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4]] = 1
    same = np.zeros((6, 6))
    same[[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]] = 1  # the same token, not the one after it
    half = (perfect + itself) / 2
    weights = np.stack([perfect, even, itself, previous, same, half])[None]
    scores, queries = induction(weights, REPEATED)
    assert queries == 3
    np.testing.assert_allclose(scores, [1, (1 / 4 + 1 / 5 + 1 / 6) / 3, 0, 0, 0, 0.5], atol=1e-15)


def test_all_earlier_occurrences_count_except_the_position_of_the_query_itself() -> None:
    tokens = np.array([[5, 2, 5, 3, 5, 5], [0, 1, 2, 3, 4, 6]])  # no token twice in the second
    weights = np.random.default_rng(0).dirichlet(np.ones(6), size=(2, 1, 6))
    scores, queries = induction(weights, tokens)
    # the first 5 is followed by position 1, the second by 3, and the third by 5, the query itself
    wanted = [weights[0, 0, 2, 1], weights[0, 0, 4, [1, 3]].sum(), weights[0, 0, 5, [1, 3]].sum()]
    assert queries == 3
    assert scores[0] == pytest.approx(np.mean(wanted))
    scores, queries = induction(weights[1:], tokens[1:])
    assert queries == 0
    assert np.isnan(scores).all()


def by_loops(weights: Array, tokens: NDArray[np.int64]) -> list[float]:
    found = []
    for head in range(weights.shape[1]):
        paid = []
        for sample, row in enumerate(tokens.tolist()):
            for t, token in enumerate(row):
                places = [s for s in range(1, t) if row[s - 1] == token]
                if places:
                    paid.append(sum(weights[sample, head, t, s] for s in places))
        found.append(sum(paid) / len(paid))
    return found


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(TOKENS, (4, 9)) for _ in range(3)]


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    spec = {
        "nodes": {
            "fused": {
                "select": {"function": "F.scaled_dot_product_attention"},
                "attention": {"recompute": True},
                "values": True,
            }
        },
        "samples": {"count": 3},
    }
    with comgra.trace(spec, root=tmp_path_factory.mktemp("runs")) as session:
        for tokens in batches():
            optimizer.zero_grad()
            logits = model(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


def test_scores_of_recorded_attention_at_each_step(attended: Run) -> None:
    run = attended
    table = run.induction()
    assert table.index.names == ["step", "node", "iteration", "head"]
    nodes = table.index.unique("node").tolist()
    assert len(table) == 3 * 2 * HEADS
    assert len(nodes) == 2
    for step, tokens in enumerate(batches()):
        for node in nodes:
            weights = run.slot(node, role="attention (recomputed)").value(step)
            wanted = by_loops(weights, tokens[:3].numpy())
            found = table.loc[(step, node), "score"]
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert run.induction(1).equals(table.loc[[1]])


def test_the_heads_with_the_highest_scores_are_curves_by_step(
    attended: Run, tmp_path: Path
) -> None:
    plot = plotted(attended).induction(strongest=3)
    by_head = attended.induction()["score"].droplevel("iteration").unstack("step")
    highest = by_head.max(axis=1).sort_values(ascending=False).index[:3]
    curves = [*plot]
    assert [curve.label for curve in curves] == [f"{node}, head {head}" for node, head in highest]
    for curve, head in zip(curves, highest, strict=True):
        np.testing.assert_array_equal(curve["step"], attended.steps)
        np.testing.assert_array_equal(curve["score"], by_head.loc[head])
    assert save(plot, tmp_path / "scores.svg").stat().st_size
    with pytest.raises(ValueError, match="strongest must be at least 1, got 0"):
        plotted(attended).induction(strongest=0)


def test_a_run_without_attention_says_what_to_record(tmp_path: Path) -> None:
    with comgra.trace({"nodes": {"all": {"select": "**"}}}, root=tmp_path) as session:
        model = torch.nn.Linear(2, 1)
        model(torch.ones(3, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert session.path is not None
    with pytest.raises(UnknownNameError, match="The `attention` preset records both"):
        comgra.open_run(session.path).induction()


class WithWeights(nn.Module):
    """torch's attention, which by default computes the weights of all samples and heads in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.attend(x, x, x, attn_mask=mask, average_attn_weights=False)


def test_attention_of_torch_that_returns_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = WithWeights(), torch.randint(TOKENS, (4, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = model(tokens)[1].detach().numpy()
    with comgra.trace("attention", root=tmp_path) as session:
        model(tokens)[0].square().mean().backward()
        optimizer.step()
    found = comgra.open_run(session.path or "").induction()
    expected, queries = induction(weights[:2], tokens[:2].numpy())  # samples: {count: 2}
    np.testing.assert_allclose(found["score"], expected, rtol=1e-6)
    assert found["queries"].tolist() == [queries] * 2


class Flat(nn.Module):
    """Attention of the program's own, whose weights are those of all samples and heads in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.embed(tokens).unflatten(2, (2, 4)).transpose(1, 2).flatten(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        weights = torch.softmax(heads @ heads.transpose(1, 2) + mask, -1)
        self.weights = weights.detach().unflatten(0, (-1, 2)).numpy()
        mixed = (weights @ heads).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
        return cast(torch.Tensor, self.out(mixed))


def test_weights_of_all_samples_and_heads_in_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Flat(), torch.randint(TOKENS, (4, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace("attention", root=tmp_path) as session:
        model(tokens).square().mean().backward()
        optimizer.step()
    found = comgra.open_run(session.path or "").induction()
    expected, _ = induction(model.weights[:2], tokens[:2].numpy())  # samples: {count: 2}
    np.testing.assert_allclose(found["score"], expected, rtol=1e-6)
