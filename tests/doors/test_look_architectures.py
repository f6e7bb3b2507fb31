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


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("make", [gpt2, bert, t5, llama, mixtral])
def test_models_of_transformers(make: Callable[[Any], nn.Module], gradients: bool) -> None:
    of = pytest.importorskip("transformers")
    torch.manual_seed(0)
    tokens = torch.randint(50, (2, 7))
    assert_recorded(make(of).eval(), tokens, gradients=gradients)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mixer_s32_224"])
def test_models_of_timm(name: str) -> None:
    kernels.declare_missing()
    timm = pytest.importorskip("timm", exc_type=ImportError, reason="`make neutrality` installs it")
    torch.manual_seed(0)
    sizes = {} if name == "resnet10t" else {"img_size": 64}
    model = timm.create_model(name, pretrained=False, num_classes=5, **sizes).eval()
    assert_recorded(model, torch.randn(2, 3, 64, 64), gradients=True)
