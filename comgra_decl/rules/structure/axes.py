"""Modules that treat the batch as the time axis, detected from their settings and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comgra_decl.rules.api import SEQUENCES, Finding, Place, Rule, Scene, SlotInfo, Window

_TOKENS = 40
"""Number of recorded tokens from which it is clear which dimension is time."""


class BatchAsTime(Rule):
    """Sequences whose batch and time axes are swapped."""

    name = "batch_as_time"
    severity = "error"
    certainty = 0.9
    definition = (
        "A recurrent or attention module without `batch_first=True` returns a tensor of shape [m, "
        "n, features], where n is neither m nor 1, and the loss compares predictions with one "
        "target for each of m samples, or at least 40 targets are the next tokens along the second "
        "dimension of the input [m, n], or the tokens of that input end with padding along this "
        "dimension only, or inputs [m, n, features], or an input and the targets, agree in m but "
        "not in n. The module therefore treats the batch as time. The rule "
        "also gives a hint if a module that returns such a tensor has a buffer or parameter of "
        "shape [length, 1, features], such as a table of positions, and no tensor of the model has "
        "the shape [n, m, features]. Unless the program indexes the table, such a module adds "
        "the sample's index in the batch instead of the position."
    )
    source = (
        "PyTorch's documentation of nn.LSTM and nn.MultiheadAttention: `batch_first` is False by "
        "default. Our own definition."
    )
    advice = (
        "Pass batch_first=True, or transpose the input to [time, batch, features]. `comgra-decl "
        "batch-mixing` shows where samples are mixed."
    )

    def look(self, window: Window) -> None:
        """Compare targets with the input, shifted by one."""
        self.scene.compare_tokens(window)

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such module."""
        samples = _samples(scene)
        if samples is None:
            return []
        found = next(self._modules(scene, samples), None) or next(
            self._positions(scene, samples), None
        )
        return [] if found is None else [found]

    def _modules(self, scene: Scene, samples: int) -> Iterator[Finding]:
        for module in scene.documents.get("modules") or []:
            settings = module.get("settings") or {}
            if module.get("class") not in SEQUENCES or settings.get("batch_first") is not False:
                continue
            node = str(module["node"])
            layer = node.rpartition(".")[0]  # a layer of an encoder calls its attention inside
            for info in _sequences(
                scene, {node, layer} if "Multihead" in module["class"] else {node}
            ):
                if _is_swapped(info, samples):
                    yield self.finding(
                        scene,
                        place=scene.table.place(info.id),
                        first_step=0,
                        message=f"{node} ({module['class']}) expects [time, batch, ...] because "
                        f"batch_first is not set, but the batch of {samples} samples comes first: "
                        f"its output has the shape {list(info.shape)}. It treats the batch as time "
                        "and mixes samples.",
                        evidence={"samples": samples, "shape": str(list(info.shape))},
                    )

    def _positions(self, scene: Scene, samples: int) -> Iterator[Finding]:
        every = [info.shape for info in scene.table.infos if info.kind == "computed"]
        for module in scene.documents.get("modules") or []:
            node = str(module["node"])
            for name, shape in _tables(module):
                for info in _sequences(scene, {node}):
                    a, b, features = info.shape
                    if (
                        features == shape[2]
                        and _is_swapped(info, samples)
                        and (b, a, features) not in every
                    ):
                        yield self.finding(
                            scene,
                            place=Place(node),
                            first_step=0,
                            severity="hint",  # the program may index the table by position
                            certainty=0.5,
                            message=f"{name} of {node} has the shape {shape} ([position, 1, "
                            f"features]), but is combined with {list(info.shape)}, where the "
                            f"batch of {samples} samples comes first. If they are added without an "
                            "index, positions count samples instead of time steps.",
                            advice="Give the table the shape [1, positions, features] and slice "
                            "it by x.size(1), or use sequences of shape [time, batch, features].",
                            evidence={"samples": samples, "shape": str(list(info.shape))},
                        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if _samples(scene) is None:
            return (
                "no loss compares one target per sample, no targets are the next tokens, and no "
                "tokens end with padding"
            )
        return None


def _samples(scene: Scene) -> int | None:
    """Return the size of the first batch, if it is known to be the first dimension."""
    several = scene.next_tokens.several
    tokens = None if several else scene.next_tokens.shape(scene.table, least=_TOKENS)
    if tokens is not None:
        return tokens[0]
    padded = scene.told("padded tokens")
    if padded:
        return int(padded[0]["shape"][0])
    first = min(scene.calls.items(), key=lambda item: item[1].first, default=None)
    target = () if first is None else first[0].target.shape
    if len(target) == 1 or (len(target) == 2 and target[1] == 1):
        return target[0]
    return _samples_of_sequences(scene, target)


def _samples_of_sequences(scene: Scene, target: tuple[int, ...]) -> int | None:
    """Return the size of the batch if sequences have different lengths; None if not.

    Inputs [m, n, features], or an input and a target, that agree in m only have m samples: if time
    came first, they would share the second dimension.
    """
    shapes: set[tuple[int, ...]] = {
        info.shape[:2]
        for info in scene.table.infos
        if info.kind == "input"
        and info.key.pass_ == "forward"
        and len(info.shape) == 3
        and "float" in info.dtype
        and info.shape[1] != info.shape[2]  # a mask for each sample
    }
    shapes |= {target[:2]} if shapes and len(target) > 1 else set()
    samples, lengths = {shape[0] for shape in shapes}, {shape[1] for shape in shapes}
    return samples.pop() if len(samples) == 1 and len(lengths) == len(shapes) > 1 else None


def _sequences(scene: Scene, nodes: set[str]) -> Iterator[SlotInfo]:
    for info in scene.table.infos:
        forward = info.kind == "computed" and info.key.pass_ == "forward"
        # attention returns its weights, and recurrent modules their states, as further outputs
        returned = info.key.node in nodes and info.key.role in ("output", "output[0]")
        if forward and returned and len(info.shape) == 3:
            yield info


def _is_swapped(info: SlotInfo, samples: int) -> bool:
    a, b, _ = info.shape
    return a == samples and b not in (1, samples)


def _tables(module: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    shapes = dict(module.get("buffers") or {})
    shapes |= {name: facts.get("shape", ()) for name, facts in module["parameters"].items()}
    for name, shape in shapes.items():
        if len(shape) == 3 and shape[1] == 1 and shape[0] > 1:
            yield name, list(shape)
