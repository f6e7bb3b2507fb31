"""The logit lens shows what each layer would predict, in float64 and at each record."""

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
from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.hooks.probing.methods import drawn
from comgra_decl.hooks.probing.subject import Drawn
from comgra_decl.spec import load_spec
from comgra_decl.viewer.model.pictures import album
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.panes.lenses import lens_card
from comgra_decl.viewer.panes.pictures import PicturesPane
from tests.probing.test_methods import subject_of

TOKENS = 23


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.inner(self.norm(x)), None


class Language(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = last
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return {"logits": self.head(self.last(x)[:, :])}


def words(samples: int = 4) -> Tensor:
    return torch.randint(TOKENS, (samples, 6), generator=torch.Generator().manual_seed(3))


def lens(model: nn.Module, tokens: Tensor, **spec: Any) -> Drawn:
    declared = {"method": "logit_lens", "of": "eyes", "select": "blocks.*", **spec}
    loaded = load_spec({"probes": {"eyes": {}}, "pictures": {"it": declared}})
    return drawn(loaded.pictures["it"], subject_of(model, tokens, None))


def close(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype is wanted.dtype and bool((found - wanted).abs().max() < 1e-12)


def gpt2(transformers: Any) -> tuple[nn.Module, str, str, str]:
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=8, vocab_size=TOKENS, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), "transformer.h.*", "transformer.ln_f", "lm_head"


def llama(transformers: Any) -> tuple[nn.Module, str, str, str]:
    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=TOKENS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), "model.layers.*", "model.norm", "lm_head"


@pytest.mark.parametrize("make", [gpt2, llama])
def test_it_equals_the_norm_and_head_of_transformers_models(make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, select, norm, head = make(pytest.importorskip("transformers"))
    model = model.double().eval()
    tokens = words()
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
        through = [model.get_submodule(head)(model.get_submodule(norm)(h))
                   for h in output.hidden_states[1:-1]]  # fmt: skip
        through.append(output.logits)  # the last of them is already normalised
    explained = output.logits.argmax(-1)
    for spec in ({}, {"norm": norm, "head": head}):
        found = lens(model, tokens, select=select, **spec)
        assert (found.facts["norm"], found.facts["head"]) == (norm, head)
        prefix = select.removesuffix("*")
        assert [m.node for m in found.maps] == [f"{prefix}{i}" for i in (0, 0, 1, 1, 2, 2, 0, 1, 2)]
        for i, logits in enumerate(through):
            likely, best = (m.values for m in found.maps[2 * i : 2 * i + 2])
            wanted = logits.log_softmax(-1).gather(-1, explained[..., None])[..., 0]
            assert close(likely, wanted), i
            assert torch.equal(best, logits.argmax(-1))
    given = lens(model, tokens, select=select, target=7).maps[2].values
    assert close(given, through[1].log_softmax(-1)[..., 7])


def tiny(transformers: Any, name: str, **more: Any) -> tuple[nn.Module, str]:
    config = getattr(transformers, f"{name}Config")(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=TOKENS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config), "model.layers.*"


AFTER_THE_HEAD: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 8.0},
    "Gemma2": {"final_logit_softcapping": 0.5, "head_dim": 4},
}


@pytest.mark.parametrize("name", AFTER_THE_HEAD)
def test_the_last_layer_has_the_logits_of_a_model_that_changes_them_after_its_head(
    name: str,
) -> None:
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    model, select = tiny(transformers, name, **AFTER_THE_HEAD[name])
    model = model.double().eval()
    torch.nn.init.normal_(model.get_submodule("lm_head").weight, std=3.0)  # type: ignore[arg-type]
    with torch.no_grad():
        logits = model(words()).logits
        inside: Any = model.get_submodule("model")
        plain = model.get_submodule("lm_head")(inside(words()).last_hidden_state)
    assert not torch.allclose(logits.log_softmax(-1), plain.log_softmax(-1))
    found = lens(model, words(), select=select, target=5)
    assert close(found.maps[4].values, logits.log_softmax(-1)[..., 5])
    assert torch.equal(found.maps[5].values, logits.argmax(-1))


def test_what_a_model_computes_between_its_norm_and_its_head_is_part_of_the_lens() -> None:
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, vocab_size=TOKENS,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    subject = subject_of(model, words())
    subject.samples.kwargs["decoder_input_ids"] = words()
    spec = {"method": "logit_lens", "of": "eyes", "select": "decoder.block.*", "target": 5}
    loaded = load_spec({"probes": {"eyes": {}}, "pictures": {"it": spec}})
    found = drawn(loaded.pictures["it"], subject)
    with torch.no_grad():
        logits = model(words(), decoder_input_ids=words()).logits
    assert (found.facts["norm"], found.facts["head"]) == ("decoder.final_layer_norm", "lm_head")
    assert close(found.maps[2].values, logits.log_softmax(-1)[..., 5])


