"""`comgra.look` of a method such as `generate`: a record for each call of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import CallError, SpecError

VOCABULARY, WIDTH, HEADS, LENGTH, NEW = 50, 16, 2, 7, 4
OUTPUTS = {"nodes": {"all": {"select": "**", "capture": ["output"]}}, "graph": False}


class Block(nn.Module):
    """Attention with a cache, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if past:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        past[:] = [k, v]
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Language(nn.Module):
    """A language model with a `generate` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, past: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, [] if past is None else past[number])
        return self.head(x)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, new: int = NEW, *, sample: bool = False, window: int | None = None
    ) -> Tensor:
        past: list[list[Tensor]] | None = None if window else [[] for _ in self.blocks]
        given = tokens
        for _ in range(new):
            logits = self(given if window is None else given[:, -window:], past)[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1)
            token = drawn if sample else logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], 1)
            given = token if window is None else tokens
        return tokens


def small() -> tuple[Language, Tensor]:
    torch.manual_seed(0)
    return Language().eval(), torch.randint(VOCABULARY, (3, LENGTH))


Change = Callable[[Tensor, int], Tensor]
"""Receives a tensor and the number of the call."""


@contextmanager
def hooked(module: nn.Module, change: Change, *, before: bool = False) -> Iterator[None]:
    """Change the first output, or the first input, with a plain hook."""
    calls = iter(range(1000))

    def on_input(_: nn.Module, args: Any) -> Any:
        return (change(args[0], next(calls)), *args[1:])

    def on_output(_: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output, next(calls))
        return (change(output[0], next(calls)), *output[1:])

    handle = (
        module.register_forward_pre_hook(on_input)
        if before
        else module.register_forward_hook(on_output)
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def seen(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the first output of all calls of each module, with plain hooks."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            first = output if isinstance(output, Tensor) else next(iter(output), None)
            if isinstance(first, Tensor):
                found.setdefault(name, []).append(first.detach().clone())

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def are_those_of_hooks(found: comgra.Look, values: dict[str, list[Tensor]], *, most: int) -> None:
    compared = 0
    for path, calls in values.items():
        nodes = found.slots[(found.slots["node"] == path) & (found.slots["pass"] == "forward")]
        if len(calls) != len(found.calls) or not len(nodes):
            continue  # a module that the model calls several times, or that a wrapper hides
        slot = found.slot(path, role=nodes["role"].iloc[0])
        for step, expected in enumerate(calls):
            value = slot.value(step, type="eval")
            assert np.array_equal(value.reshape(expected.shape), expected.numpy()), (path, step)
        compared += 1
    assert compared >= most


def test_each_call_of_a_generation_is_a_record_with_the_values_of_plain_hooks() -> None:
    model, tokens = small()
    with seen(model) as values:
        expected = model.generate(tokens)
    before = torch.get_rng_state()
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate")
    assert torch.equal(found.output, expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.calls["first"].tolist() == [0, LENGTH, LENGTH + 1, LENGTH + 2]
    assert found.calls["last"].tolist() == [LENGTH - 1, LENGTH, LENGTH + 1, LENGTH + 2]
    assert found.notes()["text"].tolist() == [
        "positions 0 to 6",
        *(f"position {p}" for p in (7, 8, 9)),
    ]
    are_those_of_hooks(found, values, most=10)


def test_values_of_all_calls_join_to_those_of_the_whole_sequence() -> None:
    model, tokens = small()
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate")
    whole = comgra.look(model, found.output[:, :-1], spec=OUTPUTS)
    joined = found.sequence("blocks.1")
    assert joined.shape == (3, LENGTH + NEW - 1, WIDTH)
    assert np.allclose(joined, whole.slot("blocks.1").value(0, type="eval"), atol=1e-6)
    with pytest.raises(CallError, match=r"needs \[samples, positions, \.\.\.\]"):
        whole.sequence("blocks.1")


class Gradual(nn.Module):
    """Calls itself twice, with or without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_the_calls_of_a_method_are_evaluations_in_any_mode(training: bool, gradient: bool) -> None:
    model, x = Gradual().train(training), torch.randn(2, 3)
    with torch.set_grad_enabled(gradient):
        found = comgra.look(model, x, spec=OUTPUTS, call="twice")
    assert found.types == ["eval"]
    assert set(found.slots["pass"]) == {"forward"}
    assert set(found.notes()["type"]) == {"eval"}
    once = model(x)
    for step, expected in enumerate((once, model(once))):
        value = found.slot("layer").value(step, type="eval")
        np.testing.assert_array_equal(value, expected.detach())
    assert model.training is training


