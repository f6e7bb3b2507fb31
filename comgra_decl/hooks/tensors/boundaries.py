"""Records where a step begins and ends: the inputs of its models, its losses, and its targets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks.graph.attended import Attended
from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.hooks.tensors.gradients import loss_node
from comgra_decl.hooks.tensors.loss_calls import batch_softmaxes
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.hooks.tensors.targets import Targets

if TYPE_CHECKING:
    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.hooks.tensors.recorder import TensorRecorder
    from comgra_decl.spec import Spec


_SCANS = 2
"""Number of records in which the backward graph is searched for softmaxes over the batch. The graph
rarely changes."""


class Ends:
    """Records tensors that no module returns. They are always recorded, as every graph needs them.

    Args:
        spec: decides whether values and gradients are stored.
        recorder: reads gradients.
        on_fault: called with an error in tracing itself.
    """

    def __init__(
        self, spec: Spec, *, recorder: TensorRecorder, on_fault: Callable[[BaseException], None]
    ) -> None:
        entries = spec.nodes.values()
        self._values = any(entry.values for entry in entries)
        self._gradients = any({"output_grad", "input_grad"} & {*e.capture} for e in entries)
        self._recorder = recorder
        self._inputs: dict[tuple[str, int], Slot] = {}
        self._losses: dict[tuple[str, int], Slot] = {}
        self._scans = _SCANS
        self._attended = Attended()
        self.targets = Targets(on_fault=on_fault)

    def read_inputs(
        self, capture: StepCapture, args: Any, kwargs: dict[str, Any], graph: Provenance | None
    ) -> None:
        """Reads the inputs of a model, which cannot be targets."""
        given = [*tensors_in(args), *tensors_in(kwargs)] if kwargs else tensors_in(args)
        self.targets.know_all(given)
        if graph is not None and self._scans:
            self._attend(graph, args, kwargs)
        iteration = capture.iteration("input", "input")
        if iteration is None:
            return
        for path, tensor in given:
            if gradient_function(tensor) is not None:  # computed by another part of the model
                continue
            slot = capture.in_pass(self.input_slot(input_role(path), iteration))
            dim = capture.batch_dim(tensor, "auto", slot)
            index = capture.add(slot, tensor, batch_dim=dim, values=self._values)
            if graph is not None and graph.enters(tensor):
                graph.trace(slot, tensor)
            if index is not None and self._gradients and tensor.requires_grad:
                self._recorder.watch(slot, tensor, capture, batch_dim=dim, values=self._values)

    def look_for_targets(
        self,
        capture: StepCapture,
        returned: Any,
        graph: Provenance | None,
        *,
        within_compiled: bool,
    ) -> None:
        """Starts looking for targets after a model has returned."""
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
        """Reads a loss on which `backward()` was called; `loss` is the value before AMP scaling."""
        pass_ = capture.backwards.name()
        number = capture.count("loss")
        node = loss_node(pass_)
        iteration = capture.iteration(pass_, node)
        if capture.categories is not None:
            capture.categories.loss(backwarded)
        if capture.probing is not None:
            capture.probing.loss(backwarded)
        if self._scans and capture.batch_size and number == 0:
            self._scans -= 1
            capture.batch_softmaxes = batch_softmaxes(backwarded, capture.batch_size)
            capture.attentions = self._attended.take()
        if iteration is None:
            return
        slot = self._loss(node, iteration)
        index = capture.add(slot, loss, batch_dim=None, values=False)
        if index is not None and loss.numel() == 1:
            capture.kpi_tensors["loss" if number == 0 else f"loss[{number}]"] = index
        if graph is not None:
            graph.trace(slot, backwarded)

    def _attend(self, graph: Provenance, args: Any, kwargs: dict[str, Any]) -> None:
        """Lets the graph collect facts about the attention of the model that is called."""
        graph.attended = self._attended
        for _, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            whole = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
            if whole and tensor.dim() == 2 and self._attended.tokens is None:
                self._attended.tokens = weakref.ref(tensor)

    def input_slot(self, role: str, iteration: int) -> Slot:
        """Returns the slot of an input of a model; `iteration` counts the models of a step."""
        slot = self._inputs.get((role, iteration))
        if slot is None:
            slot = Slot(lambda: "input", role, iteration=iteration, kind="input")
            self._inputs[role, iteration] = slot
        return slot

    def _loss(self, node: str, iteration: int) -> Slot:
        slot = self._losses.get((node, iteration))
        if slot is None:
            slot = Slot(lambda: node, "output", iteration=iteration, kind="loss")
            self._losses[node, iteration] = slot
        return slot


def input_role(path: str) -> str:
    """Returns the role of an argument: the first positional one is the input."""
    return "input" if path == "[0]" else f"input{path}"
