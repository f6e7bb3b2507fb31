"""What explains a predicted token equals Captum's result on embeddings, and explicit formulas."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.subject import Tap
from tests.probing.attention import HEADS, TOKENS, WIDTH, Change, Classifier, Language, hooked
from tests.probing.nets import Transformer
from tests.probing.test_methods import picture, same, subject_of, values

LENGTH = 6
WORDS = torch.randint(TOKENS, (3, LENGTH), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model() -> Language:
    torch.manual_seed(0)
    return Language().double().eval()


def from_embedding(model: nn.Module, at: int) -> Callable[[Tensor], Tensor]:
    """Return the function from the embeddings to the logits at a position."""

    def run(embedded: Tensor) -> Tensor:
        tokens = torch.zeros(embedded.shape[:2], dtype=torch.int64)
        with hooked(model, [("embed", "output", lambda _: embedded)]):
            return model(tokens)[:, at]

    return run


@pytest.mark.parametrize("at", [-1, 2])
def test_gradient_methods_equal_captum_on_the_embeddings(model: Language, at: int) -> None:
    captum = pytest.importorskip("captum.attr")
    run, token = from_embedding(model, at), 5
    embedded = model.embed(WORDS).detach().requires_grad_()
    target = {"token": token, "position": at}
    same(
        values(model, WORDS, method="saliency", target=target),
        captum.Saliency(run).attribute(embedded, target=token),
    )
    same(
        values(model, WORDS, method="input_x_gradient", target=target),
        captum.InputXGradient(run).attribute(embedded, target=token),
    )
    theirs = captum.IntegratedGradients(run).attribute(embedded, target=token, n_steps=30)
    drawn = picture(model, WORDS, method="integrated_gradients", points=30, target=target)
    same(drawn.maps[0].values, theirs)
    assert (drawn.maps[0].node, drawn.maps[0].role) == ("embed", "output")
    later = slice(at + 1, None) if at >= 0 else slice(LENGTH, None)
    assert not drawn.maps[0].values[:, later].any()  # a causal model does not see what follows


def test_occlusion_equals_captum_with_tokens_as_features(model: Language) -> None:
    captum = pytest.importorskip("captum.attr")
    run, token = from_embedding(model, -1), 5
    embedded = model.embed(WORDS).detach()
    given: dict[str, Any] = {"method": "occlusion", "target": {"token": token}}
    for width, stride in ((1, 1), (3, 2)):
        theirs = captum.Occlusion(run).attribute(
            embedded, (width, WIDTH), (stride, WIDTH), target=token, baselines=0.0
        )[..., 0]
        same(values(model, WORDS, window=[width], stride=stride, **given), theirs)
    # Embedding a token is replacing it.
    covered = values(model, WORDS, window=[1], baseline={"token": 7}, **given)
    with torch.no_grad():
        whole = model(WORDS)[:, -1, token]
        for i in range(LENGTH):
            other = WORDS.clone()
            other[:, i] = 7
            drop = whole - model(other)[:, -1, token]
            torch.testing.assert_close(covered[:, i], drop, rtol=0, atol=1e-12)
        means = values(model, WORDS, window=[1], baseline="mean", **given)
        hidden = embedded.clone()
        hidden[:, 2] = embedded.mean(1)
        torch.testing.assert_close(means[:, 2], whole - run(hidden)[:, token], rtol=0, atol=1e-12)


def test_a_token_rather_than_another_is_the_difference_of_both(model: Language) -> None:
    leaf = model.embed(WORDS).detach().requires_grad_()
    scores = from_embedding(model, 3)(leaf)
    best, others = scores.argmax(1), [1, 2, 3]
    for score in ("logit", "log_probability"):  # the normalisation cancels out
        target = {"rather_than": others, "position": 3, "score": score}
        drawn = picture(model, WORDS, method="input_x_gradient", target=target)
        total = (scores[range(3), best] - scores[range(3), others]).sum()
        (gradient,) = torch.autograd.grad(total, leaf, retain_graph=True)
        same(drawn.maps[0].values, leaf.detach() * gradient)
        assert drawn.facts == {
            "method": "input_x_gradient",
            "target": best.tolist(),
            "rather_than": others,
            "position": 3,
            "score": score,
        }
    # The next token of the input, and its log-probability.
    target = {"token": "next", "position": 1, "score": "log_probability"}
    drawn = picture(model, WORDS, method="saliency", target=target)
    assert drawn.facts["target"] == WORDS[:, 2].tolist()
    likely = from_embedding(model, 1)(leaf).log_softmax(1)[range(3), WORDS[:, 2]]
    (gradient,) = torch.autograd.grad(likely.sum(), leaf)
    same(drawn.maps[0].values, gradient.abs())


@pytest.mark.parametrize(
    ("position", "token", "explained"),
    [("all", "top", [*range(LENGTH)]), ("all", "next", [*range(LENGTH - 1)]), ([-1, 2], 5, [5, 2])],
    ids=str,
)
def test_several_positions_are_explained_as_each_alone(
    model: Language, position: Any, token: Any, explained: list[int]
) -> None:
    methods: list[dict[str, Any]] = [
        {"method": "saliency"},
        {"method": "integrated_gradients", "points": 5},
        {"method": "occlusion", "window": [1]},
    ]
    for spec in methods:
        target = {"token": token, "position": position, "rather_than": 3}
        drawn = picture(model, WORDS, **spec, target=target)
        each = [
            picture(model, WORDS, **spec, target={**target, "position": at}) for at in explained
        ]
        found = drawn.maps[0].values
        assert found.shape[:3] == (len(WORDS), len(explained), LENGTH)
        assert torch.equal(found, torch.stack([one.maps[0].values for one in each], 1))
        assert drawn.facts["positions"] == explained
        for key in {"target", "rather_than", "gap"} & {*drawn.facts}:
            assert drawn.facts[key] == [
                [one.facts[key][sample] for one in each] for sample in range(len(WORDS))
            ]
    if token == "next":
        assert drawn.facts["target"] == WORDS[:, 1:].tolist()


def test_rollout_shows_several_positions(model: Language) -> None:
    whole = picture(model, WORDS, method="attention_rollout", position="all")
    assert whole.facts["positions"] == [*range(LENGTH)]
    found = whole.maps[0].values
    assert found.shape == (len(WORDS), LENGTH, LENGTH)
    for at in (0, 3, -1):
        same(found[:, at], values(model, WORDS, method="attention_rollout", position=at))
    two = picture(model, WORDS, method="attention_rollout", position=[-1, 0])
    assert two.facts["positions"] == [LENGTH - 1, 0]
    assert torch.equal(two.maps[0].values, found[:, [LENGTH - 1, 0]])


def test_a_classifier_has_no_positions_to_explain() -> None:
    torch.manual_seed(0)
    model = Classifier().double().eval()
    with pytest.raises(ProbeError, match="position: all needs a model that returns"):
        picture(model, WORDS, method="saliency", target={"token": 1, "position": "all"})


def test_classifiers_of_tokens_have_contrasts_too() -> None:
    torch.manual_seed(0)
    model = Classifier().double().eval()
    both = [values(model, WORDS, method="input_x_gradient", target=c) for c in (2, 0)]
    contrast = values(
        model, WORDS, method="input_x_gradient", target={"token": 2, "rather_than": 0}
    )
    same(contrast, both[0] - both[1])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"target": "top"}, "target: {token: top, position: -1}"),
        ({"target": {"token": 11}}, "token 11 does not exist; the model has 11"),
        ({"target": {"token": 1, "rather_than": 12}}, "token 12 does not exist"),
        ({"target": {"token": [1, 2]}}, "2 tokens are given for 3 samples"),
        ({"target": {"position": 6}}, "position 6 does not exist; the model returns 6"),
        ({"target": {"token": "next"}}, "no token of the input follows position -1"),
        (
            {"method": "occlusion", "window": [2, 2], "target": {}},
            "a window covers positions: write `window: \\[1\\]`",
        ),
        (
            {"method": "occlusion", "window": [1], "baseline": {"token": 11}, "target": {}},
            "token 11 does not exist; embed has 11",
        ),
        (
            {"method": "occlusion", "window": [7], "target": {}},
            "window of 7 positions does not fit: the input has 6",
        ),
        ({"method": "attention_rollout", "position": 6}, "position 6 does not exist"),
        ({"target": {"position": [0, 6]}}, "position 6 does not exist; there are 6"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    spec: dict[str, Any], why: str, model: Language
) -> None:
    with pytest.raises(ProbeError, match=why):
        picture(model, WORDS, **{"method": "saliency", **spec})


def test_nothing_is_left_of_a_pass_with_gradients(model: Language) -> None:
    subject = subject_of(model, WORDS)
    value = model.embed(WORDS).detach().requires_grad_()
    tap = Tap(frozenset({"embed"}), replace={"embed": value.clone()})
    with torch.enable_grad():
        output = subject.run((WORDS,), {}, tap)
        torch.autograd.grad(output.sum(), value)
    left = weakref.ref(tap)
    del tap, output, value
    gc.collect()
    assert left() is None


# -- attention rollout ----------------------------------------------------------------------------


def rollout(layers: list[np.ndarray[Any, Any]], residual: float = 0.5) -> np.ndarray[Any, Any]:
    """Return the rollout by the formula of Abnar and Zuidema; layers are [heads, query, key]."""
    joint = np.eye(layers[0].shape[-1])
    for weights in layers:
        mixed = residual * np.eye(len(joint)) + (1 - residual) * weights.mean(0)
        joint = mixed / mixed.sum(-1, keepdims=True) @ joint
    return joint


def weights_by_hand(model: Language) -> list[np.ndarray[Any, Any]]:
    """Return the attention weights of each block, [samples, heads, query, key]."""
    found = []

    def keep(qkv: Tensor) -> Tensor:
        q, k, _ = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        hidden = torch.ones(LENGTH, LENGTH).tril() == 0
        found.append(scores.masked_fill(hidden, -torch.inf).softmax(-1).numpy())
        return qkv

    names = ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]
    paths: list[tuple[str, str, Change]] = [(name, "output", keep) for name in names]
    with hooked(model, paths), torch.no_grad():
        model(WORDS)
    return found


@pytest.mark.parametrize(("residual", "position"), [(0.5, -1), (0.2, 3)])
def test_the_rollout_of_fused_attention_is_that_of_the_formula(
    residual: float, position: int, model: Language
) -> None:
    by_layer = weights_by_hand(copy.deepcopy(model))
    found = values(
        model, WORDS, method="attention_rollout", residual=residual, position=position
    ).numpy()
    for i in range(len(WORDS)):
        wanted = rollout([layer[i] for layer in by_layer], residual)[position]
        np.testing.assert_allclose(found[i], wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1.0, atol=1e-6)


def test_attention_is_found_where_its_functions_were_replaced(
    model: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program, or tracing, may have put a function of its own in the place of torch's."""
    wanted = [values(each, WORDS, method="attention_rollout") for each in (model, _Plain(model))]
    for name in ("scaled_dot_product_attention", "softmax"):
        original = getattr(F, name)
        monkeypatch.setattr(F, name, lambda *args, f=original, **options: f(*args, **options))
    found = [values(each, WORDS, method="attention_rollout") for each in (model, _Plain(model))]
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