def test_a_generation_in_training_mode_reads_like_any_other() -> None:
    model, tokens = small()
    model.train()
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate")
    assert torch.equal(found.output, model.generate(tokens))
    assert found.sequence("blocks.1").shape == (3, LENGTH + NEW - 1, WIDTH)
    assert len(found.slot("blocks.1").value(1, type="eval")) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logit_lens_of_each_call_is_that_of_its_values(dtype: torch.dtype) -> None:
    model, tokens = small()
    model.to(dtype)
    spec = {"nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}}}
    with seen(model) as values:
        model.generate(tokens)
    found = comgra.look(model, tokens, spec=spec, call="generate")
    for step in range(NEW):
        picture = found.picture("lens_from_records", step, type="eval")
        assert picture.labels["node"] == ["blocks.0", "blocks.1"]
        top = values["head"][step].argmax(-1, keepdim=True)
        for node, lens in zip(picture.labels["node"], picture.values, strict=True):
            hidden = values[node][step].float()
            logits = F.linear(hidden, model.head.weight.float(), model.head.bias.float())
            wanted = logits.log_softmax(-1).gather(-1, top)[..., 0].detach()
            np.testing.assert_allclose(lens, wanted, atol=1e-5)


@pytest.mark.parametrize("window", [20, LENGTH])
def test_positions_are_those_of_the_sequence_without_a_cache(window: int) -> None:
    model, tokens = small()
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", window=window)
    assert torch.equal(found.output, model.generate(tokens, window=window))
    assert found.calls["last"].tolist() == [6, 7, 8, 9]
    assert found.calls["first"].tolist() == ([0, 0, 0, 0] if window > LENGTH else [0, 1, 2, 3])
    if window > LENGTH:
        whole = comgra.look(model, found.output[:, :-1], spec=OUTPUTS)
        value = whole.slot("blocks.1").value(0, type="eval")
        assert np.allclose(found.sequence("blocks.1"), value, atol=1e-6)


def test_sampling_draws_the_numbers_of_the_program() -> None:
    model, tokens = small()
    torch.manual_seed(3)
    expected = model.generate(tokens, sample=True)
    torch.manual_seed(3)
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", sample=True)
    assert torch.equal(found.output, expected)


STEER = torch.linspace(-3, 3, WIDTH)


def _steered(x: Tensor, _: int) -> Tensor:
    return x + 2.0 * STEER


def _without_head(x: Tensor, _: int) -> Tensor:
    return torch.cat([x[..., : WIDTH // 2], torch.zeros_like(x[..., WIDTH // 2 :])], -1)


def _eighth_position(x: Tensor, call: int) -> Tensor:
    return x + STEER if call == 1 else x


def _two_positions(x: Tensor, call: int) -> Tensor:
    if call == 0:
        x = x.clone()
        x[:, 5] = 0
    return torch.zeros_like(x) if call == 2 else x


def _prompt(x: Tensor, call: int) -> Tensor:
    return x * 0.5 if call == 0 else x


CHANGES: dict[str, tuple[dict[str, Any], str, bool, Change]] = {
    "steering": ({"do": {"add": STEER.tolist(), "scale": 2.0}}, "blocks.0", False, _steered),
    "a head": (
        {"role": "input", "parts": {"head": [1]}, "do": "zero"},
        "blocks.0.out",
        True,
        _without_head,
    ),
    "one generated position": (
        {"parts": {"position": [LENGTH]}, "do": {"add": STEER.tolist()}},
        "blocks.0",
        False,
        _eighth_position,
    ),
    "positions of the prompt and of the text": (
        {"parts": {"position": [5, LENGTH + 1]}, "do": "zero"},
        "blocks.1",
        False,
        _two_positions,
    ),
    "the first call": ({"iteration": 0, "do": {"scale": 0.5}}, "blocks.1.mlp", False, _prompt),
}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_those_of_plain_hooks(name: str, sample: bool) -> None:
    keys, path, before, change = CHANGES[name]
    model, tokens = small()
    torch.manual_seed(1)
    with hooked(model.get_submodule(path), change, before=before), seen(model) as values:
        expected = model.generate(tokens, sample=sample)
    torch.manual_seed(1)
    found = comgra.look(
        model,
        tokens,
        spec=OUTPUTS,
        call="generate",
        changes={"select": path, **keys},
        sample=sample,
    )
    assert torch.equal(found.output, expected)
    are_those_of_hooks(found, values, most=10)
    assert "elements in" in found.changes[0]


def test_means_and_patches_are_those_of_the_same_call_without_changes() -> None:
    model, tokens = small()
    with seen(model) as clean:
        model.generate(tokens)
    sources: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        ("mean", lambda x: x.mean(0, keepdim=True).expand_as(x)),
        ({"patch": "other"}, lambda x: x.roll(-1, 0)),
    ]
    for do, source in sources:
        values = [source(value) for value in clean["blocks.0.mlp"]]

        def change(_: Tensor, call: int, values: list[Tensor] = values) -> Tensor:
            return values[call]

        with hooked(model.get_submodule("blocks.0.mlp"), change), seen(model) as expected:
            tokens_then = model.generate(tokens)
        changes = {"select": "blocks.0.mlp", "do": do}
        found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", changes=changes)
        assert torch.equal(found.output, tokens_then)
        are_those_of_hooks(found, expected, most=10)


def test_the_prompt_is_patched_from_another_generation(tmp_path: Path) -> None:
    model, tokens = small()
    other = comgra.look(model, tokens.flip(1), spec=OUTPUTS, call="generate")
    other.save(tmp_path / "other")
    value = torch.from_numpy(other.slot("blocks.0").value(0, type="eval"))
    with hooked(model.get_submodule("blocks.0"), lambda x, call: value if call == 0 else x):
        expected = model.generate(tokens)
    patch = {"run": str(tmp_path / "other"), "step": 0}
    changes = [{"select": "blocks.0", "iteration": 0, "do": {"patch": patch}}]
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", changes=changes)
    assert torch.equal(found.output, expected)


def test_a_head_without_attention_is_a_head_that_writes_nothing() -> None:
    model, tokens = small()
    pattern = {"select": "blocks.0", "role": "attention", "parts": {"head": [1]}, "do": "zero"}
    head = {"select": "blocks.0.out", "role": "input", "parts": {"head": [1]}, "do": "zero"}
    by_pattern, by_head = (
        comgra.look(model, tokens, spec=OUTPUTS, call="generate", changes=change)
        for change in (pattern, head)
    )
    assert torch.equal(by_pattern.output, by_head.output)
    one, other = (each.sequence("blocks.1") for each in (by_pattern, by_head))
    assert np.allclose(one, other, atol=1e-6)


def test_a_key_is_a_position_of_the_whole_sequence() -> None:
    model, tokens = small()
    change = {"select": "blocks.0", "role": "attention", "parts": {"key": [2]}, "do": "zero"}
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", changes=change)
    whole = comgra.look(model, found.output[:, :-1], spec=OUTPUTS, changes=change)
    value = whole.slot("blocks.1").value(0, type="eval")
    assert np.allclose(found.sequence("blocks.1"), value, atol=1e-6)


def test_a_change_that_the_unchanged_text_is_too_short_for_says_so() -> None:
    class Ending(Language):
        """Ends at a token that follows if no layer's output is changed."""

        end = -1

        @torch.no_grad()
        def generate(self, tokens: Tensor, new: int = NEW) -> Tensor:  # type: ignore[override]
            for _ in range(new):
                token = self(tokens)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens, token], 1)
                if int(token[0, 0]) == self.end:
                    break
            return tokens

    torch.manual_seed(0)
    model, tokens = Ending().eval(), torch.randint(VOCABULARY, (1, LENGTH))
    model.end = int(model.generate(tokens, 1)[0, -1])
    steer = {"select": "blocks.1", "do": {"add": (20 * STEER).tolist()}}
    assert comgra.look(model, tokens, call="generate", changes=steer).output.shape[1] > LENGTH + 1
    mean = {"select": "blocks.0", "do": "mean"}
    with pytest.raises(CallError, match="it has made fewer calls, as where the unchanged text"):
        comgra.look(model, tokens, call="generate", changes=[steer, mean])


def test_what_is_no_change_and_a_probe_for_a_picture_are_refused() -> None:
    model, tokens = small()
    with pytest.raises(SpecError, match="changes: must be a mapping, or a list of several, got 'a"):
        comgra.look(model, tokens, changes="a")  # type: ignore[arg-type]
    saliency = {"why": {"method": "saliency", "of": "eyes"}}
    with pytest.raises(CallError, match=r"pictures\['why'\].of: there are no probes"):
        comgra.look(model, tokens, pictures=saliency)


def test_changes_of_a_single_call_have_the_gradients_of_plain_hooks() -> None:
    model, tokens = small()

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), tokens.flatten())

    changes = [
        {"select": "blocks.0", "do": {"add": STEER.tolist(), "scale": 2.0}},
        {"select": "blocks.0.out", "role": "input", "parts": {"head": [1]}, "do": "zero"},
        {"select": "head", "role": "weight", "do": {"scale": 0.5}},
    ]
    found = comgra.look(model, tokens, loss=loss, changes=changes)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    block, out = model.get_submodule("blocks.0"), model.get_submodule("blocks.0.out")
    with hooked(block, _steered), hooked(out, _without_head, before=True):
        loss(model(tokens)).backward()
    for name in ("embed", "blocks.0.qkv", "blocks.1.out", "head"):
        gradient = found.slot(name, role="weight", of="grad").value(0)[0]
        expected = model.get_parameter(f"{name}.weight").grad
        assert expected is not None
        assert np.array_equal(gradient, expected.numpy()), name
    assert len(found.changes) == 3
    assert found.output is None
    assert found.calls.empty


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select": "block.0", "do": "zero"}, r"changes\[0\].select: 'block.0' matches no"),
        ({"select": "embed", "do": "nothing"}, "changes: 0.do: unknown change"),
        ({"select": "embed", "part": {}, "do": "zero"}, "did you mean 'parts'"),
        (
            {"select": "embed", "parts": {"position": [99]}, "do": "zero"},
            r"no selected module \(embed\) has a call with 'output' and position 99",
        ),
        ({"select": "embed", "iteration": 9, "do": "zero"}, "has 10 calls with 'output'"),
        ({"select": "embed", "parts": {"position": [-1]}, "do": "zero"}, "count from its start"),
        ({"select": "embed", "do": {"add": {"difference": [0, 1]}}}, "difference needs labels"),
        ({"select": "embed", "do": {"add": [1.0, 2.0, 3.0]}}, "cannot be broadcast"),
    ],
)
def test_a_change_that_is_not_possible_is_refused(changes: dict[str, Any], message: str) -> None:
    model, tokens = small()
    with pytest.raises((CallError, SpecError), match=message):
        comgra.look(model, tokens, spec=OUTPUTS, call="generate", changes=changes)


