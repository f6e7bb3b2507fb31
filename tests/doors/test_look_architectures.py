"""`comgra.look` records what plain hooks see, for architectures of transformers and timm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from benchmarks.neutrality.zoo import kernels

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
LLAMA = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 50}


def gpt2(of: Any) -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    return of.GPT2LMHeadModel(of.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert(of: Any) -> nn.Module:
    return of.BertModel(of.BertConfig(**SMALL, intermediate_size=24, vocab_size=50))


def t5(of: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return of.T5EncoderModel(of.T5Config(**sizes, vocab_size=50))


def llama(of: Any) -> nn.Module:
    return of.LlamaForCausalLM(of.LlamaConfig(**LLAMA))


def mixtral(of: Any) -> nn.Module:
    return of.MixtralForCausalLM(of.MixtralConfig(**LLAMA, num_local_experts=3))


def seen(model: nn.Module, given: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return the output of each call of each module that returns a tensor, by plain hooks."""
    found: dict[tuple[str, int], Tensor] = {}
    calls: dict[str, int] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            calls[path] = calls.get(path, -1) + 1
            if isinstance(output, Tensor):
                found[path, calls[path]] = output.detach().clone()

        return hook

    handles = [m.register_forward_hook(keep(path)) for path, m in model.named_modules() if path]
    model(given)
    for handle in handles:
        handle.remove()
    return found


def assert_recorded(model: nn.Module, given: Tensor, *, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        wanted = seen(model, given)
        cache = comgra.look(model, given)
    assert len(wanted) > 10
    for (path, call), value in wanted.items():
        recorded = cache.slot(path, iteration=call).value(0)
        assert np.array_equal(recorded.reshape(value.shape), value.numpy()), path


def number(output: Any) -> Tensor:
    """Return one number for each sample of what a model returns."""
    (first,) = [*output.values()][:1] if isinstance(output, dict) else [output]
    return first.flatten(1)[:, -1].float()


def zeroed(model: nn.Module, path: str, given: Tensor, position: int | None) -> Tensor:
    """Return the number of a pass in which the output of a module is 0, by a plain hook."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        tensor = (output if isinstance(output, Tensor) else output[0]).clone()
        tensor[:, slice(None) if position is None else position] = 0
        return tensor if isinstance(output, Tensor) else (tensor, *output[1:])

    handle = model.get_submodule(path).register_forward_hook(hook)
    try:
        with torch.no_grad():
            return number(model(given))
    finally:
        handle.remove()


def everything(model: nn.Module) -> dict[str, Any]:
    """Return what a look must leave as it is, to the last bit."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "requires": [parameter.requires_grad for parameter in model.parameters()],
        "flags": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "generator": torch.get_rng_state(),
    }


def assert_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, tensor in one.pop("state").items():
        assert torch.equal(tensor, other["state"][name]), name
    assert torch.equal(one.pop("generator"), other["generator"])
    for key, wanted in one.items():
        assert wanted == other[key], key


def assert_changed(model: nn.Module, given: Tensor, layers: list[str]) -> None:
    """Compare a change, a sweep and an estimate with plain hooks; the model stays as it was."""
    before = everything(model)
    with torch.no_grad():
        clean = number(model(given))
    places = {"select": layers, "do": "zero", "parts": {"position": [0, 2]}}
    measure = {"_target_": f"{__name__}.number"}
    sweep = {**places, "sweep": ["node", "position"], "measure": measure}
    cache = comgra.look(
        model,
        given,
        interventions={
            "off": {"select": layers[0], "do": "zero", "measure": measure},
            "places": sweep,
            "guess": {**sweep, "estimate": "gradient"},
        },
    )
    assert cache.interventions == ["off", "places", "guess"]
    scale = 1e-5 * float(clean.abs().max().clip(min=1))
    samples = [*range(len(given))]
    off = zeroed(model, layers[0], given, None) - clean
    assert off.abs().max() > 0
    found = cache.effects("off")[samples].to_numpy()[0]
    np.testing.assert_allclose(found, off.numpy(), rtol=0, atol=scale)
    effects = cache.effects("places", 0)
    assert len(effects) == len(cache.effects("guess")) == 2 * len(layers)
    rows = [(path, position) for path in layers for position in (0, 2)]
    assert [*effects.loc[0].index] == rows
    for (path, position), row in zip(rows, effects[samples].to_numpy(), strict=True):
        wanted = zeroed(model, path, given, position) - clean
        np.testing.assert_allclose(row, wanted.numpy(), rtol=0, atol=scale)
    assert np.isfinite(cache.effects("guess").to_numpy()).all()
    single = comgra.look(model, given, changes={"select": layers[0], "do": "zero"})
    assert single.changes
    assert_the_same(before, everything(model))


BLOCKS: dict[Callable[[Any], nn.Module], str] = {
    gpt2: "transformer.h",
    bert: "encoder.layer",
    t5: "encoder.block",
    llama: "model.layers",
    mixtral: "model.layers",
}
"""Where the layers of each architecture are."""


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("make", BLOCKS)
def test_models_of_transformers(make: Callable[[Any], nn.Module], gradients: bool) -> None:
    of = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(50, (2, 7))
    assert_recorded(make(of).eval(), tokens, gradients=gradients)


@pytest.mark.slow
@pytest.mark.parametrize("make", BLOCKS)
def test_interventions_on_models_of_transformers(make: Callable[[Any], nn.Module]) -> None:
    of = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, layers = make(of).eval(), [f"{BLOCKS[make]}.{i}" for i in range(2)]
    assert_changed(model, torch.randint(50, (3, 7)), layers)


OF_TIMM = {
    "resnet10t": ["layer1.0", "layer3.0"],
    "vit_tiny_patch16_224": ["blocks.0", "blocks.7"],
    "mixer_s32_224": ["blocks.0", "blocks.5"],
}
"""Layers of each architecture; the position is a channel or a place of the image."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TIMM)
def test_models_of_timm(name: str) -> None:
    kernels.declare_missing()
    timm = pytest.importorskip(
        "timm", exc_type=ImportError, reason="`make test-bridges` installs it"
    )
    torch.manual_seed(0)
    sizes = {} if name == "resnet10t" else {"img_size": 64}
    model = timm.create_model(name, pretrained=False, num_classes=5, **sizes).eval()
    nn.init.normal_(model.get_classifier().weight)  # which some begin with zeros
    images = torch.randn(2, 3, 64, 64)
    assert_recorded(model, images, gradients=True)
    assert_changed(model, images, OF_TIMM[name])
