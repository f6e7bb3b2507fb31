"""Which positions attention sees: later ones, none but its own, or only padding."""

from __future__ import annotations

from typing import Any

from comgra_decl.rules.api import (
    Count,
    Finding,
    Place,
    Rule,
    RuleParameters,
    Scene,
    Tokens,
    Window,
    count_tokens,
    input_slots,
    per_run,
    read_rows,
    target_slots,
    values_of,
)

_NEXT = 0.99  # share of targets that are the next input
_SEEN = 1e-4  # share of the weight on later positions that is not rounding


class FutureParameters(RuleParameters):
    """The options of `future_visible`."""

    least: Count = 40
    """The number of recorded tokens needed."""


class FutureVisible(Rule):
    """A network that predicts the next token and sees it."""

    name = "future_visible"
    severity = "error"
    certainty = 0.85
    definition = (
        "Targets are the next tokens of the model's only integer input [batch, positions] (for at "
        f"least {_NEXT:.0%} of at least `least` recorded tokens), and attention over these "
        "positions gives weight to later positions: there is no causal mask, or it is reversed. Or "
        "a recurrent module of the model is bidirectional. The network can copy its target."
    )
    source = (
        "Vaswani et al., Attention Is All You Need (2017), section 3.2.3: masking prevents "
        "positions from attending to subsequent positions."
    )
    advice = (
        "Pass a causal mask: `is_causal=True` to scaled_dot_product_attention, or "
        "`nn.Transformer.generate_square_subsequent_mask(T)` as mask of nn.TransformerEncoder."
    )
    Parameters = FutureParameters

    _tokens: dict[tuple[int, int], Tokens] = per_run(dict)
    _sources: set[int] = per_run(set)

    def look(self, window: Window) -> None:
        """Compares targets with the input, shifted by one."""
        infos = window.table.infos
        sources = [s for s in input_slots(window.table).tolist() if "int" in infos[s].dtype]
        self._sources |= {*sources}
        goals = [s for s in target_slots(window.table).tolist() if "int" in infos[s].dtype]
        for row in read_rows(window).tolist() if len(sources) == 1 and goals else ():
            x = values_of(window, row, sources[0])
            for goal in goals if x is not None and x.ndim == 2 and x.shape[1] > 2 else ():
                y = values_of(window, row, goal)
                if x is None or y is None or y.size < x.size:
                    continue
                key = sources[0], goal
                known = self._tokens.setdefault(key, Tokens(int(window.steps[row])))
                count_tokens(known, x, y.reshape(-1)[: x.size].reshape(x.shape))

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding if the next token is visible."""
        length = self._length(scene)
        if length is None:
            return []
        for call in scene.attentions:
            shape, future = list(call.get("shape") or ()), call.get("future")
            if len(shape) < 3 or shape[-1] != length or not isinstance(future, float):
                continue
            if shape[-2] == length and future > _SEEN:
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
                        message="The network predicts the next token, and its attention "
                        f"({call['function']}, weights {list(shape)}) sees it: {how}.",
                        evidence={"future": future, "positions": length},
                    )
                ]
        for module in scene.documents.get("modules") or []:
            if (module.get("settings") or {}).get("bidirectional"):
                return [
                    self.finding(
                        scene,
                        place=Place(str(module["node"])),
                        first_step=0,
                        message="The network predicts the next token, and "
                        f"{module['node']} ({module['class']}) is bidirectional, so it sees it.",
                        advice="Use a recurrent network of one direction (bidirectional=False).",
                        evidence={"positions": length},
                    )
                ]
        return []

    def _length(self, scene: Scene) -> int | None:
        """Returns the number of positions, if the targets are the next tokens."""
        if len(self._sources) != 1:
            return None
        for (source, _), known in self._tokens.items():
            shape = scene.table.infos[source].shape
            pairs = known.count * (1 - 1 / shape[1])
            varied = len(known.values) > 2 and known.same < 0.9 * known.count
            if known.count >= self.parameters.least and known.next_ >= _NEXT * pairs and varied:
                return shape[1]
        return None

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        if not self._tokens:
            return (
                "no values of integer inputs [batch, positions] and of their targets are recorded"
            )
        return None


class WrongPositions(Rule):
    """Attention over the wrong axis, or over padding only."""

    name = "wrong_positions"
    severity = "error"
    certainty = 0.8
    definition = (
        "The model gets sequences [batch, positions] or [batch, positions, features], and an "
        "attention call has weights [batch, positions, n, n], where n is not the number of "
        "positions, while no other call has weights over all positions: attention runs over the "
        "heads of each position. Or the positions that attention sees all hold the same token, and "
        "those that it hides hold at least three different ones: the padding mask is inverted."
    )
    source = (
        "PyTorch's documentation: `key_padding_mask` is True where a key is ignored, `attn_mask` "
        "of scaled_dot_product_attention where it takes part. Own definition."
    )
    advice = (
        "Transpose queries, keys and values to [batch, heads, positions, features] before "
        "attention; invert the mask (`key_padding_mask = tokens == pad`)."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns a finding about the first such call."""
        inverted = next((c for c in scene.attentions if _is_inverted(c)), None)
        if inverted is not None:
            return [
                self.finding(
                    scene,
                    place=Place(str(inverted["function"])),
                    first_step=0,
                    message="Attention sees only positions with one and the same token (padding), "
                    f"and ignores those with {inverted['tokens_unseen']} different tokens: the "
                    "padding mask is inverted.",
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
                message=f"Attention has weights {shape}, while the input has {shape[1]} positions: "
                f"it runs over {shape[-1]} heads within each position, so that no information "
                "moves between positions.",
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
        for batch, length in lengths:
            if length < 3 or any(length in c["shape"][-2:] for c in calls):
                continue
            for call in calls:
                a, b, queries, keys = call["shape"]
                if (a, b) == (batch, length) and queries == keys:
                    return call
        return None

    def missing(self, scene: Scene) -> str | None:
        """Returns why the rule could not check the run."""
        return None if scene.attentions else "no attention was found (it needs `graph: true`)"


def _is_inverted(call: dict[str, Any]) -> bool:
    return call.get("tokens_seen") == 1 and int(call.get("tokens_unseen", 0)) >= 3


def _is_sequence(shape: tuple[int, ...], dtype: str) -> bool:
    return (len(shape) == 2 and "int" in dtype) or (len(shape) == 3 and "float" in dtype)
