"""The logit lens, computed from the recorded values of the layers, the last norm and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import UnknownNameError
from comgra_decl.pictures import norms
from comgra_decl.records import SAMPLE

from .picture import Picture
from .recorded_values import RecordedValues

Floats = NDArray[np.float64]

_DECLARE = (
    "The picture needs `capture: [output, parameter]` and `values: true` for the layers, the last "
    "norm and the head, and `values.max_elements` must allow the head's weight"
)


def lens_from_records(read: RecordedValues, step: int | None, node: str | None) -> Picture:
    """Return what a language model would predict after each layer; see `Run.picture`."""
    at = read.step(step, read.type)
    model = _Model(read, at)
    head, logits, weight, bias = model.head()
    stack = model.stack(logits.shape[:2])
    last = model.output(stack[-1])
    assert last is not None  # the stack has only recorded layers
    norm, normalise = model.norm(last, logits, weight, bias, head)
    length, kept = last.shape[1], logits.shape[1]
    layers = stack if node is None else [node]
    found, tokens, ranks = [], [], []
    best = logits.argmax(-1)
    for layer in layers:
        hidden = model.output(layer)
        if hidden is None:
            hidden = read.value(layer, at)  # raises an error that says what to declare
        if hidden.shape != last.shape:
            raise UnknownNameError(
                f"the output of {layer!r} has the shape {hidden.shape}, but the last layer of "
                f"{stack[-1]!r} has {last.shape}."
            )
        hidden = hidden[:, length - kept :]
        pairs = [
            _explained(normalise(h) @ weight.T + bias, b) for h, b in zip(hidden, best, strict=True)
        ]
        found.append(np.stack([likely for likely, _, _ in pairs]))
        tokens.append(np.stack([predicted for _, predicted, _ in pairs]))
        ranks.append(np.stack([rank for _, _, rank in pairs]))
    labels: dict[str, list[Any]] = {SAMPLE: read.labels(at)}
    if kept < length:
        labels["position"] = [*range(length - kept, length)]
    facts = {"norm": norm, "head": head}
    if node is not None:
        axes: tuple[str, ...] = (SAMPLE, "position")
        facts_of_one = {**facts, "tokens": tokens[0], "ranks": ranks[0]}
        return Picture("lens_from_records", found[0], axes, node, at, labels, facts_of_one)
    labels["node"] = layers
    axes = ("node", SAMPLE, "position")
    everything = {**facts, "tokens": np.stack(tokens), "ranks": np.stack(ranks)}
    return Picture("lens_from_records", np.stack(found), axes, None, at, labels, everything)


def _explained(
    logits: Floats, best: NDArray[np.int64]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return, at each position, a token's log-probability, the highest token, and the rank."""
    largest = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(-1)) + largest[:, 0]
    own = np.take_along_axis(logits, best[:, None], 1)
    return own[:, 0] - total, logits.argmax(-1), (logits > own).sum(-1) + 1


