"""Record where a step begins and ends: the inputs of its models, its losses, and its targets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from comgra_decl.hooks.graph.attended import Attended
from comgra_decl.hooks.graph.telling import Telling
from comgra_decl.hooks.limits import is_capturing
from comgra_decl.hooks.objects import instances_of
from comgra_decl.hooks.pytree import gradient_function, tensors_in, tensors_of
from comgra_decl.hooks.tensors.arrangement import codes_in_order, interleaving
from comgra_decl.hooks.tensors.gradients import loss_node
from comgra_decl.hooks.tensors.idle_terms import IdleTerms
from comgra_decl.hooks.tensors.loss_calls import batch_softmaxes
from comgra_decl.hooks.tensors.objective import leaves_behind, objective_of, with_gradients
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.hooks.tensors.targets import Targets
from comgra_decl.hooks.tensors.terms import terms_of
from comgra_decl.records import ATTENTIONS, BATCH_SOFTMAXES, CODES, OBJECTIVES, TELLING
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_allocated, is_readable

if TYPE_CHECKING:
    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tensors.recorder import TensorRecorder
    from comgra_decl.spec import Spec


_SCANS = 2
"""Number of records in which the backward graph is searched for softmaxes over the batch. The graph
rarely changes."""

_RECORDS_OF_TERMS = 4
"""Number of records in which the terms of losses are compared with the optimizers that step. If
several optimizers take turns in a training step, the first of its parts are counted as steps."""

_CODES = (torch.int16, torch.int32, torch.int64)

_INTERLEAVED = 0.5  # in images, elements are the more alike the nearer they are

_MOST_LEAVES = 4_000
_NEAR = 0.9  # cosine between a parameter and its copy some steps later
_PART = 8  # elements of a leaf that are compared

_MOST_ORDERS = 4
"""Number of training records and of evaluations in which the order of codes is read."""

_MOST_LOSSES = 4
"""Maximum number of losses per step whose structure is stored."""


class Ends:
    """Records tensors that no module returns. They are always recorded, as every graph needs them.

    Args:
        spec: decides whether values and gradients are stored.
        recorder: reads gradients.
        warn: called with what does not fit the inputs.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        recorder: TensorRecorder,
        warn: Callable[[str], None],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        entries = spec.nodes.values()
        self._warn = warn
        self._values = any(entry.values for entry in entries)
        self._gradients = any({"output_grad", "input_grad"} & {*e.capture} for e in entries)
        self._image = next((e.image for e in reversed(entries) if e.image is not None), None)
        self._recorder = recorder
        self._inputs: dict[tuple[str, int], Slot] = {}
        self._losses: dict[tuple[str, int], Slot] = {}
        self._scans = _SCANS
        self._looks = _SCANS  # in which the structure of losses is read
        # numbers of records in which the order of codes was read, by input; for training and others
        self._orders: dict[tuple[StepCapture, str], int] = {}
        self._attended = Attended()
        self._telling = Telling()
        self._idle: IdleTerms | None = IdleTerms()
        self._stepped = False  # whether an optimizer has stepped since the last backward pass
        self._stale: list[torch.Tensor] = []  # parameters that had a gradient before it
        self._behind: list[torch.Tensor] = []  # parameters that the backward pass will reach
        # those to which a backward pass has given a gradient since the last optimizer step
        self._reached: list[torch.Tensor] = []
        self._leaves = Leaves()
        self.targets = Targets(on_fault=on_fault)

    def read_inputs(
        self, capture: StepCapture, args: Any, kwargs: dict[str, Any], graph: Provenance | None
    ) -> None:
        """Read the inputs of a model."""
        given = [*tensors_in(args), *tensors_in(kwargs)] if kwargs else tensors_in(args)
        for _, tensor in given:
            self.targets.give(tensor)
        if graph is not None and self._scans:
            self._attend(graph, args, kwargs)
            self._pair(capture, given)
        iteration = capture.iteration("input", "input")
        if iteration is None:
            return
        for path, tensor in given:
            if self._looks > 0 and is_readable(tensor):
                self._look_at(capture, path, tensor)
            if gradient_function(tensor) is not None:  # computed by another part of the model
                continue
            if self._looks > 0 and tensor.requires_grad:
                self._leaves.give(tensor)
            slot = capture.in_pass(self.input_slot(input_role(path), iteration))
            self._read_codes(capture, slot, tensor)
            dim = capture.batch_dim(tensor, "auto", slot)
            index = capture.add(slot, tensor, batch_dim=dim, values=self._values)
            if graph is not None and graph.enters(tensor):
                graph.trace(slot, tensor)
            if index is not None and self._gradients and tensor.requires_grad:
                self._recorder.watch(slot, tensor, capture, batch_dim=dim, values=self._values)

    def _look_at(self, capture: StepCapture, path: Any, tensor: torch.Tensor) -> None:
        """Look at the shape and the values of an input in the first records."""
        self._leaves.shapes.add(tuple(tensor.shape))
        _see_colours(capture, path, tensor)
        if self._image is not None and tensor.is_floating_point():
            misfit = self._image.misfit(tensor.shape)
            if misfit is not None:
                self._warn(f"nodes: {misfit}")

    def _pair(self, capture: StepCapture, given: list[tuple[Any, torch.Tensor]]) -> None:
        """Compare the rows of tokens and targets if the model computes its own loss."""
        whole = [tensor for _, tensor in given if tensor.dtype is torch.int64]
        if len(whole) == 2:
            self.targets.compare_ends(capture, whole[1])

    def _read_codes(self, capture: StepCapture, slot: Slot, tensor: torch.Tensor) -> None:
        """Store whether the codes of an input are in the order of their first appearance."""
        if tensor.dtype not in _CODES or slot.iteration or not is_readable(tensor):
            return
        read = self._orders.get((capture, slot.role), 0)
        if read < _MOST_ORDERS and not is_capturing():
            self._orders[capture, slot.role] = read + 1
            with quiet():
                fact = {"input": slot.role, "rows": tensor.shape[:1].numel()}
                capture.facts[CODES].append({**fact, "codes": codes_in_order(tensor)})

    def look_for_targets(
        self,
        capture: StepCapture,
        returned: Any,
        graph: Provenance | None,
        *,
        within_compiled: bool,
    ) -> None:
        """Start looking for targets after a model has returned."""
        self.targets.know(returned)
        if within_compiled:
            self.targets.wait(capture, values=self._values)
            return
        self.targets.look(capture, graph, values=self._values)

    def read_loss(
        self,
        capture: StepCapture,
        loss: torch.Tensor,
        backwarded: torch.Tensor,
        graph: Provenance | None,
    ) -> None:
        """Read a loss on which `backward()` was called; `loss` is the value before AMP scaling."""
        pass_ = capture.backwards.name()
        number = capture.count("loss")
        node = loss_node(pass_)
        iteration = capture.iteration(pass_, node)
        if capture.categories is not None:
            capture.categories.loss(backwarded)
        self._describe(capture, backwarded, number)
        if capture.probing is not None:
            capture.probing.loss(backwarded)
        if self._scans and number == 0:
            self._scan(capture, backwarded, graph)
        if iteration is None:
            return
        slot = self._loss(node, iteration)
        index = capture.add(slot, loss, batch_dim=None, values=False)
        if index is not None and loss.numel() == 1:
            capture.kpi_tensors["loss" if number == 0 else f"loss[{number}]"] = index
        if graph is not None:
            graph.trace(slot, backwarded)

    def _describe(self, capture: StepCapture, loss: torch.Tensor, number: int) -> None:
        """Read the structure of a loss and the gradients left over from before it."""
        if number == 0:
            self._looks -= 1
            if self._looks < _SCANS - _RECORDS_OF_TERMS and self._idle is not None:
                idle, self._idle = self._idle.found(), None
                if idle is not None:
                    capture.facts[TELLING].append(idle)
        if self._idle is not None and not is_capturing():
            self._idle.loss(loss, record=self._looks)
        # reading numbers would break the capture of a CUDA graph
        if (
            self._looks >= 0
            and len(capture.facts[OBJECTIVES]) < _MOST_LOSSES
            and not is_capturing()
        ):
            objective = {**objective_of(loss), "terms": terms_of(loss)}
            capture.facts[OBJECTIVES].append(objective)
            leaves = leaves_behind(loss)
            self._leaves.reach(leaves, self._looks)
            self._stale = with_gradients(leaves) if self._stepped else []
            if self._stepped and leaves:
                objective["uncleared"] = len(self._stale)
            self._stepped = False
            self._behind = leaves

    @property
    def awaits_gradients(self) -> bool:
        """Whether the loss of a running backward pass was described."""
        return bool(self._behind)

    def after_backward(self) -> None:
        """Find the parameters to which a backward pass in one of the first records led."""
        behind, self._behind = self._behind, []
        if not is_capturing():
            known = {id(parameter) for parameter in self._reached}
            self._reached += [p for p in with_gradients(behind) if id(p) not in known]

    def _scan(self, capture: StepCapture, loss: torch.Tensor, graph: Provenance | None) -> None:
        """Store what was collected about the calls before the first loss of a step."""
        self._scans -= 1
        if capture.batch_size:
            capture.facts[BATCH_SOFTMAXES] = batch_softmaxes(loss, capture.batch_size)
        capture.facts[ATTENTIONS] = self._attended.take()
        capture.facts[TELLING] += self._telling.take(loss)
        if graph is not None and not self._scans:
            graph.attended = graph.telling = None

    def release(self) -> None:
        """Stop looking for targets, and release all tensors."""
        self.targets.stop()
        self._telling.release()
        self._stale, self._behind, self._reached = [], [], []

    def before_optimizer(
        self,
        capture: StepCapture,
        optimizer: Any,
        *,
        closure: bool,
        holds: Callable[[torch.Tensor], bool],
    ) -> None:
        """Check whether an optimizer uses gradients from before its previous step.

        Args:
            capture: the step.
            optimizer: the optimizer that is about to step.
            closure: whether it computes the losses itself.
            holds: returns whether a tensor is a parameter of a model.
        """
        self.targets.rest()
        self._leaves.hold(optimizer)
        if self._idle is not None:
            self._idle.step(optimizer)
        if self._looks <= 0 and not self._leaves.over:
            for count, shapes in self._leaves.untrained(holds)[:1]:
                fact = {"kind": "trains nothing", "count": count, "shapes": shapes}
                capture.facts[TELLING].append(fact)
        if self._looks <= 0 and not self._leaves.over and (outside := self._leaves.outside(holds)):
            shapes = [[*tensor.shape] for tensor in outside[:3]]
            fact = {"kind": "outside", "count": len(outside), "shapes": shapes}
            capture.facts[TELLING].append(fact)
        if self._looks <= 0 and (gone := self._leaves.recreated()):
            fact = {"kind": "recreated", "count": len(gone), "shapes": gone[:3]}
            capture.facts[TELLING].append(fact)
        stale, self._stale = self._stale, []
        reached, self._reached = self._reached, []
        self._stepped = not closure
        if closure or not (stale or reached):
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        reached = [p for p in reached if id(p) in held]
        used = {id(parameter) for parameter in with_gradients(reached)}
        cleared = [parameter for parameter in reached if id(parameter) not in used]
        for kind, found in (("stale", stale), ("cleared", cleared)):
            if count := sum(id(parameter) in held for parameter in found):
                shapes = [[*p.shape] for p in found if id(p) in held][:3]
                name = type(optimizer).__name__
                fact = {"optimizer": name, "shapes": shapes, "count": count}
                capture.facts[TELLING].append({"kind": f"{kind} gradient", **fact})

    def _attend(self, graph: Provenance, args: Any, kwargs: dict[str, Any]) -> None:
        """Make the graph collect facts about the calls within the model being called."""
        graph.attended, graph.telling = self._attended, self._telling
        self._telling.bootstraps.computed_sources = graph.computed_sources
        for tensor in tensors_of((*args, *kwargs.values())):
            whole = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
            if whole and tensor.dim() == 2 and self._attended.tokens is None:
                self._attended.tokens = self._telling.tokens = weakref.ref(tensor)

    def input_slot(self, role: str, iteration: int) -> Slot:
        """Return the slot of an input of a model; `iteration` counts the models in a step."""
        slot = self._inputs.get((role, iteration))
        if slot is None:
            slot = Slot(lambda: "input", role, iteration=iteration, kind="input", image=self._image)
            self._inputs[role, iteration] = slot
        return slot

    def _loss(self, node: str, iteration: int) -> Slot:
        slot = self._losses.get((node, iteration))
        if slot is None:
            slot = Slot(lambda: node, "output", iteration=iteration, kind="loss")
            self._losses[node, iteration] = slot
        return slot


