"""The effects of changes in many places are those of one plain hook after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.query import Run
from tests.probing.attention import HEADS, TOKENS, WIDTH, Language, hooked, outputs

COUNT, LENGTH, STEPS = 5, 6, 3
OUT = ["blocks.0.attn.out", "blocks.1.attn.out"]
BLOCKS = ["blocks.0", "blocks.1"]
PER_HEAD = WIDTH // HEADS


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(TOKENS, (7, LENGTH)) for _ in range(STEPS)]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next tokens, for each sample."""
    return torch.stack(
        [F.cross_entropy(each[:-1], row[1:]) for each, row in zip(logits, tokens, strict=True)]
    )


def trained(model: nn.Module) -> list[dict[str, Tensor]]:
    """Train; return the parameters at the beginning of each step."""
    optimizer, states = torch.optim.SGD(model.parameters(), lr=0.5), []
    for tokens in batches():
        states.append({name: t.detach().clone() for name, t in model.state_dict().items()})
        optimizer.zero_grad()
        loss_of(model(tokens), tokens).mean().backward()
        optimizer.step()
    return states


def largest_logit(output: Tensor, at: int) -> Tensor:
    return output[:, at].amax(1)


HEAD_SWEEP = {"select": OUT, "role": "input", "do": {"patch": "other"}}
TRACE = {
    "first": [{"select": "embed", "do": {"noise": 3.0, "seed": 5}}],
    "select": "blocks.*",
    "do": {"patch": "clean"},
    "sweep": ["node", "position"],
    "measure": {"difference": [3, 4]},
}
DECLARED: dict[str, dict[str, Any]] = {
    "heads": {**HEAD_SWEEP, "sweep": ["node", "head"]},
    "top": {**HEAD_SWEEP, "sweep": ["head", "node"], "measure": "top", "position": 2},
    "logits": {
        **HEAD_SWEEP,
        "do": "mean",
        "sweep": ["node", "head", "position"],
        "measure": {"difference": [3, [4, 5, 6, 7, 8]]},
        "batch": 64,
    },
    "some": {
        **HEAD_SWEEP,
        "parts": {"head": [3, 1], "position": [-1, 2]},
        "sweep": "head",
        "measure": {"_target_": f"{__name__}.largest_logit", "at": -1},
    },
    "trace": {**TRACE, "batch": 1},
    "traced": {**TRACE, "batch": 4 * COUNT},
    "rows": {
        "select": "head",
        "role": "weight",
        "parts": {"token": {"dim": 0}},
        "do": "zero",
        "sweep": "token",
    },
    "none": {"select": "blocks.0", "do": {"scale": 1.0}, "sweep": "position"},
    "whole": {"select": "blocks.1.mlp", "do": "zero"},
    "guess": {**HEAD_SWEEP, "sweep": ["node", "head", "position"], "estimate": "gradient"},
}


class Trained:
    """A recorded training, and the models and samples of its steps."""

    def __init__(self, run: Run, states: list[dict[str, Tensor]]) -> None:
        self.run = run
        self.tokens = batches()[0][:COUNT]
        self._states = states

    def model(self, step: int) -> Language:
        model = Language()
        model.load_state_dict(self._states[step])
        return model

    def measured(
        self,
        step: int,
        measure: Callable[[Tensor], Tensor],
        *changes: tuple[str, str, Callable[[Tensor], Tensor]],
    ) -> np.ndarray[Any, Any]:
        model = self.model(step)
        with hooked(model, [*changes]), torch.no_grad():
            return measure(model(self.tokens)).numpy()

    def loss(self, logits: Tensor) -> Tensor:
        return loss_of(logits, self.tokens)

    def inputs(self, step: int) -> dict[str, Tensor]:
        """Return the inputs of the output projections."""
        found: dict[str, Tensor] = {}
        model = self.model(step)

        def keep(path: str) -> Callable[[Tensor], Tensor]:
            return lambda x: found.setdefault(path, x.detach().clone())

        with hooked(model, [(path, "input", keep(path)) for path in OUT]), torch.no_grad():
            model(self.tokens)
        return found


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    torch.manual_seed(0)
    model = Language()
    spec = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 100},
        "probes": {"eyes": {"samples": {"count": COUNT}, "schedule": {"every": 1}}},
        "interventions": {name: {"of": "eyes", **each} for name, each in DECLARED.items()},
    }
    with comgra.trace(spec, root=tmp_path_factory.mktemp("runs")) as session:
        states = trained(model)
    assert session.path is not None
    return Trained(comgra.open_run(session.path), states)


def at_head(head: int, new: Tensor, position: Any = slice(None)) -> Callable[[Tensor], Tensor]:
    columns = slice(head * PER_HEAD, (head + 1) * PER_HEAD)

    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, position, columns] = new[:, position, columns]
        return x

    return changed


