"""Compare what comgra_decl and TransformerLens compute on the same weights.

python -m benchmarks.transformerlens

Prints a table with the largest difference of each quantity. Needs transformer-lens 4, as
`make test-research` installs it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import comgra_decl as comgra

LIMIT = 1e-5
"""The largest difference that counts as equal, in float32."""

LAYERS, HEADS, WIDTH, WORDS, POSITIONS = 3, 4, 32, 50, 7
FIRST, SECOND = 5, 7
"""The tokens whose logits the metric compares, at the last position."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Subject:
    """A model of transformers with random weights.

    Attributes:
        model: the model, in evaluation mode.
        block: its blocks, `{}` standing for the number.
        attn: the attention of a block.
        out: the output projection of the attention.
        mlp: the perceptron of a block.
    """

    model: nn.Module
    block: str
    attn: str
    out: str
    mlp: str = "mlp"

    def blocks(self, part: str = "") -> str:
        """Return the pattern that selects a part of all blocks."""
        return self.block.format("*") + (f".{part}" if part else "")


def subjects() -> dict[str, Subject]:
    """Return a GPT-2 and a Llama with random weights."""
    import transformers

    of: Any = transformers  # which makes its names when they are used
    torch.manual_seed(0)
    gpt2 = of.GPT2Config(
        n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS, n_positions=16,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    llama = of.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, intermediate_size=48, vocab_size=WORDS,
        max_position_embeddings=32,
    )  # fmt: skip
    made = {
        "GPT-2": Subject(of.GPT2LMHeadModel(gpt2), "transformer.h.{}", "attn", "attn.c_proj"),
        "Llama": Subject(
            of.LlamaForCausalLM(llama), "model.layers.{}", "self_attn", "self_attn.o_proj"
        ),
    }
    for subject in made.values():
        for parameter in subject.model.parameters():  # so that heads and biases matter
            nn.init.normal_(parameter, std=0.2)
        subject.model.eval()
    return made


def tokens() -> Tensor:
    """Return a corrupted and a clean sequence, [2, positions]."""
    return torch.randint(WORDS, (2, POSITIONS), generator=torch.Generator().manual_seed(1))


def differences(subject: Subject) -> dict[str, float]:
    """Return the largest difference of each quantity between the two tools."""
    theirs, ours = Theirs(subject.model).quantities(), Ours(subject).quantities()
    found = {}
    for name, value in theirs.items():
        own = ours[name]
        assert own.shape == value.shape, (name, own.shape, value.shape)
        found[name] = float(np.abs(own - value).max())
        assert np.abs(value).max() > 100 * LIMIT, name  # or equality would mean nothing
    return found


# -- TransformerLens ---------------------------------------------------------------------------


class Theirs:
    """What TransformerLens 4 computes on a copy of a model, which it changes."""

    def __init__(self, model: Any) -> None:
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        own = copy.deepcopy(model)
        self.bridge: Any = build_bridge_from_module(
            own, type(own).__name__, hf_config=own.config, device="cpu"
        )

    def quantities(self) -> dict[str, Array]:
        """Return every quantity that is compared."""
        with torch.no_grad():
            return {**self._read(), **self._patched()} | self._estimated()

    def _read(self) -> dict[str, Array]:
        from transformer_lens.tools.analysis.logit_lens import logit_lens

        _, cache = self.bridge.run_with_cache(tokens())
        blocks = range(LAYERS)
        lens = logit_lens(self.bridge, tokens(), positions=None, return_type="logits")
        residuals = [cache[f"blocks.{i}.hook_resid_post"] for i in blocks]
        patterns = [cache[f"blocks.{i}.attn.hook_pattern"] for i in blocks]
        likely = lens.values[1:].log_softmax(-1)[..., FIRST]  # [blocks, samples, positions]
        return {
            "residual stream": torch.stack(residuals).numpy(),
            "attention patterns": torch.stack(patterns).numpy(),
            "logit lens": likely.numpy(),
        }

    def _patched(self) -> dict[str, Array]:
        from transformer_lens import patching

        corrupted, clean = tokens()[:1], tokens()[1:]
        _, cache = self.bridge.run_with_cache(clean)
        base = metric(self.bridge(corrupted)).numpy()
        functions = {
            "patching the residual stream": patching.get_act_patch_resid_pre,
            "patching attention outputs": patching.get_act_patch_attn_out,
            "patching MLP outputs": patching.get_act_patch_mlp_out,
            "patching heads, all positions": patching.get_act_patch_attn_head_out_all_pos,
            "patching heads by position": patching.get_act_patch_attn_head_out_by_pos,
            "patching attention patterns": patching.get_act_patch_attn_head_pattern_all_pos,
        }
        return {
            name: function(self.bridge, corrupted, cache, metric).numpy() - base
            for name, function in functions.items()
        }

    def _estimated(self) -> dict[str, Array]:
        from transformer_lens.tools.analysis.attribution_patching import attribution_patch

        with torch.enable_grad():
            scores = attribution_patch(self.bridge, tokens()[1:], tokens()[:1], metric).node_scores
        heads = np.zeros((LAYERS, POSITIONS, HEADS))
        mlps = np.zeros((LAYERS, POSITIONS))
        for node, score in scores.items():
            if node.kind == "attn_head_out":
                heads[node.layer, node.position, node.head] = score
            elif node.kind == "mlp_out":
                mlps[node.layer, node.position] = score
        return {"attribution patching, heads": heads, "attribution patching, MLPs": mlps}


