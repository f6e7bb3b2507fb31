"""Attention that sees later positions, only its own position, or only padding."""

from __future__ import annotations

from typing import Any

from comgra_decl.rules.api import (
    PERTURBATIONS,
    Count,
    Finding,
    Place,
    Rule,
    RuleParameters,
    Scene,
    Window,
)

_OTHERS = {"LSTM", "GRU", "RNN", "Conv1d", "Conv2d"}  # modules that also combine positions
_CHANGED = 1e-3  # change to outputs, relative to their standard deviation
_SEEN = 1e-4  # share of the weight on later positions that is not rounding


class FutureParameters(RuleParameters):
    """Options of `future_visible`."""

    least: Count = 40
    """Number of recorded tokens required."""


_OF_A_DECODER = (
    "Feed the decoder the tokens before those it predicts: inputs y[:, :-1], targets y[:, 1:]. "
    "Pass a causal mask if it has attention."
)


def _convolutions(scene: Scene) -> str:
    """Return a sentence about the convolutions over time of a model; empty if it has none."""
    modules = scene.documents.get("modules") or []
    found = [str(m["node"]) for m in modules if m.get("class") == "Conv1d"]
    if not found:
        return ""
    listed = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return (
        f" It has convolutions over the positions ({listed}): padding on both sides shows them "
        "later positions; a causal convolution is padded on the left only."
    )