def samples_of(table: pd.DataFrame) -> np.ndarray[Any, Any]:
    return table[[*range(COUNT)]].to_numpy()


def assert_near(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert np.abs(wanted).max() > 1e-3


@pytest.mark.parametrize("step", [0, 2])
def test_patching_each_head_from_another_sample(trained_run: Trained, step: int) -> None:
    clean, base = trained_run.inputs(step), trained_run.measured(step, trained_run.loss)
    table = trained_run.run.effects("heads", step)
    assert table.index.names == ["step", "node", "head"]
    assert table.index.to_list() == [(step, path, h) for path in OUT for h in range(HEADS)]
    wanted = np.stack(
        [
            trained_run.measured(
                step, trained_run.loss, (path, "input", at_head(h, clean[path].roll(-1, 0)))
            )
            - base
            for path in OUT
            for h in range(HEADS)
        ]
    )
    assert_near(samples_of(table), wanted)
    np.testing.assert_allclose(table["mean"], wanted.mean(1), atol=1e-6)
    error = wanted.std(1, ddof=1) / np.sqrt(COUNT)
    np.testing.assert_allclose(table["error"], error, atol=1e-6)


def test_all_measures_and_sweeps_over_several_parts(trained_run: Trained) -> None:
    step, run = 1, trained_run.run
    clean = trained_run.inputs(step)
    best = trained_run.model(step)(trained_run.tokens)[:, 2].argmax(1)

    def top(logits: Tensor) -> Tensor:
        return logits[range(COUNT), 2, best]

    base = trained_run.measured(step, top)
    table = run.effects("top", step)
    assert table.index.names == ["step", "head", "node"]
    for path in OUT:
        change = (path, "input", at_head(1, clean[path].roll(-1, 0)))
        wanted = trained_run.measured(step, top, change) - base
        found = table.query("head == 1 and node == @path")
        assert_near(samples_of(found), wanted[None])

    def difference(logits: Tensor) -> Tensor:
        last = logits[:, -1]
        return last[:, 3] - last[range(COUNT), [4, 5, 6, 7, 8]]

    base, rows = trained_run.measured(step, difference), []
    for path in OUT:
        mean = clean[path].mean(0, keepdim=True).expand(COUNT, -1, -1)
        for h in range(HEADS):
            for p in range(LENGTH):
                change = (path, "input", at_head(h, mean, p))
                rows.append(trained_run.measured(step, difference, change) - base)
    assert_near(samples_of(run.effects("logits", step)), np.stack(rows))

    def largest(logits: Tensor) -> Tensor:
        return logits[:, -1].amax(1)

    base, rows = trained_run.measured(step, largest), []
    for h in (3, 1):
        changes = [
            (path, "input", at_head(h, clean[path].roll(-1, 0), [2, LENGTH - 1])) for path in OUT
        ]
        rows.append(trained_run.measured(step, largest, *changes) - base)
    table = run.effects("some", step)
    assert table.index.to_list() == [(step, 3), (step, 1)]
    assert_near(samples_of(table), np.stack(rows))


def test_causal_tracing_restores_one_place_after_noise_to_the_last_bit(
    trained_run: Trained,
) -> None:
    step, run = 2, trained_run.run

    def difference(logits: Tensor) -> Tensor:
        return logits[:, -1, 3] - logits[:, -1, 4]

    model = trained_run.model(step)
    clean = outputs(model, trained_run.tokens)
    embedded = clean["embed"][0]
    drawn = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(5))
    corrupt = ("embed", "output", lambda x: x + 3.0 * embedded.std(correction=0) * drawn)
    base = trained_run.measured(step, difference, corrupt)
    rows = []
    for path in BLOCKS:
        for p in range(LENGTH):

            def restored(x: Tensor, path: str = path, p: int = p) -> Tensor:
                x = x.clone()
                x[:, p] = clean[path][0][:, p]
                return x

            rows.append(trained_run.measured(step, difference, corrupt, (path, "output", restored)))
    wanted = (np.stack(rows) - base).astype(np.float32)
    table = run.effects("trace", step)
    assert samples_of(table).astype(np.float32).tobytes() == (wanted + 0.0).tobytes()
    facts = run.intervention_facts("trace", step)
    assert facts["baseline"] == base.tolist()
    plain = trained_run.measured(step, difference)
    assert facts["clean"] == plain.tolist()

    assert_near(samples_of(run.effects("traced", step)), wanted)  # several places in one pass
    share = run.effects("trace", step, share=True)
    np.testing.assert_allclose(samples_of(share), wanted / (plain - base), rtol=1e-5)
    mean = wanted.mean(1) / (plain - base).mean()
    np.testing.assert_allclose(share["mean"], mean, rtol=1e-4, atol=1e-6)


