"""Models with PEFT adapters and quantised ones: recorded, changed and trained like any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.errors import CallError
from tests.doors.test_look_generate import (
    OUTPUTS,
    are_those_of_hooks,
    gpt2,
    hooked,
    padded,
    seen,
    small,
)

pytestmark = [
    pytest.mark.slow,  # imports transformers, and peft and torchao where they are installed
    pytest.mark.filterwarnings("ignore"),  # peft calls what transformers is to remove
]

ATTENTION = "base_model.model.transformer.h.1.attn.c_attn"
LAYER = "base_model.model.transformer.h.0"


def adapted() -> Any:
    """Return a GPT-2 with a LoRA adapter whose weights are not 0."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = gpt2(transformers)
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    adapter = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) / 2)
    return adapter.eval()


@torch.no_grad()
def test_an_adapter_is_recorded_by_the_names_of_its_modules() -> None:
    model = adapted()
    with seen(model) as values:
        model(**padded())
    found = comgra.look(model, **padded(), spec=OUTPUTS)
    for path in (f"{ATTENTION}.lora_A.default", f"{ATTENTION}.lora_B.default", ATTENTION, LAYER):
        value = found.slot(path).value(0, type="eval")
        assert np.array_equal(value, values[path][0].numpy()), path


@torch.no_grad()
def test_a_model_whose_adapter_is_zero_is_the_model_without_it() -> None:
    model = adapted()
    with model.disable_adapter():
        expected = model(**padded()).logits
    change = {"select": "**.lora_B.default", "do": "zero"}
    found = comgra.look(model, **padded(), spec=OUTPUTS, changes=change)
    head = "base_model.model.lm_head"
    assert np.array_equal(found.slot(head).value(0, type="eval"), expected.numpy())


def test_an_adapter_generates_with_and_without_changes() -> None:
    model = adapted()
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with seen(model) as values:
        expected = model.generate(**padded(), **how)
    found = comgra.look(model, **padded(), spec=OUTPUTS, call="generate", **how)
    assert torch.equal(found.output, expected)
    assert found.calls["last"].tolist() == [6, 7, 8]
    are_those_of_hooks(found, values, most=10)
    with hooked(model.get_submodule(LAYER), lambda x, _: x * -1.0):
        expected = model.generate(**padded(), **how)
    change = {"select": LAYER, "do": {"scale": -1.0}}
    found = comgra.look(model, **padded(), call="generate", changes=change, **how)
    assert torch.equal(found.output, expected)