class FutureVisible(Rule):
    """Models that can see the next token, although they should predict it."""

    name = "future_visible"
    severity = "error"
    certainty = 0.85
    definition = (
        "At least 99% of at least `least` recorded targets are the next tokens of the "
        "model's only integer input, of shape [batch, positions], or the next values of its only "
        "input [batch, positions] or [batch, positions, features]. In addition, attention over "
        "these positions gives weight to later positions because the causal mask is missing or "
        "reversed; or the model has a bidirectional recurrent module; or the outputs at earlier "
        "positions change when a later token is replaced, in an experiment after the training. "
        "The model can then copy its target."
    )
    source = (
        "Vaswani et al., Attention Is All You Need (2017), section 3.2.3: masking prevents "
        "positions from attending to subsequent positions."
    )
    advice = (
        "Pass a causal mask: `is_causal=True` for scaled_dot_product_attention, or "
        "`nn.Transformer.generate_square_subsequent_mask(T)` as the mask of "
        "nn.TransformerEncoder."
    )
    explained_by = ("wrong_positions",)  # queries without any visible key see all of them
    Parameters = FutureParameters

    def look(self, window: Window) -> None:
        """Compare targets with the input, shifted by one."""
        self.scene.compare_tokens(window)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding if the next token is visible."""
        shape = scene.next_tokens.shape(scene.table, least=self.parameters.least)
        if shape is None:
            return []
        length = shape[1]
        several = scene.next_tokens.several
        for call in () if several else scene.attentions:
            weights, future = list(call.get("shape") or ()), call.get("future")
            if len(weights) < 3 or weights[-1] != length or not isinstance(future, float):
                continue
            if weights[-2] == length and future > _SEEN:
                back = not float(call.get("past", 1.0)) > _SEEN
                how = (
                    "only later positions have weight, so the mask is reversed"
                    if back
                    else "there is no causal mask"
                )
                return [
                    self.finding(
                        scene,
                        place=Place(str(call.get("function"))),
                        first_step=0,
                        message="The model predicts the next token, but its attention "
                        f"({call['function']}, weights {weights}) can already see it: {how}.",
                        evidence={"future": future, "positions": length},
                    )
                ]
        for found in scene.documents.get(PERTURBATIONS) or []:
            seen = found.get("ahead") or {}
            if seen.get("positions") == length and seen["ahead"] > _CHANGED:
                return [
                    self.finding(
                        scene,
                        place=Place(str(found["model"])),
                        first_step=0,
                        message="The model predicts the next token, but can already see it: after "
                        "the training, its outputs at earlier positions changed when the input at "
                        f"a later position was replaced.{_convolutions(scene)}",
                        certainty=0.95,
                        **({"advice": _OF_A_DECODER} if several else {}),
                        evidence={"change": seen["ahead"], "positions": length},
                    )
                ]
        for module in () if several else scene.documents.get("modules") or []:
            if (module.get("settings") or {}).get("bidirectional"):
                return [
                    self.finding(
                        scene,
                        place=Place(str(module["node"])),
                        first_step=0,
                        message="The model predicts the next token but can already see it, because "
                        f"{module['node']} ({module['class']}) is bidirectional.",
                        advice="Use a unidirectional recurrent module (bidirectional=False).",
                        evidence={"positions": length},
                    )
                ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if not scene.next_tokens.tokens:
            return (
                "the values of integer inputs [batch, positions] and their targets are not recorded"
            )
        return None


class WrongPositions(Rule):
    """Attention over the wrong axis, or over padding only."""

    name = "wrong_positions"
    severity = "error"
    certainty = 0.8
    definition = (
        "The model receives sequences of shape [batch, positions] or [batch, positions, "
        "features]. An attention call has weights of shape [batch, positions, n, n], where n is "
        "not the number of positions, and no other call has weights over all positions. "
        "Attention then runs over the heads of each position. Models with recurrent or "
        "convolutional modules are not checked for this. The rule also reports an inverted "
        "padding mask: all positions visible to attention contain the same token, while the hidden "
        "ones contain at least three different tokens."
    )
    source = (
        "PyTorch's documentation: `key_padding_mask` is True where a key is ignored, whereas "
        "`attn_mask` of scaled_dot_product_attention is True where a key is used. Own "
        "definition."
    )
    advice = (
        "Transpose queries, keys and values to [batch, heads, positions, features] before "
        "attention. If the mask is inverted, use `key_padding_mask = tokens == pad`."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such call."""
        inverted = next((c for c in scene.attentions if _is_inverted(c)), None)
        if inverted is not None:
            return [
                self.finding(
                    scene,
                    place=Place(str(inverted["function"])),
                    first_step=0,
                    message="The padding mask is inverted: attention sees only positions with the "
                    f"same token (padding), and ignores those with {inverted['tokens_unseen']} "
                    "different tokens.",
                    evidence={"hidden tokens": int(inverted["tokens_unseen"])},
                )
            ]
        wrong = self._over_heads(scene)
        if wrong is None:
            return []
        shape = list(wrong["shape"])
        return [
            self.finding(
                scene,
                place=Place(str(wrong["function"])),
                first_step=0,
                message=f"Attention has weights of shape {shape}, but the input has {shape[1]} "
                f"positions: it runs over {shape[-1]} heads within each position, so no "
                "information is exchanged between positions.",
                evidence={"weights": str(shape), "positions": int(shape[1])},
            )
        ]

    def _over_heads(self, scene: Scene) -> dict[str, Any] | None:
        lengths = {
            (i.shape[0], i.shape[1])
            for i in scene.table.infos
            if i.kind == "input" and i.key.node == "input" and _is_sequence(i.shape, i.dtype)
        }
        calls = [c for c in scene.attentions if len(c.get("shape") or ()) == 4]
        if any(m.get("class") in _OTHERS for m in scene.documents.get("modules") or []):
            return None  # attention may be meant for the parts of each position
        for batch, length in lengths:
            if length < 3 or any(length in c["shape"][-2:] for c in calls):
                continue
            for call in calls:
                a, b, queries, keys = call["shape"]
                if (a, b) == (batch, length) and queries == keys:
                    return call
        return None

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if scene.attentions else "no attention was found (it needs `graph: true`)"


def _is_inverted(call: dict[str, Any]) -> bool:
    return call.get("tokens_seen") == 1 and int(call.get("tokens_unseen", 0)) >= 3


def _is_sequence(shape: tuple[int, ...], dtype: str) -> bool:
    return (len(shape) == 2 and "int" in dtype) or (len(shape) == 3 and "float" in dtype)
