"""A model with an intervention in its weights does what hooks do to the model that has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.errors import EditError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(12, 8)
        self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.drop(self.down(self.act(self.up(x))))


class Net(nn.Module):
    """A residual stream without attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.RMSNorm(8)
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(self.last(x))
        return output


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 4, 1, groups=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        output: Tensor = self.head(self.pool(F.relu(self.second(x))).flatten(1))
        return output


def tokens(seed: int) -> Tensor:
    return torch.randint(11, (6, 7), generator=torch.Generator().manual_seed(seed))


def images(seed: int) -> Tensor:
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def made(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    model = kind()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4)
    return model.eval()


VECTOR = [0.5, -1.0, 0.25, 2.0, 0.0, 1.5, -0.5, 1.0]
ALONG = torch.tensor(VECTOR)


def zeroed(dim: int, *which: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[dim])
        mask[list(which)] = 0
        shape = [1] * x.dim()
        shape[dim] = -1
        return x * mask.reshape(shape)

    return change


def off(x: Tensor) -> Tensor:
    return x - (x @ ALONG)[..., None] / (ALONG @ ALONG) * ALONG


Hook = Callable[[Tensor], Tensor]
CASES: dict[str, tuple[type[nn.Module], dict[str, Any], list[str], Hook]] = {
    "a head, at the input of its projection": (
        Net,
        {"select": "blocks.0.mix", "role": "input", "parts": {"head": [1]}, "do": "zero"},
        ["blocks.0.mix:input"],
        zeroed(-1, 2, 3),
    ),
    "a neuron, after its activation": (
        Net,
        {"select": "blocks.1.act", "parts": {"feature": [3, -1]}, "do": {"scale": 0.0}},
        ["blocks.1.act"],
        zeroed(-1, 3, 11),
    ),
    "the output of a layer, scaled": (
        Net,
        {"select": "blocks.*.down", "do": {"scale": 0.5}},
        ["blocks.0.down", "blocks.1.down"],
        lambda x: x * 0.5,
    ),
    "steering of the stream": (
        Net,
        {"select": "blocks.0", "do": {"add": VECTOR, "scale": 2.0}},
        ["blocks.0"],
        lambda x: x + 2 * ALONG,
    ),
    "a direction that nothing writes": (
        Net,
        {"select": ["embed", "blocks.*.mix", "blocks.*.down"], "do": {"project_off": VECTOR}},
        ["embed", "blocks.0.mix", "blocks.1.mix", "blocks.0.down", "blocks.1.down"],
        off,
    ),
    "a direction that a layer does not read": (
        Net,
        {"select": "blocks.1.mix", "role": "input", "do": {"project_off": VECTOR}},
        ["blocks.1.mix:input"],
        off,
    ),
    "an added vector before a layer without a bias is one after the norm": (
        Net,
        {"select": "blocks.1.norm", "do": {"add": VECTOR}},
        ["blocks.1.norm"],
        lambda x: x + ALONG,
    ),
    "a channel of a convolution": (
        Images,
        {"select": "first", "parts": {"channel": [2]}, "do": "zero"},
        ["first"],
        zeroed(1, 2),
    ),
    "a channel that a grouped convolution receives": (
        Images,
        {"select": "second", "role": "input", "parts": {"channel": [1, 4]}, "do": "zero"},
        ["second:input"],
        zeroed(1, 1, 4),
    ),
    "a channel of a norm": (
        Images,
        {"select": "norm", "parts": {"channel": [0]}, "do": "zero"},
        ["norm"],
        zeroed(1, 0),
    ),
    "an added number": (
        Images,
        {"select": "second", "do": {"add": 0.7}},
        ["second"],
        lambda x: x + 0.7,
    ),
    "an added number before a convolution": (
        Images,
        {"select": "second", "role": "input", "do": {"add": 0.7}},
        ["second:input"],
        lambda x: x + 0.7,
    ),
}