class _Model:
    """The parts of a language model at a step."""

    def __init__(self, read: RecordedValues, step: int) -> None:
        self._read = read
        self._step = step
        self._modules = read.run.document("modules") or []
        self._of = read.training
        self._outputs: dict[str, NDArray[Any] | None] = {}

    def output(self, node: str) -> NDArray[Any] | None:
        """Return the recorded output of a node, which is read once; None if there is none."""
        if node not in self._outputs:
            try:
                self._outputs[node] = self._read.value(node, self._step)
            except UnknownNameError:
                self._outputs[node] = None
        return self._outputs[node]

    def _parameter(self, path: str) -> NDArray[Any] | None:
        """Return the recorded value of a parameter, under any of its names."""
        table = self._read.run.slots
        columns = (table[name].tolist() for name in ("node", "role", "names", "kind"))
        for node, role, names, kind in zip(*columns, strict=True):
            if kind == "parameter" and path in names:
                slot = self._read.run.slot(node, role=role)
                return np.asarray(slot.value(self._step, type=self._of)[0])
        return None

    def head(self) -> tuple[str, NDArray[Any], Floats, Floats]:
        """Return the node of the head, its output [samples, positions, tokens], weight and bias."""
        order = {name: i for i, name in enumerate(self._read.run.nodes)}
        linear = [m for m in self._modules if m["class"] == "Linear" and m["node"] in order]
        for module in sorted(linear, key=lambda m: order[m["node"]], reverse=True):
            output = self.output(module["node"])
            if output is None or output.ndim != 3 or output.shape[-1] < 2:
                continue
            weight = self._parameter(f"{module['path']}.weight")
            if weight is None:
                continue
            bias = self._parameter(f"{module['path']}.bias")
            wide = weight.astype(np.float64)
            offset = np.zeros(len(wide)) if bias is None else bias.astype(np.float64)
            return module["node"], output, wide, offset
        raise UnknownNameError(
            "no head was recorded, a linear layer that returns [samples, positions, tokens]. "
            f"{_DECLARE}."
        )

    def stack(self, shape: tuple[int, ...]) -> list[str]:
        """Return the recorded layers of the stack with the most parameters, in order.

        Args:
            shape: [samples, positions] of the head's output, which may have only the last ones, as
                in `generate` of transformers.
        """
        sizes = {
            m["path"]: sum(p["count"] for p in m["parameters"].values()) for m in self._modules
        }
        best: tuple[int, list[str]] = (-1, [])  # quantised layers may have no parameters
        for parent in self._modules:
            if parent["class"] not in ("ModuleList", "Sequential"):
                continue
            start = f"{parent['path']}." if parent["path"] else ""
            own = [
                m
                for m in self._modules
                if m["path"].startswith(start) and m["path"].removeprefix(start).isdecimal()
            ]
            size = sum(count for path, count in sizes.items() if path.startswith(start))
            recorded = [m["node"] for m in own if self._has_shape(m["node"], shape)]
            equal = len(own) > 1 and len({m["class"] for m in own}) == 1
            if equal and len(recorded) == len(own) and size > best[0]:
                best = size, recorded
        if not best[1]:
            raise UnknownNameError(
                f"no stack of equal layers was recorded, such as transformer.h.*. {_DECLARE}."
            )
        return best[1]

    def _has_shape(self, node: str, shape: tuple[int, ...]) -> bool:
        output = self.output(node)
        if output is None or output.ndim != 3:
            return False
        return bool(output.shape[0] == shape[0] and output.shape[1] >= shape[1])

    def norm(
        self, last: NDArray[Any], logits: NDArray[Any], weight: Floats, bias: Floats, head: str
    ) -> tuple[str | None, Callable[[NDArray[Any]], Floats]]:
        """Return the node of the norm before the head, and what it computes.

        Both are checked with the recorded outputs of the norm and of the head.
        """
        start = last.shape[1] - logits.shape[1]
        named = [m for m in self._modules if "norm" in m["class"].lower()]
        for module in reversed(named):
            output = self.output(module["node"])
            if output is None or output.shape != last.shape:
                continue
            if not norms.follows(output[:1, start:] @ weight.T + bias, logits[:1]):
                continue
            eps = (module.get("settings") or {}).get("eps")
            found = norms.fitted(
                last,
                output,
                weight=self._parameter(f"{module['path']}.weight"),
                bias=self._parameter(f"{module['path']}.bias"),
                eps=() if eps is None else (float(eps),),
            )
            if found is not None:
                return str(module["node"]), found
        if norms.follows(last[:1, start:] @ weight.T + bias, logits[:1]):
            return None, lambda hidden: hidden.astype(np.float64)
        raise UnknownNameError(
            f"no recorded norm leads from the last layer to {head!r}: a layer norm or an RMS norm "
            f"whose output, times the head's weight, is the head's output. {_DECLARE}. Declare the "
            "picture `logit_lens` for a probe instead."
        )