class _Plain(nn.Module):
    """One layer of attention whose weights a function computes."""

    def __init__(self, model: Language) -> None:
        super().__init__()
        self.embed, self.head = copy.deepcopy(model.embed), copy.deepcopy(model.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weights = F.softmax(x @ x.mT, -1)
        return self.head(weights @ x)


def test_the_rollout_of_torchs_modules_which_return_no_weights() -> None:
    torch.manual_seed(0)
    model = Transformer().eval()
    found = values(model, WORDS, method="attention_rollout", position=0).numpy()
    x, layers = model.embed(WORDS), []
    with torch.no_grad():
        for layer in model.encoder.layers:
            assert isinstance(layer, nn.TransformerEncoderLayer)
            layers.append(layer.self_attn(x, x, x, average_attn_weights=False)[1].numpy())
            x = layer(x)
    for i in range(len(WORDS)):
        wanted = rollout([weights[i] for weights in layers])[0]
        np.testing.assert_allclose(found[i], wanted, rtol=0, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_of_transformers(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 31, "n_positions": 8}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**shape, attn_implementation=attention)
    model = transformers.GPT2LMHeadModel(config).eval()
    found = values(model, WORDS, method="attention_rollout").numpy()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = [each.numpy() for each in model(WORDS, output_attentions=True).attentions]
    for i in range(len(WORDS)):
        wanted = rollout([weights[i] for weights in layers])[-1]
        np.testing.assert_allclose(found[i], wanted, rtol=0, atol=1e-6)
    target = {"token": 5, "rather_than": 7}
    ours = values(model, WORDS, method="input_x_gradient", target=target)
    leaf = model.transformer.wte(WORDS).detach().requires_grad_()
    logits = model(inputs_embeds=leaf).logits[:, -1]
    (gradient,) = torch.autograd.grad((logits[:, 5] - logits[:, 7]).sum(), leaf)
    same(ours, (leaf * gradient).detach(), 1e-5)


def a_gpt2(transformers: Any) -> tuple[nn.Module, str]:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config), "transformer.wte"