def test_what_a_method_cannot_have_is_refused() -> None:
    model, tokens = small()
    with pytest.raises(CallError, match="did you mean"):
        comgra.look(model, tokens, call="generat")
    with pytest.raises(CallError, match="a loss belongs to one call"):
        comgra.look(model, tokens, call="generate", loss=lambda output: output.sum())
    saliency = {"why": {"method": "saliency"}}
    with pytest.raises(CallError, match=r"pictures \(why\) belong to one call"):
        comgra.look(model, tokens, call="generate", pictures=saliency)
    with pytest.raises(CallError, match=r"pictures \(why, read, lens\) belong to one call"):
        comgra.look(model, tokens, spec="language", call="generate")
    zero = {"select": "embed", "do": "zero"}
    with pytest.raises(CallError, match="pictures and interventions are made of the unchanged"):
        comgra.look(model, tokens, pictures=saliency, changes=zero)


# -- interventions on what is generated --------------------------------------------------------


def mean_of_tokens(output: Any) -> Tensor:
    """Measure the generated tokens of each sample."""
    tokens = output if isinstance(output, Tensor) else output.sequences
    return tokens[:, LENGTH:].double().mean(1)


def of_last_logits(output: Any, token: int) -> Tensor:
    """Measure the logits of one token, as a mean over the generated positions."""
    return torch.stack([*output.logits], 1)[..., token].mean(1)