def hooked(model: nn.Module, places: list[str], change: Hook) -> nn.Module:
    """Return a copy of a model with plain hooks."""
    model = copy.deepcopy(model)
    for place in places:
        path, _, side = place.partition(":")
        module = model.get_submodule(path)
        if side:
            module.register_forward_pre_hook(lambda _m, args: (change(args[0]), *args[1:]))
        else:
            module.register_forward_hook(lambda _m, _a, output: change(output))
    return model


def with_state(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", CASES)
def test_the_edited_model_equals_the_one_with_hooks_on_new_inputs(name: str) -> None:
    kind, change, places, hook = CASES[name]
    model, inputs = made(kind), tokens if kind is Net else images
    before = copy.deepcopy(model.state_dict())
    edited = comgra.edit(model, inputs(0), change)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    x = inputs(1)
    found = with_state(model, edited.state_dict)(x)
    expected = hooked(model, places, hook)(x)
    assert not torch.allclose(expected, model(x), atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)
    assert edited.difference < 1e-5
    assert edited.changes


def test_means_become_biases() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = torch.randn(10, 4)
    mean = model[:2](x).mean(0)
    edited = comgra.edit(model, x, {"select": "1", "parts": {"feature": [0, 5]}, "do": "mean"})
    fresh = torch.randn(5, 4)
    hidden = model[:2](fresh)
    hidden[:, [0, 5]] = mean[[0, 5]]
    found = with_state(model, edited.state_dict)(fresh)
    torch.testing.assert_close(found, model[2](hidden), rtol=1e-6, atol=1e-6)
    assert [line.partition(":")[0] for line in edited.changes] == ["2.weight", "2.bias"]
    assert "2.weight: 6 of 18 elements changed, by up to 0." in edited.changes[0]


def test_several_changes_are_made_in_their_order() -> None:
    model, x, fresh = made(Net), tokens(0), tokens(1)
    changes: list[dict[str, Any]] = [
        {"select": "blocks.1.act", "do": {"scale": 3.0}},
        {"select": "blocks.1.down", "role": "input", "do": {"add": 0.5}},
        {"select": "blocks.1.act", "parts": {"feature": [2]}, "do": "zero"},
        {"select": "blocks.1.down", "do": {"scale": -1.0}},
        {"select": "blocks.1", "do": {"add": VECTOR}},
        {"select": "head", "role": "weight", "do": {"scale": 2.0}},
    ]
    edited = comgra.edit(model, x, changes)
    expected = copy.deepcopy(model)
    block = expected.blocks[1]
    block.act.register_forward_hook(lambda _m, _a, y: zeroed(-1, 2)(3 * y))
    block.down.register_forward_pre_hook(lambda _m, args: (args[0] + 0.5,))
    block.down.register_forward_hook(lambda _m, _a, y: -y)
    block.register_forward_hook(lambda _m, _a, y: y + ALONG)
    expected.head.weight.data *= 2
    found = with_state(model, edited.state_dict)(fresh)
    torch.testing.assert_close(found, expected(fresh), rtol=1e-5, atol=1e-5)


def test_labels_give_a_direction() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).eval()
    x, labels = torch.randn(6, 4), ["a", "b", "a", "b", "a", "b"]
    do = {"add": {"difference": ["a", "b"]}, "scale": 2.0}
    edited = comgra.edit(model, x, {"select": "0", "do": do}, labels=labels)
    hidden = model[0](x)
    steered = hidden + 2 * (hidden[::2].mean(0) - hidden[1::2].mean(0))
    found = with_state(model, edited.state_dict)(x)
    torch.testing.assert_close(found, model[1](steered), rtol=1e-6, atol=1e-6)


def test_a_difference_without_labels_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    direction = {"difference": ["a", "b"]}
    for do in ({"add": direction}, {"project_off": direction}):
        changes = [{"select": "1", "do": {"scale": 0.5}}, {"select": "0", "do": do}]
        with pytest.raises(EditError, match=r"changes\[1\].do: difference needs `labels`"):
            comgra.edit(model, torch.randn(6, 4), changes)


