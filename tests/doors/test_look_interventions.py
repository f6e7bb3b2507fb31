"""A look has the effects of interventions on its samples, as plain hooks compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import CallError, SpecError
from tests.probing.attention import HEADS, Language
from tests.probing.test_language import WORDS


def words() -> Language:
    torch.manual_seed(0)
    return Language().eval()


@contextmanager
def changed(model: nn.Module, path: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the output of a module with a plain hook."""
    handle = model.get_submodule(path).register_forward_hook(lambda _m, _a, out: change(out))
    try:
        yield
    finally:
        handle.remove()


def without_head(model: nn.Module, path: str, head: int) -> Tensor:
    """Return the output of a model without what a head writes, by a plain hook."""

    def hook(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        parts = args[0].clone().unflatten(-1, (HEADS, -1))
        parts[..., head, :] = 0
        return (parts.flatten(-2),)

    handle = model.get_submodule(path).register_forward_pre_hook(hook)
    try:
        return model(WORDS)
    finally:
        handle.remove()


@pytest.mark.parametrize("no_grad", [False, True])
def test_an_ablation_is_a_record_beside_that_of_the_call(*, no_grad: bool) -> None:
    model = words()
    ablation = {"select": "blocks.1.mlp", "do": "zero", "measure": 3}
    with torch.set_grad_enabled(not no_grad):
        cache = comgra.look(model, WORDS, interventions={"no_mlp": ablation})
    with torch.no_grad():
        clean = model(WORDS)
        with changed(model, "blocks.1.mlp", torch.zeros_like):
            wanted = model(WORDS)
    assert cache.types == ["eval", "probe:look", "intervention:no_mlp"]
    head = cache.slot("head")
    assert np.array_equal(head.value(0), clean.numpy())
    assert np.array_equal(head.value(0, type="intervention:no_mlp"), wanted.numpy())
    effects = cache.effects("no_mlp", 0)
    expected = (wanted - clean)[:, -1, 3].numpy()
    np.testing.assert_allclose(effects[[0, 1, 2]].to_numpy()[0], expected, rtol=0, atol=1e-6)


def test_a_sweep_over_heads_is_one_plain_hook_after_the_other() -> None:
    model = words()
    sweep = {
        "select": "blocks.*.attn.out",
        "role": "input",
        "parts": {"head": {"groups": HEADS}},
        "do": "zero",
        "sweep": ["node", "head"],
        "measure": {"difference": [5, 7]},
    }
    found = comgra.look(model, WORDS, interventions={"heads": sweep}).effects("heads", 0)
    heads = [(f"blocks.{i}.attn.out", head) for i in range(2) for head in range(HEADS)]
    assert [*found.loc[0].index] == heads

    def measure(output: Tensor) -> Tensor:
        return output[:, -1, 5] - output[:, -1, 7]

    with torch.no_grad():
        clean = measure(model(WORDS))
        for (path, head), row in zip(heads, found[[0, 1, 2]].to_numpy(), strict=True):
            wanted = measure(without_head(model, path, head)) - clean
            np.testing.assert_allclose(row, wanted.numpy(), rtol=0, atol=1e-6)


def test_an_estimate_of_a_linear_network_is_its_effect_and_paths_are_a_circuit() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)), torch.randn(6, 4)
    common = {"select": ["0", "1"], "do": {"patch": 0}, "sweep": "node", "measure": 2}
    path = {"select": "0", "do": {"patch": 0}, "into": "2", "sweep": ["node", "into"]}
    made = {
        "real": common,
        "guess": {**common, "estimate": "gradient"},
        "path": {**path, "measure": 2},
    }
    cache = comgra.look(model, x, interventions=made)
    real, guess = (cache.effects(name).to_numpy() for name in ("real", "guess"))
    np.testing.assert_allclose(guess, real, rtol=0, atol=1e-5)
    assert np.abs(real).max() > 0.1
    circuit = cache.circuit("path", 0)
    assert {"0", "2"} <= {*circuit.nodes}
    np.testing.assert_allclose(cache.effects("path").to_numpy(), real[:1], rtol=0, atol=1e-5)


def test_the_loss_of_the_call_says_which_class_each_sample_has() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, labels = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    cache = comgra.look(
        model,
        x,
        loss=lambda output: F.cross_entropy(output, labels),
        interventions={"half": {"select": "1", "do": {"scale": 0.5}}},
    )
    with torch.no_grad():
        clean = F.cross_entropy(model(x), labels, reduction="none")
        with changed(model, "1", lambda out: out * 0.5):
            wanted = F.cross_entropy(model(x), labels, reduction="none") - clean
    np.testing.assert_allclose(
        cache.effects("half")[[*range(5)]].to_numpy()[0], wanted.numpy(), rtol=0, atol=1e-6
    )
    assert cache.slot("0").grad.value(0).shape == (5, 6)