TOKENS = {"_target_": f"{__name__}.mean_of_tokens"}


def _scaled(head: int, factor: float, width: int = WIDTH // HEADS) -> Change:
    def change(x: Tensor, _: int) -> Tensor:
        x = x.clone()
        x[..., head * width : (head + 1) * width] *= factor
        return x

    return change


@pytest.mark.parametrize("sample", [False, True])
def test_a_sweep_over_heads_measures_what_is_generated_without_each(sample: bool) -> None:
    model, tokens = small()
    places = {"select": "blocks.*.out", "role": "input", "sweep": ["node", "head"]}
    heads = {**places, "do": {"scale": 40.0}}
    torch.manual_seed(1)
    found = comgra.look(
        model, tokens, spec=OUTPUTS, call="generate", sample=sample,
        interventions={"heads": {**heads, "measure": TOKENS}},
    )  # fmt: skip
    torch.manual_seed(1)
    clean = model.generate(tokens, sample=sample)
    assert torch.equal(found.output, clean)  # the record is that of the unchanged generation
    effects: Any = found.effects("heads")
    assert effects.index.names == ["step", "node", "head"]
    for block in range(2):
        for head in range(HEADS):
            path = f"blocks.{block}.out"
            torch.manual_seed(1)
            with hooked(model.get_submodule(path), _scaled(head, 40.0), before=True):
                without = model.generate(tokens, sample=sample)
            wanted = (mean_of_tokens(without) - mean_of_tokens(clean)).numpy()
            assert effects.loc[(0, path, head), [0, 1, 2]].tolist() == wanted.tolist()
    assert effects["mean"].abs().max() > 0
    facts = found.intervention_facts("heads")
    calls, elements = NEW, 3 * (LENGTH + NEW - 1) * WIDTH * 2
    assert facts["changes"][0]["elements"] == elements
    assert facts["changes"][0]["tensors"] == 2 * calls


def test_a_sweep_over_positions_counts_them_in_the_whole_sequence(tmp_path: Path) -> None:
    model, tokens = small()
    steer = {"do": {"add": (5 * STEER).tolist()}}
    found = comgra.look(
        model, tokens, spec=OUTPUTS, call="generate",
        interventions={
            "positions": {
                "select": "blocks.0", **steer, "sweep": "position", "measure": TOKENS,
                "first": [{"select": "blocks.1.mlp", "do": {"scale": 0.5}}],
            },
            "one": {"select": "blocks.0.mlp", "do": "mean", "measure": TOKENS},
            "nothing": {"select": "blocks.0.mlp", "do": {"scale": 1.0}, "measure": TOKENS},
        },
    )  # fmt: skip
    half = hooked(model.get_submodule("blocks.1.mlp"), lambda x, _: x * 0.5)
    with half:
        baseline = mean_of_tokens(model.generate(tokens))
    effects: Any = found.effects("positions")
    assert effects.index.get_level_values("position").tolist() == [*range(LENGTH + NEW - 1)]
    for position in (0, 5, LENGTH, LENGTH + 2):

        def at(x: Tensor, call: int, position: int = position) -> Tensor:
            start = 0 if call == 0 else LENGTH + call - 1
            x = x.clone()
            x[:, position - start : position - start + 1] += 5 * STEER * (position >= start)
            return x

        half = hooked(model.get_submodule("blocks.1.mlp"), lambda x, _: x * 0.5)
        with half, hooked(model.get_submodule("blocks.0"), at):
            changed = mean_of_tokens(model.generate(tokens))
        row = effects.loc[(0, position), [0, 1, 2]]
        assert row.tolist() == (changed - baseline).tolist()
    with seen(model) as values:
        clean = model.generate(tokens)
    means = [value.mean(0, keepdim=True).expand_as(value) for value in values["blocks.0.mlp"]]
    with hooked(model.get_submodule("blocks.0.mlp"), lambda _, call: means[call]):
        changed = model.generate(tokens)
    wanted = mean_of_tokens(changed) - mean_of_tokens(clean)
    assert found.effects("one")[[0, 1, 2]].to_numpy()[0].tolist() == wanted.tolist()
    (warning,) = found.report["warnings"]
    assert warning == "intervention 'nothing' did nothing: every element kept its value"
    assert found.sequence("blocks.0").shape == (3, LENGTH + NEW - 1, WIDTH)
    found.save(tmp_path / "kept")
    kept = comgra.open_run(tmp_path / "kept")
    assert kept.effects("positions").equals(effects)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"interventions\['a'\].measure: a method has no loss or logits of its own"),
        ({"measure": TOKENS, "into": "head"}, r"\['a'\].into: is possible for one call"),
        ({"measure": TOKENS, "pass": "grad"}, r"\['a'\].pass: a method has no gradients"),
        ({"measure": TOKENS, "do": {"add": {"difference": [0, 1]}}}, "difference needs labels"),
        ({"measure": TOKENS, "select": "block.0"}, r"\['a'\].select: 'block.0' matches no"),
        ({"measure": TOKENS, "iteration": 9}, r"\['a'\]: no selected module .* has 10 calls"),
        ({"measure": TOKENS, "sweep": "haed"}, "'haed' is not one of node"),
        (
            {"measure": {"_target_": "torch.neg"}},
            r"torch.neg must return one number per sample, \[3\], not \[3, 11\]",
        ),
    ],
)
def test_an_intervention_that_a_generation_cannot_have_is_refused(
    change: dict[str, Any], message: str
) -> None:
    model, tokens = small()
    declared = {"a": {"select": "blocks.0", "do": "zero", **change}}
    with pytest.raises((CallError, SpecError), match=message):
        comgra.look(model, tokens, spec=OUTPUTS, call="generate", interventions=declared)


