"""Target networks and averages of weights that lag far behind the model they copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod, sqrt

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Finding,
    First,
    Fraction,
    Place,
    Previous,
    Rule,
    RuleParameters,
    Scene,
    Slots,
    Window,
    per_run,
    read_rows,
    values_of,
)

_MOVED = 0.02  # of its size, by which a model must have moved for its copy to lag

_FOLLOWS = 0.2  # of the change of the model, by which an average that is evaluated must follow
_OFTEN = 10  # records in which the inputs to the two models differ


class LaggingParameters(RuleParameters):
    """Options of `lagging_copy`."""

    share: Fraction = 0.05
    """Smallest allowed change in a copy, relative to that in the trained model."""

    steps: Count = 100
    """Number of steps required."""


_WRAPPERS = ("AveragedModel", "DataParallel", "DistributedDataParallel")
_WRAPPED = "module"  # the path of the model in these


@dataclass
class Model:
    """A model of the run: its class, and its parameters by path and name."""

    kind: str
    trained: bool = False
    frozen: bool = True  # no parameter needs a gradient
    slots: dict[tuple[str, str], int] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)


class LaggingCopy(Rule):
    """Target networks, or averages of weights, that barely follow the trained model."""

    name = "lagging_copy"
    certainty = 0.7
    definition = (
        "A model whose parameters are in no optimizer has the same class and parameters as a "
        "trained model, and starts with the same values or with random ones. After at least "
        "`steps` steps, the l2 norms of the trained model's parameters have changed by at least "
        f"{_MOVED:.0%}, and those of the copy by less than `share` of this change. In training "
        "steps, the copy is called without gradients, and its inputs differ from those of the "
        "trained model, as is usual for a target network. A frozen copy that is called like the "
        "trained model is reported only if it has not changed at all and both models receive the "
        "same two inputs in opposite order, as in symmetric self-distillation (BYOL). A copy that "
        "is evaluated, such as a moving average of the weights, is reported if the norms of its "
        f"parameters have moved from the start of the trained model, but less than {_FOLLOWS:.0%} "
        "as far as those of that model. If the copy has not changed at all, and the program has "
        "repeatedly written to the trained model in place between the steps of its optimizer, the "
        "weights are reported as copied in the wrong direction. This requires an optimizer that "
        "counts its steps, such as Adam."
    )
    source = (
        "Mnih et al., Human-level control (2015): over millions of steps, the trained network is "
        "copied to the target network every few thousand steps. Our own definition."
    )
    advice = (
        "Copy the weights to it more often (several times per run), or move it towards the trained "
        "model in every step (`lerp_`). For a moving average, the decay must fit the length of the "
        "training: after n steps, a share of decay**n of the initial weights is left."
    )
    explained_by = ("nonfinite",)
    Parameters = LaggingParameters

    _start = per_run(First)
    _deviation = per_run(First)
    _largest = per_run(First)
    _latest = per_run(Previous)
    _trains: set[str] = per_run(set)  # nodes called without gradients in training
    _other_inputs = 0
    # norms in the last evaluation that contains a parameter, and of the trained model by then
    _evaluated: dict[int, float] = per_run(dict)
    _by_then: dict[int, float] = per_run(dict)

    def look_at_evaluation(self, window: Window) -> None:
        """Store the parameters of models that are evaluated, and of all others by then."""
        at = np.flatnonzero(window.table.parameters)
        if not len(at) or not window.has("l2"):
            return
        norm = window.read("l2", at).astype(np.float64)
        known = self._latest.known(at)
        for column, slot in enumerate(at.tolist()):
            seen = norm[np.isfinite(norm[:, column]), column]
            if len(seen):
                self._evaluated[slot] = float(seen[-1])
            self._by_then[slot] = float(known[column])

    def look(self, window: Window) -> None:
        """Store the parameters, and which models are called without gradients."""
        self._take(window)
        table = window.table
        called = np.asarray(window.present.any(0))
        for info in table.infos:
            if info.kind == "computed" and info.key.pass_ == "no_grad" and called[info.id]:
                self._trains.add(info.key.node)
        inner = [i for i in table.infos if i.kind == "input" and i.key.pass_ == "no_grad"]
        for row in read_rows(window).tolist():
            for info in inner:
                other = table.by_key.get(info.key._replace(pass_="forward"))
                if other is not None and self._other_inputs <= _OFTEN:
                    one, two = (values_of(window, row, slot) for slot in (info.id, other))
                    if one is not None and two is not None:
                        self._other_inputs += not np.array_equal(one, two)

    def _take(self, window: Window) -> None:
        at = np.flatnonzero(window.table.parameters)
        if len(at) and window.has("l2", "std", "abs_max"):
            norm = window.read("l2", at).astype(np.float64)
            self._start.look(at, norm)
            self._latest.look(at, norm)
            self._deviation.look(at, window.read("std", at).astype(np.float64))
            self._largest.look(at, window.read("abs_max", at).astype(np.float64))

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first copy that lags behind."""
        models = _models(scene)
        if scene.last_step < self.parameters.steps:
            return []
        for name, copy in models.items():
            for other, model in models.items():
                if copy.trained or not model.trained or not _are_alike(scene, copy, model):
                    continue
                written = self._reversed(scene, copy, model)
                if written:
                    return [self._report_reversed(scene, name, other, written)]
                crossed = _are_crossed(scene, copy, model)
                found = self._lags(scene, copy, model, crossed=crossed)
                if found is not None:
                    return [self._report(scene, name, other, found)]
                follows = self._follows(copy, model)
                if follows is not None:
                    return [self._report(scene, name, other, follows, evaluated=True)]
        return []

    def _follows(self, copy: Model, model: Model) -> float | None:
        """Return how far a copy that is evaluated has followed the model, if it is not far."""
        pairs = [(copy.slots[key], model.slots[key]) for key in copy.slots]
        if not all(mine in self._evaluated for mine, _ in pairs):
            return None
        now = np.array([self._evaluated[mine] for mine, _ in pairs])
        last = np.array([self._by_then.get(its, np.nan) for _, its in pairs])
        first = self._start.known(np.array([its for _, its in pairs]))
        moved, far = np.nansum(np.abs(now - first)), np.nansum(np.abs(last - first))
        if not far > _MOVED * np.nansum(first) or not 0 < moved < _FOLLOWS * far:
            return None
        return float(moved / far)

    def _reversed(self, scene: Scene, copy: Model, model: Model) -> int:
        """Return how often the trained model was written to, if its copy never was; else 0."""
        if not copy.nodes & self._trains or self._other_inputs <= _OFTEN:
            return 0
        mine = np.array([copy.slots[key] for key in copy.slots])
        if not np.array_equal(self._start.known(mine), self._latest.known(mine)):
            return 0
        writes = [fact for fact in scene.told("written") if fact["node"] in model.nodes]
        return max((int(fact["count"]) for fact in writes), default=0)

    def _report_reversed(self, scene: Scene, name: str, other: str, writes: int) -> Finding:
        return self.finding(
            scene,
            place=Place(other),
            first_step=0,
            message=f"The program itself writes to the weights of {other} between the steps of its "
            f"optimizer (at least {writes} times), but {name}, which provides targets and has the "
            "same parameters, has never changed. The weights seem to be copied in the wrong "
            f"direction: {other} is pulled back to the initial weights of {name}.",
            advice=f"Copy the weights of {other} to {name}, not the other way round: "
            "`target.load_state_dict(online.state_dict())`, or `target_parameter.lerp_(parameter, "
            "tau)` with a small tau.",
            evidence={"writes": writes, "steps": scene.last_step + 1},
        )

    def _lags(
        self, scene: Scene, copy: Model, model: Model, *, crossed: bool = False
    ) -> float | None:
        apart = copy.nodes & self._trains and self._other_inputs > _OFTEN
        if not apart and not crossed:
            return None
        mine = np.array([copy.slots[key] for key in copy.slots])
        its = np.array([model.slots[key] for key in copy.slots])
        start, end = self._start.known(mine), self._latest.known(mine)
        first, last = self._start.known(its), self._latest.known(its)
        moved, far = np.nansum(np.abs(end - start)), np.nansum(np.abs(last - first))
        if not far > _MOVED * np.nansum(first) or not moved < self.parameters.share * far:
            return None
        copied = np.nansum(np.abs(start - first)) < self.parameters.share * far
        if not copied and not self._is_random(scene, mine):
            return None
        return float(moved / far) if apart or not moved else None

    def _is_random(self, scene: Scene, at: Slots) -> bool:
        """Whether all larger weights are uniform in ±1/sqrt(fan in), PyTorch's initialization."""
        shapes = [scene.table.infos[slot].shape for slot in at.tolist()]
        judged = []
        for slot, shape in zip(at.tolist(), shapes, strict=True):
            if len(shape) < 2 or prod(shape) < 50:
                continue
            bound = 1 / sqrt(prod(shape[1:]))
            largest = float(self._largest.known(np.array([slot]))[0])
            deviation = float(self._deviation.known(np.array([slot]))[0])
            near = bound * (1 - 12 / prod(shape)) <= largest <= bound * (1 + 1e-5)
            judged.append(near and abs(deviation * sqrt(3) / bound - 1) < 0.15)
        return bool(judged) and all(judged)

    def _report(
        self, scene: Scene, name: str, other: str, share: float, *, evaluated: bool = False
    ) -> Finding:
        moved = (
            "has not changed, although that model is trained"
            if not share
            else f"has moved only {100 * share:.2g}% as far as that model"
        )
        return self.finding(
            scene,
            place=Place(name),
            first_step=0,
            message=f"After {scene.last_step + 1} steps, {name}, which copies {other} to "
            f"{'be evaluated' if evaluated else 'provide targets'}, {moved}.",
            evidence={"share": share, "steps": scene.last_step + 1},
        )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if len(_models(scene)) < 2:
            return "the run has only one model"
        steps = self.parameters.steps
        return None if scene.last_step >= steps else f"it needs {steps} steps"