def test_interventions_and_pictures_leave_the_call_and_the_model_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x = torch.randn(6, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    plain = comgra.look(model, x)
    state = torch.get_rng_state()
    found = comgra.look(
        model,
        x,
        interventions={"noise": {"select": "0", "do": {"noise": 1.0}, "measure": 1}},
        pictures={"edges": {"method": "saliency", "target": 1}},
    )
    assert torch.equal(torch.get_rng_state(), state)
    for node in ("0", "1", "2", "3"):
        assert np.array_equal(plain.slot(node).value(0), found.slot(node).value(0))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())


def test_a_saved_look_is_a_run_with_its_effects(tmp_path: Any) -> None:
    sweep = {"select": "blocks.*", "do": "zero", "sweep": ["node", "position"], "measure": 3}
    cache = comgra.look(words(), WORDS, interventions={"places": sweep})
    again = comgra.open_run(cache.save(tmp_path / "kept"))
    assert again.interventions == ["places"]
    assert again.effects("places").equals(cache.effects("places"))


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ("zero", CallError, "interventions must map names to interventions, got 'zero'"),
        ({"no": "zero"}, CallError, r"interventions\['no'\] must be a mapping, got 'zero'"),
        ({"no": {"of": "eyes"}}, CallError, r"interventions\['no'\].of: there are no probes"),
        ({"no": {"select": "nowhere", "do": "zero"}}, CallError, "'nowhere' matches no module"),
        (
            {"no": {"select": "blocks.0", "role": "wieght", "do": "zero"}},
            CallError,
            "no selected module has a parameter 'wieght'",
        ),
        ({"no": {"select": "blocks.0", "do": "zeros"}}, SpecError, "unknown change; choose zero"),
    ],
)
def test_what_is_no_intervention_is_refused(given: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        comgra.look(words(), WORDS, interventions=given)


def test_changes_are_not_combined_with_interventions_and_a_method_has_no_loss() -> None:
    ablation = {"no": {"select": "blocks.0", "do": "zero"}}
    with pytest.raises(CallError, match="`changes` cannot be combined with `interventions`"):
        comgra.look(words(), WORDS, interventions=ablation, changes=ablation["no"])
    model = words()
    with pytest.raises(CallError, match=r"interventions\['no'\].measure: a method has no loss"):
        comgra.look(model, WORDS, interventions=ablation, call="state_dict")


def test_an_intervention_that_did_nothing_is_said() -> None:
    same = {"select": "blocks.0", "do": {"scale": 1.0}}
    cache = comgra.look(words(), WORDS, interventions={"same": same})
    assert any("'same' did nothing" in text for text in cache.report["warnings"])
    assert not cache.intervention_facts("same")["changes"][0]["changed"]


@pytest.mark.parametrize("call", ["__call__", "twice"])
def test_a_measure_that_does_not_exist_is_said_at_once(call: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self.layer(x))

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self(self(x)))

    measured = {"select": "layer", "do": "zero", "measure": {"_target_": "math.nix"}}
    how: dict[str, Any] = {} if call == "__call__" else {"call": call}
    with pytest.raises(SpecError, match=r"measured\.measure\._target_: 'math.nix' does not exist"):
        comgra.look(Net(), torch.randn(3, 4), interventions={"measured": measured}, **how)


def test_a_gradient_of_a_gradient_is_an_unknown_key() -> None:
    measure = {"gradient": "0", "of": {"gradient": "0"}}
    given = {"select": "0", "do": "zero", "measure": measure}
    with pytest.raises(SpecError, match=r"measure\.of: unknown key 'gradient'"):
        comgra.look(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4), interventions={"g": given})


def test_a_change_of_an_imaginary_part_is_counted() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self.turned(torch.complex(x, 2 * x)).imag)

    x = torch.randn(3, 4)
    scaled = {"select": "turned", "do": {"scale": 3.0}, "measure": 0}
    record = comgra.look(Complex(), x, interventions={"scaled": scaled})
    (counted,) = record.intervention_facts("scaled", 0)["changes"]
    assert counted["largest"] == pytest.approx(2 * (x**2 * 5).sqrt().max().item())