class Unusual(Gradual):
    """Methods whose calls of the model cannot be recorded."""

    @property
    def size(self) -> int:
        return 3

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self(x)

    async def later(self, x: Tensor) -> Tensor:
        return self(x)

    def computed(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("size", "such as 'generate', got 'size', which is no method$"),
        ("__doc__", "got '__doc__', which is no method$"),
        ("stream", "call='stream' yields its results, so that its calls of the model"),
        ("later", "call='later' is a coroutine, so that its calls of the model"),
        ("computed", "nothing was recorded: 'computed' has called neither the model nor a part"),
        ("twise", "got 'twise'; did you mean 'twice'"),
    ],
)
def test_a_method_whose_calls_cannot_be_recorded_is_refused(name: str, message: str) -> None:
    with pytest.raises(CallError, match=message):
        comgra.look(Unusual(), torch.randn(2, 3), spec=OUTPUTS, call=name)


def test_a_method_of_one_object_alone_is_recorded() -> None:
    model, x = Gradual(), torch.randn(2, 3)
    model.once = lambda x: x + 1  # type: ignore[assignment]
    with pytest.raises(CallError, match="'once' has called neither the model"):
        comgra.look(model, x, spec=OUTPUTS, call="once")


# -- transformers ------------------------------------------------------------------------------