def a_llama(transformers: Any) -> tuple[nn.Module, str]:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16,
        intermediate_size=24, vocab_size=31, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), "model.embed_tokens"


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("make", [a_gpt2, a_llama])
def test_each_generated_token_of_models_of_transformers_is_explained(
    make: Callable[[Any], tuple[nn.Module, str]],
) -> None:
    captum = pytest.importorskip("captum.attr")
    torch.manual_seed(0)
    made, embedding = make(pytest.importorskip("transformers"))
    model: Any = made.eval()
    text = comgra.look(model, WORDS, call="generate", max_new_tokens=3, do_sample=False).output
    assert text.shape == (len(WORDS), LENGTH + 3)
    places = [LENGTH - 1, LENGTH, LENGTH + 1]  # those that have predicted the new tokens
    target = {"token": "next", "position": places}
    pictures = {
        "saliency": {"method": "saliency", "target": target},
        "times": {"method": "input_x_gradient", "target": target},
        "paths": {"method": "integrated_gradients", "points": 20, "target": target},
        "hidden": {"method": "occlusion", "window": [1], "target": target},
        "rather": {"method": "input_x_gradient", "target": {**target, "rather_than": 4}},
    }
    found = comgra.look(model, text, pictures=pictures)
    embedded = model.get_submodule(embedding)(text).detach().requires_grad_()
    for i, place in enumerate(places):
        token = text[:, place + 1]

        def run(given: Tensor, place: int = place) -> Tensor:
            return model(inputs_embeds=given).logits[:, place]

        def shown(name: str, i: int = i) -> Tensor:
            return torch.from_numpy(np.asarray(found.picture(name).values[:, i]))

        assert [row[i] for row in found.picture("times").facts["target"]] == token.tolist()
        same(shown("saliency"), captum.Saliency(run).attribute(embedded, target=token), 1e-5)
        times = captum.InputXGradient(run).attribute(embedded, target=token).detach()
        same(shown("times"), times, 1e-5)
        paths = captum.IntegratedGradients(run).attribute(embedded, target=token, n_steps=20)
        same(shown("paths"), paths.detach(), 1e-4)
        hidden = captum.Occlusion(run).attribute(
            embedded.detach(), (1, 16), (1, 16), target=token, baselines=0.0
        )
        same(shown("hidden"), hidden[..., 0], 1e-4)
        other = captum.InputXGradient(run).attribute(embedded, target=torch.full_like(token, 4))
        same(shown("rather"), times - other.detach(), 1e-4)
    spans = found.token_attributions("times", spans={"prompt": (0, LENGTH), "new": (LENGTH, 9)})
    summed = found.picture("times").values.sum(-1)
    np.testing.assert_allclose(
        spans["prompt"].to_numpy(), summed[..., :LENGTH].sum(-1).ravel(), rtol=1e-4, atol=1e-7
    )