def metric(logits: Tensor) -> Tensor:
    """Return the difference of two logits of the first sample at the last position."""
    return logits[0, -1, FIRST] - logits[0, -1, SECOND]


# -- comgra_decl -------------------------------------------------------------------------------


class Ours:
    """What comgra_decl computes."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def quantities(self) -> dict[str, Array]:
        """Return every quantity that is compared, with the dimensions that both give it."""
        return self._looked() | self._traced()

    def _looked(self) -> dict[str, Array]:
        subject = self._subject
        blocks = [subject.block.format(i) for i in range(LAYERS)]
        nodes = {
            "blocks": {"select": subject.blocks()},
            "attention": {"select": subject.blocks(subject.attn), "attention": {"recompute": True}},
        }
        lens = {"method": "logit_lens", "select": subject.blocks(), "target": FIRST}
        with torch.no_grad():
            cache = comgra.look(
                subject.model, tokens(), spec={"nodes": nodes}, pictures={"lens": lens}
            )
        role = "attention (recomputed)"
        patterns = sorted(cache.slots.query("role == @role")["node"])
        return {
            "residual stream": np.stack([cache.slot(node).value(0) for node in blocks]),
            "attention patterns": np.stack(
                [cache.slot(node, role=role).value(0) for node in patterns]
            ),
            "logit lens": np.stack([np.asarray(cache.picture("lens", 0, n)) for n in blocks]),
        }

    def _traced(self) -> dict[str, Array]:
        model = copy.deepcopy(self._subject.model)
        spec = {
            "nodes": {"blocks": {"select": self._subject.blocks()}},
            "schedule": {"first": 1},
            "probes": {"pair": {"batch": {"input_ids": tokens().tolist()}}},
            "interventions": {
                _key(name): {
                    "of": "pair",
                    "do": {"patch": "other"},
                    "measure": {"difference": [FIRST, SECOND]},
                    **each,
                }
                for name, each in self._interventions().items()
            },
            "rules": "off",
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tempfile.TemporaryDirectory() as root:
            with comgra.trace(spec, root=root) as session:
                model(input_ids=tokens(), labels=tokens()).loss.backward()
                optimizer.step()
            assert session.path is not None
            run = comgra.open_run(session.path)
            return {name: _grid(run.effects(_key(name), 0)[0]) for name in self._interventions()}

    def _interventions(self) -> dict[str, dict[str, Any]]:
        subject = self._subject
        heads = {"select": subject.blocks(subject.out), "role": "input"}
        mlps = {"select": subject.blocks(subject.mlp), "sweep": ["node", "position"]}
        return {
            "patching the residual stream": {
                "select": subject.blocks(), "role": "input", "sweep": ["node", "position"],
            },
            "patching attention outputs": {
                "select": subject.blocks(subject.attn), "sweep": ["node", "position"],
            },
            "patching MLP outputs": mlps,
            "patching heads, all positions": {**heads, "sweep": ["node", "head"]},
            "patching heads by position": {**heads, "sweep": ["node", "position", "head"]},
            "patching attention patterns": {
                "select": subject.blocks(subject.attn), "role": "attention",
                "sweep": ["node", "head"],
            },
            "attribution patching, heads": {
                **heads, "sweep": ["node", "position", "head"], "estimate": "gradient",
            },
            "attribution patching, MLPs": {**mlps, "estimate": "gradient"},
        }  # fmt: skip


def _key(name: str) -> str:
    """Return the name of a quantity as that of an intervention."""
    return name.replace(",", "").replace(" ", "_")


def _grid(effects: pd.Series[float]) -> Array:
    """Return effects on one sample as an array with a dimension for each part of the sweep."""
    sizes = [len(effects.index.unique(level)) for level in effects.index.names[1:]]
    return effects.to_numpy().reshape(sizes)


def main() -> None:
    """Print the table."""
    found = {name: differences(subject) for name, subject in subjects().items()}
    versions = {n: importlib.metadata.version(n) for n in ("transformer-lens", "transformers")}
    print(*(f"{n} {v}" for n, v in versions.items()), f"torch {torch.__version__}", sep=", ")
    print(f"| | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for quantity in next(iter(found.values())):
        print(f"| {quantity} |", *(f"{each[quantity]:.1e} |" for each in found.values()))


if __name__ == "__main__":
    main()