def test_rows_of_a_parameter_and_a_change_without_a_sweep(trained_run: Trained) -> None:
    step, run = 1, trained_run.run
    base, rows = trained_run.measured(step, trained_run.loss), []
    for row in range(TOKENS):
        model = trained_run.model(step)
        model.head.weight.data[row] = 0
        with torch.no_grad():
            rows.append(trained_run.loss(model(trained_run.tokens)).numpy() - base)
    assert_near(samples_of(run.effects("rows", step)), np.stack(rows))

    zero = ("blocks.1.mlp", "output", torch.zeros_like)
    table = run.effects("whole")
    assert table.index.names == ["step"]
    assert table.index.tolist() == [0, 1, 2]
    wanted = trained_run.measured(step, trained_run.loss, zero) - base
    assert_near(samples_of(table.loc[[step]]), wanted[None])


def test_a_sweep_in_which_no_place_has_an_effect_says_so(trained_run: Trained) -> None:
    assert not trained_run.run.effects("none").to_numpy().any()
    (warning,) = trained_run.run.document("report")["warnings"]
    assert warning == "intervention 'none' did nothing: every element kept its value"


def test_the_estimate_is_the_gradient_times_the_change(trained_run: Trained) -> None:
    step = 1
    model = trained_run.model(step)
    held: dict[str, Tensor] = {}

    def hold(path: str) -> Callable[[Tensor], Tensor]:
        return lambda x: held.setdefault(path, x)

    with hooked(model, [(path, "input", hold(path)) for path in OUT]):
        total = trained_run.loss(model(trained_run.tokens)).sum()
    gradients = torch.autograd.grad(total, [held[path] for path in OUT])
    rows = []
    for path, gradient in zip(OUT, gradients, strict=True):
        product = gradient * (held[path].roll(-1, 0) - held[path])
        by_head = product.detach().unflatten(-1, (HEADS, PER_HEAD)).sum(-1)
        rows.append(by_head.permute(2, 1, 0).reshape(HEADS * LENGTH, COUNT).numpy())
    table = trained_run.run.effects("guess", step)
    assert table.index.names == ["step", "node", "head", "position"]
    assert_near(samples_of(table), np.concatenate(rows))
    exact = trained_run.run.effects("heads", step)["mean"]
    summed = table.groupby(["step", "node", "head"])["mean"].sum()
    assert np.corrcoef(exact, summed)[0, 1] > 0.5


def test_what_is_not_there_is_said_with_similar_names(trained_run: Trained) -> None:
    run = trained_run.run
    assert run.interventions == [*DECLARED]
    with pytest.raises(UnknownNameError, match="did you mean 'heads'"):
        run.effects("head")
    with pytest.raises(UnknownNameError, match="has no record of step 7; it has 0, 1, 2"):
        run.effects("heads", 7)


# -- passes ---------------------------------------------------------------------------------------


class Linear(nn.Module):
    """Without a nonlinearity, and optionally with samples that depend on one another."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes
        self.one = nn.Linear(4, 6)
        self.two = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x - 2 * x.sum(0) if self.mixes else x)


def passes(
    root: Path, declared: dict[str, Any], *, mixes: bool = False, mode: str = "eval"
) -> tuple[Run, int]:
    """Train for one step; return the run, and the number of passes through the copy."""
    torch.manual_seed(0)
    model = Linear(mixes=mixes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"samples": {"count": COUNT}, "mode": mode}},
        "interventions": {
            "units": {"of": "eyes", "select": "one", "measure": "top", **declared},
        },
    }
    plain, count = CleanCopy.run, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    with patch.object(CleanCopy, "run", counted), comgra.trace(spec, root=root) as session:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path), count


UNITS: dict[str, Any] = {"do": {"patch": "other"}, "sweep": "feature"}


@pytest.mark.parametrize(
    ("changes", "mixes", "mode", "count"),
    [
        ({}, False, "eval", 1 + 1),  # the first pass is made again in reverse
        ({"batch": 3 * COUNT}, False, "eval", 1 + 3),  # two of six places in each pass
        ({"batch": COUNT}, False, "eval", 6),
        ({"do": {"_target_": f"{__name__}.negated"}}, False, "eval", 6),
        ({}, False, "train", 6),
        ({}, True, "eval", 1 + 6),  # the first pass shows that samples affect one another
    ],
)
def test_a_pass_tries_several_places_where_samples_do_not_affect_one_another(
    changes: dict[str, Any], mixes: bool, mode: str, count: int, tmp_path: Path
) -> None:
    run, made = passes(tmp_path, {**UNITS, **changes}, mixes=mixes, mode=mode)
    # two before the first step, the probe's own, and the baseline
    assert made == 4 + count
    if changes.get("do") is None:
        single, _ = passes(tmp_path, {**UNITS, "batch": 1}, mixes=mixes, mode=mode)
        one, other = run.effects("units"), single.effects("units")
        pd.testing.assert_frame_equal(one, other, atol=1e-6, rtol=0)


class Neighbours(nn.Module):
    """A network in which samples affect one another in a way that copies of them do not show."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.one, self.two = how, nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if self.how == "first":  # the first sample of the batch is a reference
            x = x - x[:1]
        elif self.how == "edges":  # a graph, which has no edges between further nodes
            x = x + torch.zeros_like(x).index_add(0, torch.arange(COUNT), x[:COUNT].roll(1, 0))
        else:  # a place in the batch has a meaning
            x = x * torch.arange(1, 1 + len(x))[:, None].clamp(max=2 * COUNT)
        return self.two(x)