def gpt2(transformers: Any, **more: Any) -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=64,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=HEADS, hidden_size=WIDTH,
        intermediate_size=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def padded() -> dict[str, Any]:
    """Return two prompts, the second one two tokens shorter."""
    torch.manual_seed(2)
    tokens, mask = (
        torch.randint(1, VOCABULARY, (2, LENGTH)),
        torch.ones(2, LENGTH, dtype=torch.long),
    )
    tokens[1, :2], mask[1, :2] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


OF_TRANSFORMERS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "GPT-2": (gpt2, "transformer.h.0", "transformer.h.0.attn.c_proj"),
    "Llama": (llama, "model.layers.0", "model.layers.0.self_attn.o_proj"),
}


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_generations_of_transformers_are_those_of_plain_hooks(
    name: str, dtype: torch.dtype
) -> None:
    make, layer, out = OF_TRANSFORMERS[name]
    model = make(pytest.importorskip("transformers")).to(dtype)
    how: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "call": "generate"}
    heads = 4 if name == "Llama" else HEADS
    size = WIDTH // heads

    def without_head(x: Tensor, _: int) -> Tensor:
        return torch.cat(
            [x[..., :size], torch.zeros_like(x[..., size : 2 * size]), x[..., 2 * size :]], -1
        )

    torch.manual_seed(5)
    plain = model.generate(**padded(), max_new_tokens=NEW, do_sample=True)
    torch.manual_seed(5)
    assert torch.equal(comgra.look(model, spec=OUTPUTS, **padded(), **how).output, plain)
    torch.manual_seed(5)
    steered = hooked(model.get_submodule(layer), lambda x, _: x + 2.0 * STEER.to(dtype))
    ablated = hooked(model.get_submodule(out), without_head, before=True)
    with steered, ablated, seen(model) as values:
        expected = model.generate(**padded(), max_new_tokens=NEW, do_sample=True)
    torch.manual_seed(5)
    changes = [
        {"select": layer, "do": {"add": STEER.tolist(), "scale": 2.0}},
        {"select": out, "role": "input", "parts": {"head": [1]}, "do": "zero"},
    ]
    found = comgra.look(model, spec=OUTPUTS, changes=changes, **padded(), **how)
    assert torch.equal(found.output, expected)
    assert found.calls["last"].tolist() == [6, 7, 8, 9]
    if dtype is torch.float32:
        are_those_of_hooks(found, values, most=12)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_ablated_heads_of_transformers_are_measured_by_the_logits_of_what_is_generated(
    name: str,
) -> None:
    make, _, out = OF_TRANSFORMERS[name]
    model = make(pytest.importorskip("transformers"))
    how: dict[str, Any] = {
        "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True,
        "output_logits": True, "eos_token_id": None,
    }  # fmt: skip
    heads = 4 if name == "Llama" else HEADS
    measures = {"logits": {"_target_": f"{__name__}.of_last_logits", "token": 7}, "tokens": TOKENS}
    ablated = {"select": out, "role": "input", "do": "zero", "sweep": "head"}
    found = comgra.look(
        model, spec=OUTPUTS, call="generate", **padded(), **how,
        interventions={key: {**ablated, "measure": each} for key, each in measures.items()},
    )  # fmt: skip
    clean = model.generate(**padded(), **how)
    assert torch.equal(found.output.sequences, clean.sequences)
    for head in range(heads):
        change = _scaled(head, 0.0, WIDTH // heads)
        with hooked(model.get_submodule(out), change, before=True):
            without = model.generate(**padded(), **how)
        wanted = of_last_logits(without, 7) - of_last_logits(clean, 7)
        row = found.effects("logits").loc[(0, head), [0, 1]]
        np.testing.assert_array_equal(row.to_numpy(np.float32), wanted.numpy())
        tokens = mean_of_tokens(without) - mean_of_tokens(clean)
        row = found.effects("tokens").loc[(0, head), [0, 1]]
        assert row.to_numpy().tolist() == tokens.tolist()
    assert found.effects("logits")["mean"].abs().min() > 0


@pytest.mark.slow  # imports transformers
def test_an_encoder_and_beams_are_records_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        num_layers=1, d_model=WIDTH, d_kv=8, d_ff=32, num_heads=HEADS, vocab_size=VOCABULARY,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    how: dict[str, Any] = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False}
    found = comgra.look(model, spec=OUTPUTS, call="generate", **padded(), **how)
    assert torch.equal(found.output, model.generate(**padded(), **how))
    assert found.calls["module"].tolist() == ["encoder", "", "", ""]
    assert found.calls["first"].tolist() == [0, 0, 1, 2]
    assert found.slot("decoder.block.0.layer.0.SelfAttention.q").value(2, type="eval").shape[0] == 4
    assert found.sequence("decoder.block.0.layer.0.SelfAttention.q").shape == (4, 3, WIDTH)


