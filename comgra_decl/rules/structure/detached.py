"""Places where gradients are cut off."""

from __future__ import annotations

from comgra_decl.rules.api import (
    EARLIER_STEP,
    MOST_OTHERS,
    Finding,
    Place,
    Rule,
    Scene,
    SlotKey,
    Structure,
)


class Detached(Rule):
    """Gradients cut off from parameters that should be trained."""

    name = "detached"
    severity = "error"
    certainty = 0.92
    definition = (
        "In the dependency graph, a tensor computed from trainable parameters contributes to the "
        "loss, but no gradient flows back to it along any path, and these parameters have no "
        "gradient. Alternatively, a tensor that is trained through other paths enters a module "
        "with trained parameters, but no gradient flows back from this module in any iteration. "
        "The second finding is only a hint. Modules whose inputs are integers (embeddings) are "
        "ignored, and so are models that are called only without gradients while another model of "
        "the same class is trained (target networks)."
    )
    source = (
        "Our own definition, based on the graph; the silent failures in the book chapter "
        "'Debugging: Visualizing Activation Maps & Gradients'."
    )
    advice = (
        "Between this tensor and the next one, look for detach(), .data, .item(), numpy, "
        "torch.no_grad(), torch.tensor(x) or an argmax. If this is intended, freeze the parameters "
        "before it."
    )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return one finding about the last cut before the loss."""
        if scene.structure is None or scene.records < 2:
            return []
        cut = _cuts(scene, scene.structure)
        if not cut:
            return self._partly(scene, scene.structure)
        key = cut[0]
        place = Place(key.node, key.role, key.iteration)
        others = tuple(Place(k.node, k.role, k.iteration) for k in cut[1 : MOST_OTHERS + 1])
        return [
            self.finding(
                scene,
                place=place,
                first_step=0,
                message=f"No gradient flows back to {place}, although the loss depends on it and "
                "it is computed from trainable parameters.",
                also=len(cut) - 1,
                others=others,
            )
        ]

    def _partly(self, scene: Scene, structure: Structure) -> list[Finding]:
        """Return a hint about tensors that receive gradients only through some paths."""
        found = _one_way(scene, structure)
        if not found:
            return []
        (source, sink), *rest = found
        place = Place(source.node, source.role, source.iteration)
        others = dict.fromkeys(Place(key.node, key.role, key.iteration) for key, _ in rest)
        others.pop(place, None)
        return [
            self.finding(
                scene,
                place=place,
                first_step=0,
                message=f"No gradient flows back from {sink.node} to its input {place}, which is "
                "trained only through other paths.",
                advice="If this is not intended, look for detach(), torch.no_grad(), or a call to "
                "sample() instead of rsample().",
                severity="hint",
                certainty=0.6,
                also=len(others),
                others=tuple(others)[:MOST_OTHERS],
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        if scene.structure is None:
            return "no dependency graph is recorded; set `graph: true`"
        if not scene.table.parameters.any() or not scene.table.parameter_gradients.any():
            return "parameters or their gradients are not recorded; capture both"
        return None


def _cuts(scene: Scene, structure: Structure) -> list[SlotKey]:
    """Return the tensors after which gradients are cut off, the last one first."""
    forward: dict[int, list[tuple[int, bool]]] = {}
    for a, b, gradient in structure.edges:
        forward.setdefault(a, []).append((b, gradient))
    losses = {i for i, kind in enumerate(structure.kinds) if kind == "loss"}
    by_value = _reaching(structure, losses, with_gradient=False)
    by_gradient = _reaching(structure, losses, with_gradient=True)
    lost = _untrained(scene, structure, by_gradient)
    if not lost:
        return []
    made = _made_of(structure, lost)
    trained = {
        structure.keys[i].node.partition(".")[0]
        for i in by_gradient
        if structure.kinds[i] == "parameter"
    }
    cut = [
        i
        for i in made
        if i in by_value
        and i not in by_gradient
        and structure.kinds[i] == "computed"
        and not _of_target_network(structure.keys[i], trained)
        and all(b not in made or b in by_gradient for b, _ in forward.get(i, []) if b in by_value)
    ]
    return [structure.keys[i] for i in sorted(cut, reverse=True)]


def _of_target_network(key: SlotKey, trained: set[str]) -> bool:
    """Return whether a model is called without gradients and another of its class is trained."""
    model = key.node.partition(".")[0]
    alike = {other for other in trained if other.partition("#")[0] == model.partition("#")[0]}
    return key.pass_ == "no_grad" and model not in trained and bool(alike)


def _reaching(structure: Structure, ends: set[int], *, with_gradient: bool) -> set[int]:
    sources: dict[int, list[int]] = {}
    for a, b, gradient in structure.edges:
        if gradient or not with_gradient:
            sources.setdefault(b, []).append(a)
    found, waiting = set(ends), list(ends)
    for i in waiting:
        for a in sources.get(i, []):
            if a not in found:
                found.add(a)
                waiting.append(a)
    return found


def _untrained(scene: Scene, structure: Structure, trained: set[int]) -> set[int]:
    """Return trainable parameters that have no gradient according to the graph and the records."""
    parameters, table = scene.parameters, scene.table
    return {
        i
        for i, key in enumerate(structure.keys)
        if structure.kinds[i] == "parameter"
        and i not in trained
        and parameters.get((key.node, key.role), {}).get("trainable")
        and parameters[key.node, key.role].get("optimized", True)  # excludes teachers
        and key._replace(pass_="grad") not in table.by_key
        and table.parameter_gradients.any()
    }


def _made_of(structure: Structure, starts: set[int]) -> set[int]:
    sinks: dict[int, list[int]] = {}
    for a, b, gradient in structure.edges:
        if gradient or a in starts:
            sinks.setdefault(a, []).append(b)
    found, waiting = set(starts), list(starts)
    for i in waiting:
        for b in sinks.get(i, []):
            if b not in found:
                found.add(b)
                waiting.append(b)
    return found


def _one_way(scene: Scene, structure: Structure) -> list[tuple[SlotKey, SlotKey]]:
    """Return (source, sink) of edges between trained tensors that never carry a gradient."""
    losses = {i for i, kind in enumerate(structure.kinds) if kind == "loss"}
    trained = _reaching(structure, losses, with_gradient=True)
    parameters = {i for i in trained if structure.kinds[i] == "parameter"}
    made = _made_of(structure, parameters)
    weighted = {structure.keys[i].node for i in parameters}
    keys = structure.keys
    flows = {(keys[a].node, keys[b].node) for a, b, gradient in structure.edges if gradient}
    classes = {info.key: info.module_class for info in scene.table.infos}
    return [
        (keys[a], keys[b])
        for a, b, gradient in structure.edges
        if not gradient
        and structure.kinds[a] == structure.kinds[b] == "computed"
        and a in trained
        and a in made
        and b in trained
        and keys[b].node in weighted
        and (keys[a].node, keys[b].node) not in flows
        and not keys[a].role.endswith(EARLIER_STEP)
        and "Embedding" not in classes.get(keys[b], "")
    ]
