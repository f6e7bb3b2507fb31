"""Facts about slots that follow from dependency graphs, such as which slots are predictions."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from comgra_decl.records import SlotInfo, SlotKey, Structure
from comgra_decl.rules.base import Scene
from comgra_decl.rules.calls import LossCall
from comgra_decl.rules.finding import Place
from comgra_decl.rules.table import elements_of

SEQUENCES = ("LSTM", "GRU", "RNN", "MultiheadAttention")
"""torch classes whose sequences have the shape [time, batch, ...] unless `batch_first` is set."""


def predictions(scene: Scene) -> set[int]:
    """Return the slots that contain the model's predictions.

    These are the tensors that are compared with a target or, if there is no target, the inputs of
    the loss. They also include submodule outputs that are the same tensor in the same shape,
    because a model often returns the output of its last layer.
    """
    found: set[int] = set()
    for structure in scene.structures.values():
        keys = _predictions_of(structure, _roots(scene))
        found |= {scene.table.by_key[key] for key in keys if key in _known(scene)}
    return found


def predictions_and_logits(scene: Scene) -> set[int]:
    """Return the predictions, and the tensors from which modules without weights compute them.

    Follows each prediction back to the last layer with weights, as long as a tensor is computed
    from a single tensor with the same number of elements.
    """
    table, sources, alike = scene.table, sources_of(scene), _of_one_size(scene)
    weighted = {node for node, _ in scene.parameters}
    weighted |= {info.key.node for info in table.infos if info.kind == "parameter"}
    found = predictions(scene)
    waiting = sorted(found)
    for slot in waiting:
        inside = {i for i in sources.get(slot, []) if table.infos[i].kind == "computed"}
        if len(inside) != 1 or table.infos[slot].key.node in weighted:
            continue
        (source,) = inside
        if source not in found and (source, slot) in alike:
            found.add(source)
            waiting.append(source)
    return found


def computed_from_targets(scene: Scene) -> set[int]:
    """Return the slots computed from targets: losses and their parts."""
    found: set[int] = set()
    for structure in scene.structures.values():
        reached = {i for i, kind in enumerate(structure.kinds) if kind == "target"}
        grew = True
        while grew:
            more = {b for a, b, _ in structure.edges if a in reached} - reached
            reached |= more
            grew = bool(more)
        keys = (structure.keys[i] for i in reached)
        found |= {scene.table.by_key[key] for key in keys if key in _known(scene)}
    return found


def reaching_loss(scene: Scene) -> set[SlotKey]:
    """Return the computed tensors on which a loss depends, with or without gradients.

    Uses the graphs recorded so far; empty if no graph contains a loss.
    """
    found: set[SlotKey] = set()
    for structure in scene.structures.values():
        sources = _sources(structure)
        waiting = [i for i, kind in enumerate(structure.kinds) if kind == "loss"]
        seen = set(waiting)
        for index in waiting:
            for source in sources.get(index, []):
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        found |= {structure.keys[i] for i in seen if structure.kinds[i] == "computed"}
    return found


def target_pairs(scene: Scene) -> Iterator[tuple[SlotInfo, SlotInfo]]:
    """Yield pairs of a computed tensor and the target with which a call combines it."""
    seen = set()
    for structure in scene.structures.values():
        for sources in _sources(structure).values():
            targets = [i for i in sources if structure.kinds[i] == "target"]
            for a in (i for i in sources if structure.kinds[i] == "computed"):
                for b in targets:
                    pair = structure.keys[a], structure.keys[b]
                    if pair not in seen and all(key in _known(scene) for key in pair):
                        seen.add(pair)
                        yield _info(scene, structure, pair[0]), _info(scene, structure, pair[1])


def prediction_of(scene: Scene, call: LossCall) -> int | None:
    """Return the slot with the values passed to a call as its prediction, or None.

    This is the slot recorded for the call, or a tensor of the same size that the graph connects
    with the call's target. A prediction may be reshaped between the model and the loss.
    """
    by_key, elements = scene.table.by_key, call.prediction.elements
    if call.prediction_key is not None:
        return by_key.get(call.prediction_key)
    for prediction, target in target_pairs(scene):
        meets = call.target_key is None or target.key == call.target_key
        if meets and prod(prediction.shape) == elements:
            return prediction.id
    return None


def target_of(scene: Scene, call: LossCall) -> int | None:
    """Return the slot that records the target of a call, or None."""
    return None if call.target_key is None else scene.table.by_key.get(call.target_key)


def place_of(scene: Scene, call: LossCall) -> Place:
    """Return the place of a call's prediction; the call itself if it is not recorded."""
    slot = prediction_of(scene, call)
    if slot is None:
        nearest = (p.id for p, target in target_pairs(scene) if target.key == call.target_key)
        slot = next(nearest, None)
    return Place("prediction") if slot is None else scene.table.place(slot)