@pytest.mark.slow  # imports transformers
def test_an_encoder_and_decoder_that_share_their_embedding_are_told_apart() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=31, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    answer = torch.randint(TOKENS, (len(WORDS), 4))
    target = {"token": 7, "position": 2}
    found = comgra.look(
        model,
        input_ids=WORDS,
        decoder_input_ids=answer,
        pictures={"times": {"method": "input_x_gradient", "target": target}},
    )
    embedded = model.shared(WORDS).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, decoder_input_ids=answer).logits[:, 2, 7]
    (gradient,) = torch.autograd.grad(logits.sum(), embedded)
    same(torch.from_numpy(found.picture("times").values), (embedded * gradient).detach())


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 4), nn.Linear(4, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_a_model_without_attention_has_no_rollout() -> None:
    with pytest.raises(ProbeError, match="no self-attention whose weights can be read"):
        picture(NoAttention(), WORDS, method="attention_rollout")


class Crossed(nn.Module):
    """Attends to itself and then to a memory that is as long."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed, self.memory = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.other = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h, memory = self.embed(x), self.memory(x.flip(1))
        h = h + self.own(h, h, h)[0]
        if self.form == "module":
            h = h + self.other(h, memory, memory)[0]
        elif self.form == "fused":
            h = h + F.scaled_dot_product_attention(self.q(h), self.k(memory), memory)
        elif self.form == "softmax":
            h = h + (self.q(h) @ self.k(memory).mT / 3 + 0.1).softmax(-1) @ memory
        elif self.form == "own":
            q, k = self.q(h) * 0.5, F.layer_norm(self.k(h), [WIDTH])
            h = h + (q @ k.mT).softmax(-1) @ h
        return self.head(h)


@pytest.mark.parametrize("form", ["module", "fused", "softmax"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_rollout_of_cross_attention_is_refused(form: str, frozen: bool) -> None:
    """Its weights are square, too, if both sequences are equally long."""
    torch.manual_seed(0)
    model = Crossed(form).eval().requires_grad_(not frozen)
    with pytest.raises(ProbeError, match="the model has cross-attention"):
        values(model, WORDS, method="attention_rollout")
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_queries_and_keys_that_are_scaled_or_normalised_are_self_attention() -> None:
    torch.manual_seed(0)
    found = values(Crossed("own").eval(), WORDS, method="attention_rollout")
    np.testing.assert_allclose(found.sum(1), 1.0, atol=1e-6)


def test_the_rollout_of_a_model_that_changes_its_input_in_place() -> None:
    class Series(nn.Module):
        """Attends to numbers, which it centres in place, with frozen layers."""

        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            x -= x.mean(1, keepdim=True)
            return self.head(self.attend(x, x, x)[0].mean(1))

    torch.manual_seed(0)
    model, x = Series().eval().requires_grad_(False), torch.randn(3, LENGTH, WIDTH)
    found = values(model, x, method="attention_rollout", position=1).numpy()
    centred = x - x.mean(1, keepdim=True)
    with torch.no_grad():
        weights = model.attend(centred, centred, centred)[1].numpy()
    for i in range(3):
        np.testing.assert_allclose(found[i], rollout([weights[i][None]])[1], rtol=0, atol=1e-6)