def _see_colours(capture: StepCapture, path: Any, tensor: torch.Tensor) -> None:
    """Note images whose colours are side by side instead of in channels."""
    if tensor.dim() != 4 or not tensor.is_floating_point() or is_capturing():
        return
    with quiet():
        ratio = interleaving(tensor)
    if ratio is not None and ratio < _INTERLEAVED:
        fact = {"kind": "interleaved", "input": input_role(path), "shape": [*tensor.shape]}
        capture.facts[TELLING].append({**fact, "ratio": round(ratio, 4)})


class Leaves:
    """Tensors behind the losses of the first records, to find those that nothing updates.

    Attributes:
        over: whether the search has ended.
        shapes: the shapes of inputs of models.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Leaf] = {}  # by id
        self._losses: list[list[weakref.ref[torch.Tensor]]] = []  # parameters behind each loss
        self._gone: list[_Leaf] = []  # former parameters
        self._others: set[int] = set()  # inputs, and what optimizers hold
        self._held: dict[int, weakref.ref[torch.Tensor]] = {}  # what optimizers hold, by id
        self.shapes: set[tuple[int, ...]] = set()
        self.over = False

    def give(self, tensor: torch.Tensor) -> None:
        """Exclude an input, whose gradient the program may want to know."""
        self._others.add(id(tensor))

    def hold(self, optimizer: Any) -> None:
        """Exclude the parameters of an optimizer."""
        if not self.over:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._others |= {id(p) for p in held}
            self._held |= {id(p): weakref.ref(p) for p in held}

    def reach(self, leaves: list[torch.Tensor], record: int) -> None:
        """Add the tensors to which the backward pass of a loss leads.

        Args:
            leaves: these tensors.
            record: a number that differs between records.
        """
        with quiet():
            for tensor in () if self.over else leaves[:_MOST_LEAVES]:
                known = self._seen.get(id(tensor))
                if known is None or known.tensor() is not tensor:  # else another one had this id
                    self._replace(known)
                    known = self._seen[id(tensor)] = _Leaf(weakref.ref(tensor), _part_of(tensor))
                    known.shape = [*tensor.shape] if isinstance(tensor, nn.Parameter) else None
                known.records.add(record)
            own: list[weakref.ref[torch.Tensor]] = [
                weakref.ref(t) for t in leaves if isinstance(t, nn.Parameter)
            ]
            if own and not self.over:
                self._losses.append(own)

    def _replace(self, leaf: _Leaf | None) -> None:
        """Store a leaf of whose id another tensor makes use."""
        if leaf is not None and leaf.shape is not None:
            self._gone.append(leaf)

    def untrained(self, holds: Callable[[torch.Tensor], bool]) -> list[tuple[int, list[list[int]]]]:
        """Return the losses none of whose parameters any optimizer holds: number and shapes.

        A model must hold them all: the parameters of sharded models are replaced while they run.
        Optimizers that have not stepped yet count too, and so do the program's own updates. A loss
        of copies of trained parameters, as in meta-learning, trains those by other means. To be
        called before `outside`, which ends the search.
        """
        losses, self._losses = self._losses, []
        found: list[tuple[int, list[list[int]]]] = []
        for references in losses:
            tensors = [t for reference in references if (t := reference()) is not None]
            trained = any(id(tensor) in self._others or self._moved(tensor) for tensor in tensors)
            if trained or len(tensors) != len(references) or not all(map(holds, tensors)):
                continue
            if not found:  # searching all objects takes time
                for optimizer in instances_of(torch.optim.Optimizer):
                    self.hold(optimizer)
            parts = [(tuple(tensor.shape), _part_of(tensor)) for tensor in tensors]
            if any(id(tensor) in self._others for tensor in tensors) or self._copied(parts):
                continue
            found.append((len(tensors), [[*tensor.shape] for tensor in tensors[:3]]))
        return found

    def _moved(self, tensor: torch.Tensor) -> bool:
        """Whether the program has changed a tensor since it was first seen."""
        known = self._seen.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.part is None:
            return False
        with quiet():
            part = _part_of(tensor)
            return part is not None and not torch.equal(part, known.part)

    def _copied(self, parts: list[tuple[tuple[int, ...], torch.Tensor | None]]) -> bool:
        """Whether a tensor, given by shape and part, began as a copy of an optimized one."""
        held: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for reference in self._held.values():
            known = reference()
            part = None if known is None else _part_of(known)
            if known is not None and part is not None and part.numel() == _PART:
                held.setdefault(tuple(known.shape), []).append(part)
        return any(
            part is not None and any(_is_near(part, other) for other in held.get(shape, ()))
            for shape, part in parts
        )

    def recreated(self) -> list[list[int]]:
        """Return the shapes of parameters that existed in the first record only.

        Parameters of a layer that is created in every forward pass exist only until the backward
        pass has ended. Perturbations of an input have its shape; copies of a model, as in
        meta-learning, begin with its values. Afterwards, the search has ended.
        """
        gone, self._gone = self._gone, []
        shapes = [leaf.shape for leaf in gone if leaf.shape is not None]
        with quiet():
            copied = self._copied([(tuple(leaf.shape or ()), leaf.part) for leaf in gone])
        self._held = {}
        return [] if copied else [shape for shape in shapes if tuple(shape) not in self.shapes]

    def outside(self, holds: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
        """Return tensors that keep their values although they have gradients; then end the search.

        They are behind losses of several records, but no model and no optimizer holds them, and
        the program has not changed them itself.
        """
        leaves, self._seen, self.over = self._seen, {}, True
        others, self._others = self._others, set()
        for at, leaf in leaves.items():
            if leaf.tensor() is None and at not in others:
                self._replace(leaf)
        alive = ((leaf, leaf.tensor()) for leaf in leaves.values() if len(leaf.records) > 1)
        with quiet():
            return [
                tensor
                for leaf, tensor in alive
                if tensor is not None
                and id(tensor) not in others
                and tensor.grad is not None
                and not holds(tensor)
                and leaf.part is not None
                and (part := _part_of(tensor)) is not None
                and torch.equal(part, leaf.part)
            ]


@dataclass
class _Leaf:
    tensor: weakref.ref[torch.Tensor]
    part: torch.Tensor | None  # some of its values when it was first seen
    records: set[int] = field(default_factory=set)
    shape: list[int] | None = None  # of a parameter


def _part_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of the first elements; None if they cannot be read."""
    if not is_readable(tensor) or not is_allocated(tensor):
        return None
    return tensor.detach().flatten()[:_PART].clone()


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the elements of two tensors point in nearly the same direction."""
    if one.numel() != other.numel() or one.device != other.device:
        return False
    first, second = one.to(torch.float32), other.to(torch.float32)
    size = float(first.norm() * second.norm())
    return size > 0 and float(first @ second) > _NEAR * size


def input_role(path: str) -> str:
    """Return the role of an argument: the first positional one is the input."""
    return "input" if path == "[0]" else f"input{path}"