def classes_of(scene: Scene) -> int:
    """Return the number of classes of a prediction with a target; 0 if there is none.

    If there are several classifications, the last call is used: auxiliary losses come first.
    """
    known = [call.classes for call in scene.calls if call.classes and call.target.is_integer]
    if known:
        return known[-1]
    if scene.calls and all(not call.target.is_integer for call in scene.calls):
        return 0
    for answer, target in target_pairs(scene):
        if "int" in target.dtype and "float" in answer.dtype:
            if len(answer.shape) == len(target.shape) + 1:
                at = 1 if len(target.shape) > 1 and answer.shape[2:] == target.shape[1:] else -1
                return answer.shape[at]
            if len(answer.shape) == 2 and len(target.shape) == 1:
                return answer.shape[1]
    return 0


def combined(scene: Scene) -> dict[int, list[int]]:
    """Return the sources of each computed slot that has several sources of its own shape."""
    table = scene.table
    found: dict[int, list[int]] = {}
    for structure in scene.structures.values():
        for sink, sources in _sources(structure).items():
            key = structure.keys[sink]
            if structure.kinds[sink] != "computed" or key not in table.by_key:
                continue
            shape = _info(scene, structure, key).shape
            alike = [
                table.by_key[structure.keys[i]]
                for i in sources
                if structure.kinds[i] == "computed"
                and structure.keys[i] in table.by_key
                and _info(scene, structure, structure.keys[i]).shape == shape
            ]
            if len(alike) > 1:
                found.setdefault(table.by_key[key], alike)
    return found


def same_shape_edges(scene: Scene) -> Iterator[tuple[int, int]]:
    """Yield (source, sink) of each edge between computed slots of the same shape, once."""
    seen = set()
    for structure in scene.structures.values():
        for a, b, _ in structure.edges:
            pair = structure.keys[a], structure.keys[b]
            if pair in seen or not all(key in _known(scene) for key in pair):
                continue
            seen.add(pair)
            source, sink = (_info(scene, structure, key) for key in pair)
            if source.shape == sink.shape and source.kind == sink.kind == "computed":
                yield source.id, sink.id


def sources_of(scene: Scene) -> dict[int, list[int]]:
    """Return the slots that each slot is computed from, according to all graphs so far."""
    found: dict[int, list[int]] = {}
    for structure in scene.structures.values():
        for sink, sources in _sources(structure).items():
            keys = [structure.keys[i] for i in (sink, *sources)]
            if all(key in _known(scene) for key in keys):
                slots = [scene.table.by_key[key] for key in keys]
                found.setdefault(slots[0], []).extend(slots[1:])
    return found


def has_other_terms(scene: Scene) -> bool:
    """Return whether a loss also depends on tensors that are neither predictions nor targets.

    These include parameters, such as a learned weight of the loss.
    """
    known = predictions(scene) | computed_from_targets(scene)
    known |= {slot for call in scene.calls if (slot := prediction_of(scene, call)) is not None}
    infos = scene.table.infos
    return any(
        source not in known and infos[source].kind in ("computed", "parameter")
        for sink, sources in sources_of(scene).items()
        if infos[sink].kind == "loss"
        for source in sources
    )