@pytest.mark.parametrize("how", ["first", "edges", "place"])
def test_models_that_treat_samples_by_their_place_get_one_pass_for_each_place(
    how: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Neighbours(how)
    before = copy.deepcopy(model)
    x = torch.randn(COUNT, 4)
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"batch": {"x": x.tolist()}}},
        "interventions": {
            "units": {"of": "eyes", "select": "one", "do": "zero", "sweep": "feature", "measure": 1}
        },
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace(spec, root=tmp_path) as session:
        model(x).square().mean().backward()
        optimizer.step()
    assert session.path is not None
    effects = comgra.open_run(session.path).effects("units", 0)
    with torch.no_grad():
        plain = before(x)[:, 1]
        for unit in range(6):

            def silence(_m: nn.Module, _a: Any, output: Tensor, unit: int = unit) -> Tensor:
                return output * (torch.arange(6) != unit)

            handle = before.one.register_forward_hook(silence)
            expected = (before(x)[:, 1] - plain).numpy()
            handle.remove()
            np.testing.assert_allclose(samples_of(effects)[unit], expected, atol=1e-6)


def negated(x: Tensor) -> Tensor:
    return -x


@pytest.mark.parametrize("mixes", [False, True], ids=["alone", "mixed"])
def test_in_a_linear_network_the_estimate_is_the_effect(mixes: bool, tmp_path: Path) -> None:
    exact, _ = passes(tmp_path, UNITS, mixes=mixes)
    guess, made = passes(tmp_path, {**UNITS, "estimate": "gradient"}, mixes=mixes)
    assert made == 4
    pd.testing.assert_frame_equal(exact.effects("units"), guess.effects("units"), atol=1e-5, rtol=0)
    assert np.abs(samples_of(exact.effects("units"))).max() > 1e-3


def test_a_sweep_that_cannot_be_measured_is_reported(tmp_path: Path) -> None:
    run, _ = passes(tmp_path, {**UNITS, "measure": "loss"})
    assert run.interventions == []
    (warning,) = run.document("report")["warnings"]
    assert "intervention 'units' is not made: the model returns one number per sample" in warning


@pytest.mark.slow  # imports transformers
def test_heads_and_outputs_of_a_gpt2_from_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 31, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(31, (4, 7))
    out = "transformer.h.*.attn.c_proj"
    declared: dict[str, Any] = {
        "heads": {"select": out, "role": "input", "do": "zero", "sweep": ["node", "head"]},
        "last": {"select": "transformer", "role": "output.last_hidden_state", "do": {"scale": 0.5}},
    }
    spec = {
        "nodes": {"all": {"select": "**"}},
        "probes": {"eyes": {"samples": {"count": 4}}},
        "interventions": {name: {"of": "eyes", **each} for name, each in declared.items()},
    }
    with comgra.trace(spec, root=tmp_path) as session:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert session.path is not None
    run = comgra.open_run(session.path)

    def effect(path: str, role: str, change: Callable[[Tensor], Tensor]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            base = loss_of(plain(tokens).logits, tokens)
            with hooked(plain, [(path, role, change)]):
                return (loss_of(plain(tokens).logits, tokens) - base).numpy()

    wanted = [
        effect(path, "input", at_columns(slice(4 * head, 4 * head + 4)))
        for path in (out.replace("*", "0"), out.replace("*", "1"))
        for head in range(4)
    ]
    found = run.effects("heads")[[*range(4)]].to_numpy()
    np.testing.assert_allclose(found, np.stack(wanted), atol=1e-6)
    found = run.effects("last")[[*range(4)]].to_numpy()
    halved = effect("lm_head", "input", lambda x: 0.5 * x)
    np.testing.assert_allclose(found, halved[None], atol=1e-6)


def at_columns(columns: slice) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., columns] = 0
        return x

    return changed