@pytest.mark.parametrize("form", ["new", "in place", "sliced", "biased", "probabilities"])
def test_changes_after_the_head_apply_to_every_layer(form: str) -> None:
    class Changed(Language):
        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            logits = super().forward(tokens)["logits"]
            if form == "in place":
                logits *= 0.5
                logits += 1.0
            elif form == "biased":
                logits = logits + torch.arange(TOKENS)
            elif form == "sliced":
                logits = (logits[:, -1] * 0.5).tanh()
            elif form == "probabilities":
                logits = (logits * 0.5).softmax(-1)
            else:
                logits = (logits / 3).tanh() * 3
            return {
                "logits": logits,
                "loss": logits.log_softmax(-1).mean((1, 2)[: logits.dim() - 1]),
            }

    after: dict[str, Callable[[Tensor], Tensor]] = {
        "new": lambda x: (x / 3).tanh() * 3,
        "in place": lambda x: x * 0.5 + 1,
        "biased": lambda x: x + torch.arange(TOKENS),
        "sliced": lambda x: (x * 0.5).tanh(),
        "probabilities": lambda x: x * 0.5,
    }
    torch.manual_seed(0)
    model = Changed(nn.LayerNorm(8)).double()
    found, x = lens(model, words(), target=5), model.embed(words())
    for i, block in enumerate(model.blocks):
        x, _ = block(x)
        wanted = after[form](model.head(model.last(x))).log_softmax(-1)[..., 5]
        assert close(found.maps[2 * i].values, wanted.detach()), i