@pytest.mark.parametrize("patch", ["clean", "other", [1, 2, 0]])
def test_a_batch_of_equal_samples_does_not_make_a_patch_a_constant(patch: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(1, 4).expand(3, 4)
    with pytest.raises(EditError, match="takes each sample's value from another place"):
        comgra.edit(model, x, {"select": "0", "do": {"patch": patch}})


def test_a_batch_with_one_position_does_not_make_it_all_positions() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    change = {"select": "0", "parts": {"position": [0]}, "do": "zero"}
    with pytest.raises(EditError, match="position divides dimension 1"):
        comgra.edit(model, torch.randn(3, 1, 4), change)


def test_mistakes_in_changes_and_paths_are_named(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with pytest.raises(EditError, match="changes: there is none"):
        comgra.edit(model, x, [])
    with pytest.raises(EditError, match=r"0.selct: unknown key; .*pass; did you mean 'select'"):
        comgra.edit(model, x, {"selct": "**", "do": "zero"})
    edited = comgra.edit(model, x, {"select": "**", "do": "zero"})
    with pytest.raises(EditError, match="missing is not a folder"):
        edited.save(tmp_path / "missing" / "edited.pt")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.embed(tokens))
        return output


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.layer(x).tanh())
        return output


REFUSED: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "a function": (
        Net,
        {"select": "blocks.0.act", "do": {"clamp": [0, 1]}},
        "clamp is not a linear",
    ),
    "noise": (Net, {"select": "embed", "do": {"noise": 1.0}}, "noise is not a linear function"),
    "a position": (
        Net,
        {"select": "embed", "parts": {"position": [0]}, "do": "zero"},
        "position divides dimension 1 of [6, 7, 8], but weights are the same for all of it",
    ),
    "a mean over positions": (
        Net,
        {"select": "blocks.0.mix", "do": "mean"},
        "the mean is not the same for all samples and positions, but a bias is",
    ),
    "a stream": (
        Net,
        {"select": "blocks.0", "do": "zero"},
        "used by blocks.1.norm, add, not only by linear layers; blocks.0.down is one term of a sum",
    ),
    "no bias": (Net, {"select": "head", "do": {"add": 1.0}}, "head is a Linear without a bias"),
    "a container": (
        Net,
        {"select": "blocks.0", "role": "input", "do": "zero"},
        "blocks.0 is a Block, of which it is not known what is linear",
    ),
    "padding": (
        Images,
        {"select": "first", "role": "input", "do": {"add": 1.0}},
        "first is a Conv2d with padding, at whose borders nothing is added",
    ),
    "mixed channels of a norm": (
        Images,
        {"select": "norm", "do": {"project_off": [1.0, 2, 3, 4, 5, 6], "dim": 1}},
        "norm is a BatchNorm2d, which scales its features one by one",
    ),
    "tied weights": (
        Tied,
        {"select": "embed", "do": {"scale": 2.0}},
        "its weight is shared with head",
    ),
    "one of two calls": (
        Twice,
        {"select": "layer", "iteration": 1, "do": {"scale": 2.0}},
        "layer is called 2 times with the same weights, and not all calls are changed alike",
    ),
    "nothing": (
        Net,
        {"select": "blocks.7", "do": "zero"},
        "changes[0].select: 'blocks.7' matches no",
    ),
    "no such key": (Net, {"select": "embed", "do": "zap"}, "changes: 0.do: unknown change; choose"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_weights_cannot_express_is_refused_with_the_reason(name: str) -> None:
    kind, change, reason = REFUSED[name]
    inputs = {Images: images(0), Twice: torch.randn(6, 8)}.get(kind, tokens(0))
    with pytest.raises(EditError) as caught:
        comgra.edit(made(kind), inputs, change)
    assert reason in str(caught.value)


def test_a_change_of_all_calls_of_a_shared_layer_is_possible() -> None:
    model, x = made(Twice), torch.randn(3, 8)
    edited = comgra.edit(model, x, {"select": "layer", "do": {"scale": 0.5}})
    expected = hooked(model, ["layer"], lambda y: y * 0.5)(x)
    torch.testing.assert_close(with_state(model, edited.state_dict)(x), expected)


def test_files_are_read_by_their_own_readers(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    model = made(Tied)
    edited = comgra.edit(model, tokens(0), {"select": "head", "role": "bias", "do": "zero"})
    for name, read in (("a.safetensors", library.load_file), ("b.pt", torch.load)):
        path = edited.save(tmp_path / name)
        state = read(path)
        assert [*sorted(state)] == ["embed.weight", "head.bias", "head.weight"]
        assert all(torch.equal(t, edited.state_dict[n]) for n, t in state.items())
        assert not state["head.bias"].any()
    with pytest.raises(EditError, match=r"b\.pt already exists"):
        edited.save(tmp_path / "b.pt")


def test_gpt2_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=40)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    ids, fresh = torch.randint(40, (4, 9)), torch.randint(40, (3, 12))
    vector = torch.randn(32)
    changes: list[dict[str, Any]] = [
        {
            "select": "transformer.h.0.attn.c_proj",
            "role": "input",
            "parts": {"head": [1]},
            "do": "zero",
        },
        {"select": "transformer.h.1.mlp.act", "parts": {"feature": [5]}, "do": "zero"},
        {"select": "transformer.h.0.mlp", "do": "zero"},
        {"select": "transformer.h.0", "do": {"add": vector.tolist()}},
        {"select": "transformer.h.1.attn.c_proj", "do": {"project_off": vector.tolist()}},
    ]
    edited = comgra.edit(model, {"input_ids": ids}, changes)
    expected = copy.deepcopy(model)
    first, second = expected.transformer.h
    first.attn.c_proj.register_forward_pre_hook(lambda _m, a: (zeroed(-1, *range(8, 16))(a[0]),))
    first.mlp.register_forward_hook(lambda _m, _a, y: y * 0)
    first.register_forward_hook(
        lambda _m, _a, y: (y[0] + vector, *y[1:]) if isinstance(y, tuple) else y + vector
    )
    second.mlp.act.register_forward_hook(lambda _m, _a, y: zeroed(-1, 5)(y))
    second.attn.c_proj.register_forward_hook(
        lambda _m, _a, y: y - (y @ vector)[..., None] / (vector @ vector) * vector
    )
    found = with_state(model, edited.state_dict)(fresh).logits
    torch.testing.assert_close(found, expected(fresh).logits, rtol=1e-6, atol=1e-6)


PROGRAM = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(2, 3)
"""


def test_the_command_saves_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(PROGRAM)
    target = tmp_path / "edited.pt"
    arguments = ["edit", f"{tmp_path / 'model.py'}:build", str(target)]
    change = ["--change", "{select: '1', parts: {feature: [0]}, do: zero}"]
    assert ended(*arguments, *change) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("2.weight: 2 of 8 elements changed, by up to ")
    assert told[1].startswith(f"{target}: differs from the model with the interventions by")
    state = torch.load(target)
    assert not state["2.weight"][:, 0].any()
    assert state["2.weight"][:, 1:].all()
    assert ended(*arguments, *change) == 2
    assert "already exists" in capsys.readouterr().err
    for wrong, why in (("{select: [", "is not valid YAML"), ("zero", "must be a mapping such as")):
        assert ended(*arguments[:2], str(tmp_path / "b.pt"), "--change", wrong) == 2
        assert why in " ".join(capsys.readouterr().err.split())


def ended(*arguments: str) -> int:
    """Run a command line and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)