def _models(scene: Scene) -> dict[str, Model]:
    slots = {(i.key.node, i.key.role): i.id for i in scene.table.infos
             if i.kind == "parameter" and i.key.pass_ == "forward"}  # fmt: skip
    found: dict[str, Model] = {}
    name = ""
    for module in scene.documents.get("modules") or []:
        node = str(module["node"])
        if not module["path"]:
            name = node
            found[name] = Model(str(module.get("class")))
        elif module["path"] == _WRAPPED and found[name].kind in _WRAPPERS:
            found[name].kind = str(module.get("class"))
        if name not in found:
            continue
        model = found[name]
        model.nodes.add(node)
        for key, facts in module["parameters"].items():
            model.trained = model.trained or bool(facts.get("optimized", True))
            model.frozen = model.frozen and not facts.get("trainable", True)
            slot = slots.get((node, key))
            if slot is not None:
                model.slots[_inner(str(module["path"])), key] = slot
    return found


def _inner(path: str) -> str:
    """Return the path of a module within the model that a wrapper contains."""
    return path.removeprefix(_WRAPPED).removeprefix(".")


def _are_crossed(scene: Scene, copy: Model, model: Model) -> bool:
    """Return whether a model and its frozen copy receive two inputs in opposite order."""
    for structure in scene.structures.values() if copy.frozen else ():
        given: list[dict[int, set[int]]] = [{}, {}]  # inputs by call
        for a, b, _ in structure.edges:
            for calls, nodes in zip(given, (copy.nodes, model.nodes), strict=True):
                if structure.kinds[a] == "input" and structure.keys[b].node in nodes:
                    calls.setdefault(structure.keys[b].iteration, set()).add(a)
        mine, its = given
        if {*mine} == {*its} == {0, 1} and mine[0] == its[1] != mine[1] == its[0]:
            return True
    return False


def _are_alike(scene: Scene, copy: Model, model: Model) -> bool:
    infos = scene.table.infos
    if copy.kind != model.kind or not copy.slots or not copy.slots.keys() <= model.slots.keys():
        return False
    return all(infos[copy.slots[k]].shape == infos[model.slots[k]].shape for k in copy.slots)