def judging_models(scene: Scene) -> dict[str, set[str]]:
    """Return the models that receive other models' outputs with gradients, and those other models.

    An example is a discriminator, which receives the outputs of a generator. A model is identified
    by its node's name up to the first dot.
    """
    found: dict[str, set[str]] = {}
    for structure in scene.structures.values():
        for a, b, gradient in structure.edges:
            source, sink = (structure.keys[i].node.partition(".")[0] for i in (a, b))
            both_computed = structure.kinds[a] == structure.kinds[b] == "computed"
            if gradient and both_computed and source != sink:
                found.setdefault(sink, set()).add(source)
    return found


def single_sources(scene: Scene) -> NDArray[np.int64]:
    """Return, for each slot, its only source of the same shape; -1 if there is no such source."""
    before: dict[int, set[int]] = {}
    for source, sink in same_shape_edges(scene):
        before.setdefault(sink, set()).add(source)
    found = np.full(len(scene.table), -1, np.int64)
    for sink, sources in before.items():
        if len(sources) == 1:
            found[sink] = next(iter(sources))
    return found


def _roots(scene: Scene) -> set[str]:
    """Return the nodes of whole models, which are named by their class."""
    modules = scene.documents.get("modules") or []
    return {str(module["node"]) for module in modules if not module["path"]}


def _predictions_of(structure: Structure, roots: set[str]) -> set[SlotKey]:
    sources, kinds = _sources(structure), structure.kinds
    meeting = [s for s, inputs in sources.items() if any(kinds[i] == "target" for i in inputs)]
    if not meeting:
        meeting = [s for s in sources if kinds[s] == "loss"]
    waiting = [i for sink in meeting for i in sources[sink] if kinds[i] == "computed"]
    found = set(waiting)
    for index in waiting:
        inside = [i for i in sources.get(index, []) if kinds[i] == "computed"]
        if len(inside) != 1 or inside[0] in found:
            continue
        if _holds(structure.keys[index].node, structure.keys[inside[0]].node, roots):
            found.add(inside[0])
            waiting.append(inside[0])
    return {structure.keys[i] for i in found}


def _holds(node: str, other: str, roots: set[str]) -> bool:
    """Return whether a module may contain another one; a root contains all modules."""
    return other.startswith(f"{node}.") or (node in roots and other not in roots)


def _sources(structure: Structure) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for a, b, _ in structure.edges:
        if a != b:
            found.setdefault(b, []).append(a)
    return found


def _known(scene: Scene) -> dict[SlotKey, int]:
    return scene.table.by_key


def _info(scene: Scene, structure: Structure, key: SlotKey) -> SlotInfo:
    """Return a slot with its shape in the first record of a graph."""
    slot = scene.table.by_key[key]
    return scene.reshaped.get(structure.hash, {}).get(slot, scene.table.infos[slot])


def _of_one_size(scene: Scene) -> set[tuple[int, int]]:
    """Return (source, sink) of all edges between slots with equal element counts per sample."""
    found = set()
    for structure in scene.structures.values():
        for a, b, _ in structure.edges:
            keys = structure.keys[a], structure.keys[b]
            if all(key in _known(scene) for key in keys):
                source, sink = (_info(scene, structure, key) for key in keys)
                if elements_of(source) == elements_of(sink):
                    found.add((source.id, sink.id))
    return found


def calls_missing(scene: Scene) -> str | None:
    """Return why calls to functions were not followed, or None."""
    return None if scene.structure is not None else "calls are not followed; it needs `graph: true`"


def loss_missing(scene: Scene) -> str | None:
    """Return why the structure of the loss is unknown, or None."""
    return None if scene.objectives else "the structure of the loss is not known"


def comparison_missing(scene: Scene) -> str | None:
    """Return why no loss that compares a prediction with a target is known, or None."""
    known = bool(scene.calls)
    return None if known else "no loss that compares a prediction with a target was called"
