"""Targets: tensors that enter a loss and were not computed by the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from comgra_decl.hooks import modes
from comgra_decl.hooks.call_context import is_no_step
from comgra_decl.hooks.graph.lineage import storage_id
from comgra_decl.hooks.limits import is_capturing
from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.pytree import gradient_function, tensors_of
from comgra_decl.hooks.tensors.arrangement import other_rows, paired_ends
from comgra_decl.hooks.tensors.loss_calls import (
    form_of,
    likeness,
    origin_of,
    parameter_names,
    plain_arguments,
    target_argument,
)
from comgra_decl.hooks.tensors.objective import is_bootstrapped
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.hooks.tensors.turned import turned_maps
from comgra_decl.records import LOSS_CALLS, PREDICTION, TELLING
from comgra_decl.stats.quiet import quiet
from comgra_decl.stats.support import is_readable, version_of
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.graph.provenance import Provenance
    from comgra_decl.hooks.tensors.capture import StepCapture

_SHAPE_ONLY = ("_like", "new_", "_as")
"""Calls that use only the shape or dtype of a tensor."""
_NOISE = ("rand", "normal", "bernoulli", "multinomial", "poisson", "exponential_", "uniform_")
_MOST_CALLS = 16
"""Maximum number of calls per record whose facts are stored; a step rarely has more losses."""
_MOST_ALIGNED = 4
_MOST_TURNED = 6
_MOST_CLASSES = 64
"""Maximum number of classes whose weights are stored as facts about a loss call."""
_MOST_KNOWN = 256
"""Maximum number of calls whose facts are kept for later records. It is limited because sizes may
keep changing."""
_WITHOUT_RESULT = frozenset({"backward", "register_hook", "_record_function_enter_new"})
"""Frequent calls whose results contain no tensors, so that no check is needed."""


class Targets(modes.OwnMode):
    """Finds targets between a model's return and the next model call or optimizer step.

    In this interval, a tensor is a target if a call combines it with something that the model
    computed with gradients, and if it was neither computed by the model nor passed to it. For a
    loss function, the signature identifies the target argument, which may also be an integer input,
    such as the tokens of a language model, or a part of one. For any other call, the target is a
    tensor of numbers that has as many rows as the computed tensor. Tensors that the program has
    just created, such as noise, `torch.eye` or a mask, are not targets.

    The function mode intercepts only these few calls, not the calls within the model.

    Args:
        on_fault: called with an error in tracing itself.
    """

    def __init__(self, *, on_fault: Callable[[BaseException], None]) -> None:
        super().__init__(on_fault)
        self._tokens: dict[int, weakref.ref[torch.Tensor]] = {}  # integer inputs, and parts of them
        self._images: dict[int, weakref.ref[torch.Tensor]] = {}  # inputs with four dimensions
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}  # from the model, or already targets
        self._named: dict[int, weakref.ref[torch.Tensor]] = {}  # by the program
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}  # constants and noise of this step
        # by the model, or passed to it: not looked up yet, and by storage
        self._shown: list[weakref.ref[torch.Tensor]] = []
        self._returned: dict[int, weakref.ref[torch.Tensor]] = {}
        # number of each target of this step, and its version when it was read, by id
        self._taken: dict[int, tuple[int, int]] = {}
        self._facts: dict[Hashable, dict[str, Any]] = {}  # of earlier calls, by their key
        self._slots: list[Slot] = []
        self._predictions: list[Slot] = []
        self._capture: StepCapture | None = None
        self._waiting: StepCapture | None = None  # the step to continue with
        self._graph: Provenance | None = None
        self._count = 0
        self._turned = 0  # number of targets that were compared with images
        self._chosen = 0  # number of predictions whose rows were compared with those of targets
        self._aligned = 0  # number of targets whose rows were compared with those of the tokens
        self._values = False
        self._inserted = False

    # -- when to look --------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop looking during a model call."""
        if self._inserted:
            self._capture = None
            modes.remove(self)
            self._inserted = False  # last, so that ending the tracing cleans up after an error

    def interrupt(self) -> None:
        """Stop looking during a call to a model that may not be trained, such as a teacher."""
        if self._capture is not None:
            self._waiting = self._capture
        self.pause()

    def rest(self) -> None:
        """Stop looking until a model that is being trained is called again."""
        self.pause()
        self._waiting = None

    def resume(self) -> None:
        """Resume looking after the call that interrupted it."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.open:
            self.look(waiting, self._graph, values=self._values)

    def wait(self, capture: StepCapture, *, values: bool) -> None:
        """Prepare for targets from a compiled function, which reports them itself."""
        self._waiting, self._values = capture, values

    def shown(self, tensor: torch.Tensor) -> None:
        """Record a target found in compiled code."""
        if self._waiting is not None and self._waiting.open:
            self._take(self._waiting, tensor)

    def know(self, value: Any) -> None:
        """Exclude the inputs or outputs of a model."""
        for tensor in tensors_of(value if type(value) is tuple else (value,)):
            reference = self._known[id(tensor)] = weakref.ref(tensor)
            self._shown.append(reference)

    def give(self, value: Any) -> None:
        """Exclude the inputs of a model, except that a loss may have tokens as its target."""
        self.know(value)
        given = tensors_of(value if type(value) is tuple else (value,))
        _note(self._tokens, (t for t in given if not t.is_floating_point()))
        if self._turned < _MOST_TURNED:
            _note(self._images, (t for t in given if t.is_floating_point() and t.dim() == 4))

    def know_named(self, value: Any) -> None:
        """Exclude tensors that the program has named, possibly before any model call."""
        _note(self._named, tensors_of((value,)))

    def look(self, capture: StepCapture, graph: Provenance | None, *, values: bool) -> None:
        """Start looking for targets after a model has returned."""
        self._graph, self._values = graph, values
        self._capture, self._waiting = capture, None
        if not self._inserted:
            self._inserted = True
            modes.insert_at_bottom(self)

    def stop(self) -> None:
        """End the step."""
        self.begin()
        self._named.clear()

    def begin(self) -> None:
        """Reset the state when the first model of a step is called."""
        self.rest()
        self._known.clear()
        self._tokens.clear()
        self._images.clear()
        self._shown.clear()
        self._returned.clear()
        self._taken.clear()
        self._made.clear()
        self._graph = None
        self._count = 0

    # -- calls ---------------------------------------------------------------------------------

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call and record the targets among its arguments."""
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _WITHOUT_RESULT or self._capture is None:
            return result
        try:
            if self._capture.open and self.thread == this_thread.number and not is_no_step():
                with without_functions():
                    met = [*self.met(func, args, kwargs, result)]
                    taken = [(tensor, self._take(self._capture, tensor)) for tensor in met]
                    self._describe(self._capture, func, args, kwargs, taken)
        except Exception as error:
            self._capture = None
            self._on_fault(error)
        return result

    def met(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> Iterator[torch.Tensor]:
        """Yield the targets among the arguments of a call; torch function modes must be off."""
        name = getattr(func, "__name__", "")
        results = tensors_of((result,))
        if not results:
            return
        inputs = tensors_of((*args, *kwargs.values()))
        if not inputs or _only_makes(name):
            _note(self._made, (t for t in results if not t.requires_grad))
            return
        computed = [tensor for tensor in inputs if gradient_function(tensor) is not None]
        if computed and any(tensor.requires_grad for tensor in results):
            for tensor in self._candidates(func, args, kwargs, inputs, computed):
                _note(self._known, [tensor])
                yield tensor
        derived = [tensor for tensor in results if gradient_function(tensor) is None]
        if derived and (computed or any(_is_in(self._known, t) for t in inputs)):
            _note(self._known, derived)
            if all(_is_in(self._tokens, t) for t in inputs):
                _note(self._tokens, derived)
        elif derived and all(_is_in(self._made, t) for t in inputs):
            _note(self._made, derived)

    def _candidates(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        computed: list[torch.Tensor],
    ) -> Iterator[torch.Tensor]:
        declared = target_argument(func)
        if declared is not None:
            name, position = declared
            value = args[position] if len(args) > position else kwargs.get(name)
            given = tensors_of((value,))
            yield from (t for t in given if self._could_be(t) or self._are_tokens(t))
            return
        rows = {
            tensor.size(0) for tensor in computed if tensor.dim()
        }  # nested tensors have no `shape`
        for tensor in inputs:
            if (
                tensor.dim()
                and tensor.size(0) in rows
                and tensor.dtype is not torch.bool
                and self._could_be(tensor)
                and not _is_in(self._made, tensor)
            ):
                yield tensor

    def _could_be(self, tensor: torch.Tensor) -> bool:
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
            return False
        if _is_in(self._named, tensor):
            return False
        if not _is_in(self._known, tensor):
            return True
        taken = self._taken.get(id(tensor))  # programs fill one tensor with different labels
        return taken is not None and taken[1] != version_of(tensor)

    def _are_tokens(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor consists of integer inputs, and is not yet a target."""
        named = _is_in(self._named, tensor)
        return not named and id(tensor) not in self._taken and _is_in(self._tokens, tensor)

    def _describe(
        self,
        capture: StepCapture,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        met: list[tuple[torch.Tensor, int | None]],
    ) -> None:
        """Record a prediction, and the facts about the call that compares it with a target.

        If the model returned the prediction, in any shape, the prediction has already been read.
        """
        declared = target_argument(func)
        if not met and declared is not None:  # another loss of the same target, or a soft target
            name, position = declared
            value = args[position] if len(args) > position else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                known = self._taken.get(id(value))
                met = [(value, None if known is None else known[0])]
        if not met or len(capture.facts[LOSS_CALLS]) >= _MOST_CALLS:
            return
        target, number = met[0]
        given = [t for t in tensors_of((*args, *kwargs.values())) if t is not target]
        prediction = next((t for t in given if gradient_function(t) is not None), None)
        if prediction is None and declared is not None:
            self._see_detached(capture, func, given, target)
        if prediction is None or (number is None and declared is None):
            return
        self._compare_rows(capture, prediction, target)
        at = len(capture.facts[LOSS_CALLS])
        read = at if self._read_prediction(capture, prediction, at) else None
        like = likeness(func, args, kwargs, prediction, target)
        weights = _class_weights(func, args, kwargs) if len(given) > 1 else []
        key: Hashable = None if like is None else (like, read, number)
        facts = self._facts.get(key)
        if facts is not None and facts.get("weights", []) != weights:
            weights, key = [], (key, "other weights")  # one more call, not one per record
            facts = self._facts.get(key)
        if facts is None:
            facts = {
                **({"weights": weights} if weights else {}),
                "function": getattr(func, "__name__", type(func).__name__),
                "arguments": plain_arguments(func, args, kwargs),
                "prediction": {**form_of(prediction), **origin_of(prediction), "slot": read},
                "target": {**form_of(target), "slot": number},
            }
            if key is not None:
                if len(self._facts) >= _MOST_KNOWN:
                    self._facts.clear()
                self._facts[key] = facts
        capture.facts[LOSS_CALLS].append(facts)

    def _compare_rows(
        self, capture: StepCapture, prediction: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Store whether rows of a prediction are compared with the targets of other rows."""
        if self._chosen >= _MOST_ALIGNED or is_capturing() or not target.dim():
            return
        self._chosen += 1
        with quiet():
            wrong = other_rows(prediction, target)
        if wrong:
            fact = {"kind": "other rows", "rows": len(target), "wrong": wrong}
            capture.facts[TELLING].append(fact)

    def _see_detached(
        self, capture: StepCapture, func: Any, given: list[torch.Tensor], target: torch.Tensor
    ) -> None:
        """Store that a prediction is detached while its bootstrapped target has a gradient."""
        detached = [t for t in given if _is_in(self._known, t) and t.shape == target.shape]
        if detached and len(capture.facts[TELLING]) < _MOST_CALLS and is_bootstrapped(target):
            name = getattr(func, "__name__", type(func).__name__)
            fact = {"kind": "detached prediction", "function": name, "shape": [*target.shape]}
            capture.facts[TELLING].append(fact)

    def _read_prediction(self, capture: StepCapture, prediction: torch.Tensor, number: int) -> bool:
        if self._is_returned(prediction):
            return False
        slot = _numbered(self._predictions, number, PREDICTION, "output", "computed")
        dim = capture.batch_dim(prediction, "auto", slot)
        if capture.add(slot, prediction, batch_dim=dim, values=self._values) is None:
            return False
        if self._graph is not None:
            self._graph.trace(slot, prediction)
        return True

    def _is_returned(self, tensor: torch.Tensor) -> bool:
        """Whether a model returned the tensor, possibly in another shape."""
        if any(known() is tensor for known in self._shown):  # the usual case
            return True
        for reference in self._shown:
            shown = reference()
            if shown is not None:
                self._returned[storage_id(shown)] = reference
        self._shown.clear()
        known = self._returned.get(storage_id(tensor))
        whole = None if known is None else known()
        return whole is not None and whole.numel() == tensor.numel()

    def _take(self, capture: StepCapture, tensor: torch.Tensor) -> int | None:
        """Record a target and return its number, or None if the tensor is not a target.

        The target is added to the graph before the call that uses it is followed.
        """
        # The inputs and targets of a language model are often slices of one tensor.
        if self._graph is not None and self._graph.is_computed(tensor):
            return None  # created inside the model, on a path that only the graph records
        number = self._count
        slot = _numbered(self._slots, number, "target", "target", "target")
        self._count += 1
        self._taken[id(tensor)] = number, version_of(tensor)
        if capture.probing is not None:
            capture.probing.target(tensor)
        self.compare_ends(capture, tensor)
        self._compare_turns(capture, tensor, number)
        shown = self._by_sample(tensor, capture.batch_size)
        dim = capture.batch_dim(shown, "auto", slot)
        if capture.add(slot, shown, batch_dim=dim, values=self._values) is None:
            return number
        if self._graph is not None:
            self._graph.trace(slot, tensor)
        return number

    def compare_ends(self, capture: StepCapture, target: torch.Tensor) -> None:
        """Store whether the rows of a target end where those of the tokens end.

        Args:
            capture: the step.
            target: a target, or an input that is passed together with the tokens.
        """
        if self._aligned >= _MOST_ALIGNED or target.dtype is not torch.int64:
            return
        if not is_readable(target) or target.dim() != 2 or min(target.shape) < 4:
            return
        given = [known() for known in self._tokens.values()]
        alike = [t for t in given if t is not None and t is not target and t.shape == target.shape]
        tokens = [t for t in alike if t.dtype is not torch.bool and is_readable(t)]
        if not tokens or is_capturing():
            return
        self._aligned += 1
        with quiet():
            found = [fact for t in tokens if (fact := paired_ends(t, target)) is not None]
        if found:
            fact = min(found, key=lambda fact: fact["beyond"])
            capture.facts[TELLING].append({"kind": "row ends", "shape": [*target.shape], **fact})

    def _compare_turns(self, capture: StepCapture, target: torch.Tensor, number: int) -> None:
        """Store how many images fit their target map only if it is turned."""
        if self._turned >= _MOST_TURNED or target.dim() not in (3, 4) or is_capturing():
            return
        images = [known() for known in self._images.values()]
        with quiet():
            found = [f for x in images if x is not None and (f := turned_maps(x, target))]
        self._turned += bool(found)
        for fact in found[:1]:
            capture.facts[TELLING].append({"kind": "turned", "target": number, **fact})

    def _by_sample(self, tensor: torch.Tensor, batch: int | None) -> torch.Tensor:
        """Return a flat target of a sequence model as [samples, positions]; others unchanged.

        Without samples, a batch of long sequences would exceed `values.max_elements`.
        """
        if tensor.dim() != 1 or not batch or not batch < tensor.numel() or tensor.is_nested:
            return tensor
        if tensor.is_floating_point() or tensor.numel() % batch:
            return tensor
        positions = tensor.numel() // batch
        given = [known() for known in self._tokens.values()]
        shapes = {t.shape for t in given if t is not None and t.dim() == 2 and t.shape[0] == batch}
        # the last position has no next token, and programs often leave it out
        if any(shape[1] - 1 <= positions <= shape[1] for shape in shapes):
            return tensor.view(batch, positions) if tensor.is_contiguous() else tensor
        return tensor


def _class_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Return the class weights passed to a loss, if they are in host memory."""
    passed = {**dict(zip(parameter_names(func), args, strict=False)), **kwargs}
    given = passed.get("pos_weight")
    given = passed.get("weight") if given is None else given
    if not isinstance(given, torch.Tensor) or given.device.type != "cpu" or given.requires_grad:
        return []
    return given.reshape(-1).tolist() if 0 < given.numel() <= _MOST_CLASSES else []


def _numbered(slots: list[Slot], number: int, node: str, role: str, kind: str) -> Slot:
    """Return the slot of the n-th target or prediction of a step."""
    while len(slots) <= number:
        slots.append(Slot(lambda: node, role, iteration=len(slots), kind=kind))
    return slots[number]


@lru_cache(maxsize=512)
def _only_makes(name: str) -> bool:
    """Whether a call with this name does not use the values of its tensors."""
    return name.startswith(_NOISE) or any(part in name for part in _SHAPE_ONLY)


def _note(where: dict[int, weakref.ref[torch.Tensor]], tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        where[id(tensor)] = weakref.ref(tensor)


def _is_in(where: dict[int, weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> bool:
    known = where.get(id(tensor))
    return known is not None and known() is tensor