def test_what_an_adapter_generates_has_a_lens_and_is_explained() -> None:
    model = adapted()
    core = model.base_model.model
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    tokens = padded()["input_ids"][:1]
    with seen(model) as values:
        text = model.generate(input_ids=tokens, **how)
    spec = {"nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}}}
    found = comgra.look(model, input_ids=tokens, spec=spec, call="generate", **how)
    assert torch.equal(found.output, text)
    lens = found.picture("lens_from_records", 1, type="eval")
    top = values["base_model.model.lm_head"][1].argmax(-1, keepdim=True)
    assert lens.labels["node"] == [f"base_model.model.transformer.h.{i}" for i in range(2)]
    for node, shown in zip(lens.labels["node"], lens.values, strict=True):
        with torch.no_grad():
            logits = core.lm_head(core.transformer.ln_f(values[node][1]))
        likely = logits.log_softmax(-1).gather(-1, top)[..., 0]
        np.testing.assert_allclose(shown, likely, atol=1e-5)
    places = [tokens.shape[1] - 1, tokens.shape[1]]
    target = {"token": "next", "position": places}
    times = {"method": "input_x_gradient", "target": target}
    pictures = comgra.look(model, input_ids=text, pictures={"times": times})
    leaf = core.transformer.wte(text).detach().requires_grad_()
    logits = model(inputs_embeds=leaf).logits
    for i, place in enumerate(places):
        own = logits[0, place, text[0, place + 1]]
        (gradient,) = torch.autograd.grad(own, leaf, retain_graph=True)
        explained = pictures.picture("times").values[:, i]
        np.testing.assert_allclose(explained, (leaf * gradient).detach(), atol=1e-5)


def test_the_training_of_an_adapter_is_the_same_with_probes_and_checkpoints(tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**", "values": True}},
        "probes": {"eyes": {"samples": {"count": 2}, "schedule": {"every": 1}}},
        "interventions": {"without": {"of": "eyes", "select": "**.lora_B.default", "do": "zero"}},
        "checkpoints": {"every": 1},
    }

    def train(model: Any) -> list[Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(**padded(), labels=padded()["input_ids"]).loss.backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    plain = train(adapted())
    model = adapted()
    with comgra.trace(spec, root=tmp_path) as session:
        traced = train(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    run = comgra.open_run(str(session.path))
    assert not [text for text in run.report["warnings"] if "probe" in text or "checkpoint" in text]
    again = adapted()
    found = comgra.look(again, **padded(), weights=run.checkpoint(1), spec=OUTPUTS)
    last = run.slot(LAYER).value(1)
    assert np.array_equal(found.slot(LAYER).value(1, type="eval"), last)
    with torch.no_grad(), again.disable_adapter():  # at the first step, with the weights as made
        logits = again(**padded()).logits
    head = "base_model.model.lm_head"
    value = run.slot(head).value(0, type="intervention:without")
    assert np.array_equal(value, logits.numpy())


def test_an_adapter_is_harvested(tmp_path: Path) -> None:
    model = adapted()
    found = comgra.harvest(model, [padded()], tmp_path / "rows", select=[LAYER])
    with torch.no_grad(), seen(model) as values:
        model(**padded())
    assert np.array_equal(found.read(LAYER), values[LAYER][0].flatten(0, 1).numpy())


# -- quantised models ---------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def int8() -> nn.Module:
    """Linear layers of torchao, whose weights are tensors of a class of their own."""
    torchao = pytest.importorskip("torchao.quantization")
    model = layers()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def dynamic() -> Any:
    """Linear layers of torch.ao, which are modules of their own."""
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    return quantize(layers(), {nn.Linear}, dtype=torch.qint8)


@torch.no_grad()
@pytest.mark.parametrize("make", [dynamic, int8])
def test_quantised_models_are_recorded_and_changed_like_others(make: Any, tmp_path: Path) -> None:
    model, x = make(), torch.randn(5, 32)
    with seen(model) as values:
        expected = model(x)
    found = comgra.look(model, x, spec=OUTPUTS)
    for path in ("0", "1", "2"):
        assert np.array_equal(found.slot(path).value(0, type="eval"), values[path][0].numpy())
    with hooked(model[1], lambda y, _: y * 2.0):
        doubled = model(x)
    change = {"select": "1", "do": {"scale": 2.0}}
    found = comgra.look(model, x, spec=OUTPUTS, changes=change)
    assert np.array_equal(found.slot("2").value(0, type="eval"), doubled.numpy())
    assert not torch.equal(doubled, expected)
    rows = comgra.harvest(model, [x], tmp_path / "rows", select="0")
    assert np.array_equal(rows.read("0"), values["0"][0].numpy())


@torch.no_grad()
def test_a_quantised_language_model_generates_with_changes_and_has_a_lens() -> None:
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    model, tokens = small()
    for block in model.blocks:
        quantize(block, {nn.Linear}, dtype=torch.qint8, inplace=True)
    with seen(model) as values:
        expected = model.generate(tokens)
    spec = {"nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}}}
    found = comgra.look(model, tokens, spec=spec, call="generate")
    assert torch.equal(found.output, expected)
    lens = found.picture("lens_from_records", 1, type="eval")
    top = values["head"][1].argmax(-1, keepdim=True)
    for node, shown in zip(lens.labels["node"], lens.values, strict=True):
        likely = model.head(values[node][1]).log_softmax(-1).gather(-1, top)[..., 0]
        np.testing.assert_allclose(shown, likely, atol=1e-5)
    with hooked(model.blocks[0], lambda x, call: x.roll(-1, 0) if call == 0 else x):
        patched = model.generate(tokens)
    patch = {"select": "blocks.0", "iteration": 0, "do": {"patch": "other"}}
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", changes=patch)
    assert torch.equal(found.output, patched)
    target = {"token": "top", "position": -1}
    occlusion = {"method": "occlusion", "window": [1], "target": target}
    text = found.output[:, :-1]
    why = comgra.look(model, text, pictures={"why": occlusion}).picture("why").values
    logits = model(text)[:, -1]
    top = logits.argmax(-1, keepdim=True)
    for place in range(text.shape[1]):
        kept = torch.ones(text.shape[1], 1).index_fill(0, torch.tensor([place]), 0.0)

        def covered(x: Tensor, _: int, kept: Tensor = kept) -> Tensor:
            return x * kept

        with hooked(model.embed, covered):
            without = model(text)[:, -1]
        wanted = (logits - without).gather(-1, top)[:, 0]
        np.testing.assert_allclose(why.reshape(len(text), -1)[:, place], wanted, atol=1e-5)


@torch.no_grad()
def test_a_change_of_a_quantised_weight_is_refused() -> None:
    model, x = int8(), torch.randn(5, 32)
    change = {"select": "0", "role": "weight", "do": "zero"}
    with pytest.raises(CallError, match="0, weight"):
        comgra.look(model, x, changes=change)
