"""A model stays as it is, in each of the ways in which tools for this leave it changed.

pyvene freezes all parameters and leaves evaluation mode on, as grad-cam does, which also overwrites
gradients and keeps outputs that a later layer changes in place. nnsight fills gradients, keeps its
hooks and replaces `forward`. TransformerLens replaces modules. Captum in training mode moves the
averages of batch norms.
"""

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

Marks = dict[str, Any]


class Net(nn.Module):
    """A batch norm whose output the next layer changes in place."""

    def __init__(self, *, inplace: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=inplace)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 3)
        self.conv.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.act(self.norm(self.conv(x)))).mean((2, 3)))


def made(*, inplace: bool = True) -> tuple[Net, Tensor]:
    """Return a network in the middle of a training, with gradients and a hook of the program."""
    torch.manual_seed(0)
    model, x = Net(inplace=inplace), torch.randn(6, 1, 6, 6)
    model.drop.eval()
    model.head.register_forward_hook(lambda *_: None)
    F.cross_entropy(model(x), LABELS).backward()
    return model, x


LABELS = torch.arange(6) % 3


def marks(model: nn.Module) -> Marks:
    """Return what the tools change, by what it is."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
              "_state_dict_hooks")  # fmt: skip
    modules = [*model.modules()]
    return {
        "evaluation mode": [m.training for m in modules],
        "frozen parameters": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "tensors": [t.tolist() for t in model.state_dict().values()],
        "hooks": [len(getattr(m, name)) for m in modules for name in tables],
        "forward": ["forward" in vars(m) for m in modules],
        "modules": [type(m) for m in modules],
        "attributes": [sorted(vars(m)) for m in modules],
    }


def changed(before: Marks, after: Marks) -> set[str]:
    return {name for name in before if before[name] != after[name]}


# -- that the marks show each way ---------------------------------------------------------------


def averages(model: Net, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


WAYS: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "all parameters are frozen": (lambda m, _: m.requires_grad_(False), "frozen parameters"),
    "all parameters are thawed": (lambda m, _: m.requires_grad_(True), "frozen parameters"),
    "evaluation mode is left on": (lambda m, _: m.eval(), "evaluation mode"),
    "training mode is left on": (lambda m, _: m.train(), "evaluation mode"),
    "gradients are cleared": (lambda m, _: m.zero_grad(), "gradients"),
    "gradients are filled": (lambda m, x: m(x).sum().backward(), "gradients"),
    "hooks are left": (lambda m, _: m.norm.register_forward_hook(lambda *_: None), "hooks"),
    "forward is replaced": (lambda m, _: vars(m).update(forward=m.forward), "forward"),
    "modules are replaced": (lambda m, _: m.add_module("act", nn.GELU()), "modules"),
    "averages move": (averages, "tensors"),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_seen(way: str) -> None:
    model, x = made()
    before = marks(model)
    change, mark = WAYS[way]
    change(model, x)
    assert mark in changed(before, marks(model))


def by_pyvene(model: Any, tokens: Tensor) -> None:
    import pyvene

    zero = {"layer": 0, "component": "mlp_output", "source_representation": torch.zeros(16)}
    pyvene.IntervenableModel(zero, model=model)({"input_ids": tokens}, None, {"base": 3})


def by_transformerlens(model: Any, _: Tensor) -> None:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config, device="cpu")


PEERS: dict[str, tuple[Callable[[Any, Tensor], None], set[str]]] = {
    "pyvene": (by_pyvene, {"frozen parameters", "evaluation mode"}),
    "transformer_lens": (by_transformerlens, {"modules"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", PEERS)
def test_the_tools_leave_a_model_changed_and_a_look_does_not(peer: str) -> None:
    pytest.importorskip(peer, reason="`make test-research` installs it")
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model, tokens = transformers.GPT2LMHeadModel(config).train(), torch.randint(50, (2, 6))
    before = marks(model)
    zero = {"select": "transformer.h.0.mlp", "do": "zero", "parts": {"position": [3]}}
    comgra.look(model, tokens, changes=zero, loss=lambda output: output.logits.sum())
    assert changed(before, marks(model)) == set()
    use, seen = PEERS[peer]
    use(model, tokens)
    assert seen <= changed(before, marks(model))


# -- that none of them happens ------------------------------------------------------------------


def entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output, LABELS)


CAM = {"method": "grad_cam", "select": "norm", "target": "top"}
CALLS: dict[str, Callable[[Net, Tensor], Any]] = {
    "a look with gradients": lambda m, x: comgra.look(m, x, loss=entropy),
    "a look with a change": lambda m, x: comgra.look(
        m, x, loss=entropy, changes={"select": "norm", "do": "mean"}
    ),
    "a look with pictures": lambda m, x: comgra.look(
        m, x, loss=entropy, pictures={"cam": CAM, "guided": {"method": "guided_backprop"}}
    ),
    "an edit": lambda m, x: comgra.edit(m, x, {"select": "head", "do": {"scale": 2.0}}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_changes_nothing_of_the_model(call: str) -> None:
    model, x = made()
    before = marks(model)
    CALLS[call](model, x)
    assert changed(before, marks(model)) == set()


def test_a_harvest_changes_nothing_of_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    model, x = made()
    model.eval()
    before = marks(model)
    comgra.harvest(model, [x], tmp_path / "rows", select="norm", features=1)
    assert changed(before, marks(model)) == set()


SPEC: dict[str, Any] = {
    "nodes": {"all": {"select": "**", "values": True}},
    "schedule": {"first": 100},
    "rules": "off",
    "probes": {"eyes": {"samples": {"count": 4}, "schedule": {"every": 1}}},
    "pictures": {"cam": {**CAM, "of": "eyes"}},
    "interventions": {
        "none": {"of": "eyes", "select": "norm", "do": "zero"},
        "units": {"of": "eyes", "select": "norm", "do": "mean", "sweep": "channel"},
        "frozen": {"of": "eyes", "select": "head", "role": "weight", "do": {"noise": 1.0}},
    },
    "checkpoints": {"every": 1},
}


def trained(spec: dict[str, Any], root: Path) -> list[Marks]:
    """Return the marks after each backward pass and each step."""
    model, x = made()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    with comgra.trace(spec, root=root):
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), LABELS).backward()
            found.append(marks(model))
            optimizer.step()
            found.append(marks(model))
    return [*found, marks(model)]


def test_nothing_differs_within_a_training_with_interventions(tmp_path: Path) -> None:
    plain, traced = trained({"enabled": False}, tmp_path), trained(SPEC, tmp_path)
    for before, after in zip(plain, traced, strict=True):
        # while a step is recorded, modules have the hooks that record it
        assert changed(before, after) <= {"hooks", "attributes", "forward"}
    assert changed(plain[-1], traced[-1]) == set()
    assert {*comgra.open_run(tmp_path).interventions} == {"none", "units", "frozen"}


# -- that outputs are kept as they were ---------------------------------------------------------


def test_an_output_that_the_next_layer_changes_in_place_is_kept_as_it_was() -> None:
    (model, x), (twin, _) = made(), made(inplace=False)
    kept: list[Tensor] = []
    twin.norm.register_forward_hook(lambda _m, _a, y: kept.append(y))
    output = twin.eval()(x)
    (hidden,) = kept
    top = output.max(1).values.sum()
    (gradient,) = torch.autograd.grad(top, hidden)
    assert bool((hidden < 0).any())  # which the activation removes
    found = comgra.look(model.eval(), x, pictures={"cam": CAM})
    assert np.array_equal(found.slot("norm").value(0), hidden.detach().numpy())
    cam = (gradient.mean((2, 3), keepdim=True) * hidden).sum(1).detach().numpy()
    np.testing.assert_allclose(found.picture("cam").values, cam, atol=1e-6 * np.abs(cam).max())