def test_a_head_without_a_norm_sees_the_layers_as_they_are() -> None:
    torch.manual_seed(0)
    model = Language(nn.Identity()).double()
    x = model.embed(words())
    found = lens(model, words())
    assert (found.facts["norm"], found.facts["head"]) == (None, "head")
    x, _ = model.blocks[0](x)
    assert torch.equal(found.maps[1].values, model.head(x).argmax(-1))


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_a_tuned_lens_translates_the_output_of_each_layer_first(
    ending: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, file = Language(nn.LayerNorm(8)).double(), tmp_path / f"tuned.{ending}"
    translators = [nn.Linear(8, 8, bias=i > 0).double() for i in range(3)]
    weights = {
        f"blocks.{i}.{name}": tensor.detach()
        for i, each in enumerate(translators)
        for name, tensor in each.named_parameters()
    }
    if ending == "npz":
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in weights.items()}
        np.savez(file, **arrays)
    else:
        pytest.importorskip("safetensors.torch").save_file(weights, file)
    found = lens(model, words(), translators=str(file), target=4)
    assert found.facts["translators"] == str(file)
    x = model.embed(words())
    for i, translate in enumerate(translators):
        x, _ = model.blocks[i](x)
        wanted = model.head(model.last(translate(x))).log_softmax(-1)[..., 4]
        assert close(found.maps[2 * i].values, wanted.detach())


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"blocks.0.weigth": np.ones((8, 8))}, r"no 'blocks.0.weight'; did you mean 'blocks.0.wei"),
        ({"blocks.0.weight": np.ones((8, 9))}, r"shape \[8, 9\] for blocks.0, whose output has 8"),
        (
            {"blocks.0.weight": np.ones((8, 8)), "blocks.0.bias": np.ones(7)},
            r"a bias of shape \[7\] for blocks.0",
        ),
    ],
)
def test_translators_that_do_not_fit_are_refused(
    arrays: dict[str, Any], why: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "tuned.npz", **arrays)
    with pytest.raises(ProbeError, match=why):
        lens(
            Language(nn.LayerNorm(8)),
            words(),
            select="blocks.0",
            translators=str(tmp_path / "tuned.npz"),
        )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"select": "blocks.7"}, "'blocks.7' matches no module; .* 'blocks': 0, 1, 2"),
    "another head": ({"head": "haed"}, "no module 'haed' for `head`; did you mean 'head'"),
    "sizes": ({"head": "embed"}, "the head 'embed' was not called with a tensor"),
    "a token": ({"target": 99}, "token 99 does not exist; the head returns 23"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_said(case: str) -> None:
    spec, message = REFUSED[case]
    with pytest.raises(ProbeError, match=message):
        lens(Language(nn.LayerNorm(8)), words(), **spec)


def test_a_norm_that_is_not_found_must_be_named() -> None:
    class Rescaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.pow(2).mean(-1, keepdim=True).sqrt()

    torch.manual_seed(0)
    model = Language(Rescaled())
    with pytest.raises(ProbeError, match=r"last norm was not found.* name it in the picture"):
        lens(model, words())
    found = lens(model, words(), norm="last")
    with torch.no_grad():
        assert torch.equal(found.maps[5].values, model(words())["logits"].argmax(-1))


@pytest.mark.parametrize("target", ["top", "next", 7])
def test_the_rank_of_a_token_counts_those_with_a_higher_output(target: str | int) -> None:
    torch.manual_seed(0)
    model, tokens = Language(nn.LayerNorm(8)).double(), words()
    found = lens(model, tokens, target=target)
    chosen = np.full(tokens.shape, 7)
    if target == "top":
        chosen = model(tokens)["logits"].argmax(-1).numpy()
    if target == "next":
        chosen = np.concatenate([tokens.numpy()[:, 1:], np.full((len(tokens), 1), -1)], 1)
    x = model.embed(tokens)
    for i, (block, ranks) in enumerate(zip(model.blocks, found.maps[6:], strict=True)):
        x, _ = block(x)
        order = (-model.head(model.last(x)).detach().numpy()).argsort(-1)
        wanted = [
            [list(order[s, p]).index(token) + 1 if token >= 0 else 0 for p, token in enumerate(row)]
            for s, row in enumerate(chosen.tolist())
        ]
        assert ranks.node == f"blocks.{i}"
        assert ranks.values.tolist() == wanted
        missing = torch.from_numpy(chosen < 0)
        assert torch.equal(found.maps[2 * i].values.isnan(), missing)
    assert target != "top" or (found.maps[-1].values == 1).all()


def test_the_next_token_needs_an_input_of_tokens() -> None:
    class Embedded(Language):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            for block in self.blocks:
                x, _ = block(x)
            return {"logits": self.head(self.last(x))}

    with pytest.raises(ProbeError, match="target: next needs an input of integers"):
        lens(Embedded(nn.LayerNorm(8)), torch.randn(4, 6, 8), target="next")


def test_a_wrong_target_is_said() -> None:
    with pytest.raises(SpecError, match=r"pictures\.it.*target"):
        lens(Language(nn.LayerNorm(8)), words(), target="label")


def train(*, expected: bool) -> list[Any]:
    """Train for three steps; return what the second block predicts at the start of each."""
    torch.manual_seed(0)
    model = Language(nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        if expected:
            x = model.embed(words()[:3])
            for i in range(2):
                x, _ = model.blocks[i](x)
            found.append(model.head(model.last(x)).argmax(-1).numpy())
        optimizer.zero_grad()
        logits = model(words())["logits"]
        F.cross_entropy(logits.flatten(0, 1), words().flatten()).backward()
        optimizer.step()
    return found


def test_a_run_shows_it_at_every_record(tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 10},
        "probes": {"eyes": {"samples": {"count": 3}, "schedule": {"every": 1}}},
        "pictures": {"lens": {"method": "logit_lens", "of": "eyes", "select": "blocks.*"}},
    }
    with comgra.trace(spec, root=tmp_path) as session:
        train(expected=False)
    wanted = train(expected=True)
    run = comgra.open_run(session.path or "")
    assert run.report.get("warnings", []) == []
    for step in range(3):
        picture = run.picture("lens", step, "blocks.1")
        assert picture.values.shape == (3, 6)
        assert (picture.values <= 0).all()
        assert np.array_equal(picture.facts["tokens"], wanted[step])
        assert picture.facts["head"] == "head"
    assert picture.axes[0] == "sample"
    found = album(RunView(run), Selection(step=2, batch="1"))
    assert found.cards == ()
    (table,) = found.lenses
    assert [node for node, _ in table.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    (ids,) = [tile.text for tile in found.tiles if tile.sample == 1]
    assert ids == " ".join(table.words)
    cells = table.layers[1][1]
    assert [token for token, _ in cells] == [str(token) for token in wanted[2][1]]
    likely = run.picture("lens", 2, "blocks.1").values[1]
    np.testing.assert_allclose([p for _, p in cells], np.exp(likely), rtol=1e-6)
    for chosen, position in (({}, 5), ({"lens": 2}, 2)):
        (table,) = album(RunView(run), Selection(step=2, batch="1"), positions=chosen).lenses
        assert table.ranks is not None
        assert (table.ranks.position, table.ranks.steps) == (position, (0, 1, 2))
        for node, ranks in table.ranks.layers:
            pictures = [run.picture("lens", step, node) for step in range(3)]
            assert ranks == tuple(p.facts["ranks"][1, position] for p in pictures)
    html, pane = lens_card(table), PicturesPane(lambda **_: None)
    assert 'data-send="lens:lens:2" aria-pressed="true"' in html
    at = resolve(RunView(run), Selection(step=2, batch="1"), {})
    pane.refresh(Shown(RunView(run), at, "kind", "linear", None, follow=False))
    assert "at position 5" in pane.view.html
    assert not pane.view.check({"send": "lens:lens:6"})
    assert pane.view.check({"send": "lens:lens:2"})
    pane._on_message({"send": "lens:lens:2"})
    assert "at position 2" in pane.view.html