@pytest.mark.slow  # imports transformers
def test_a_sequence_has_no_values_of_tokens_that_were_rejected() -> None:
    model = llama(pytest.importorskip("transformers"))
    tokens = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    found = comgra.look(
        model, tokens, spec=OUTPUTS, call="generate", prompt_lookup_num_tokens=3, **how
    )
    assert torch.equal(found.output, model.generate(tokens, **how))
    calls = found.calls
    assert (calls["first"].iloc[1:].to_numpy() <= calls["last"].iloc[:-1].to_numpy()).any()
    whole = comgra.look(model, found.output[:, :-1], spec=OUTPUTS).slot("model.layers.1").value(0)
    joined = found.sequence("model.layers.1")
    assert joined.shape == whole.shape
    np.testing.assert_allclose(joined, whole, atol=1e-5)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("name", ["MambaForCausalLM", "Mamba2ForCausalLM"])
def test_a_model_whose_cache_has_no_length_generates(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name).config_class(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, num_heads=4,
        head_dim=8, n_groups=1, eos_token_id=1, pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    tokens = torch.randint(3, VOCABULARY, (2, 5))
    how: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    found = comgra.look(model, tokens, spec=OUTPUTS, call="generate", **how)
    assert torch.equal(found.output, model.generate(tokens, **how))
    assert found.calls["first"].tolist() == [0, 5, 6, 7]
    assert found.calls["last"].tolist() == [4, 5, 6, 7]
    whole = comgra.look(model, found.output[:, :-1], spec=OUTPUTS).slot("backbone.layers.1")
    joined = found.sequence("backbone.layers.1")
    np.testing.assert_allclose(joined, whole.value(0, type="eval"), atol=1e-4)


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_lens_of_a_generation_has_the_positions_that_the_head_receives(
    make: Callable[[Any], Any], cached: bool
) -> None:
    model = make(pytest.importorskip("transformers"))
    spec = {"nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}}}
    how: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": None,
        "use_cache": cached,
    }
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH))
    found = comgra.look(model, tokens, spec=spec, call="generate", **how)
    whole = comgra.look(model, found.output, spec=spec).picture("lens_from_records", type="eval")
    for step in range(NEW):
        lens = found.picture("lens_from_records", step, type="eval")
        at = LENGTH - 1 + step
        np.testing.assert_allclose(lens.values, whole.values[:, :, at : at + 1], atol=1e-4)
        received = at + 1 if step == 0 or not cached else 1
        assert lens.labels.get("position", [0]) == [received - 1]
