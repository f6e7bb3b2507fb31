"""Find the losses on which `backward()` is called, in every step or only in recorded ones.

`torch.autograd.backward` has no hook. While losses are logged, a wrapper around this function is
the only part of tracing that remains in place between recorded steps. Between those steps, it costs
a few tests and one call.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from comgra_decl.hooks.other_threads import this_thread
from comgra_decl.hooks.patches import Patch, run_natively
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.hooks.scalars.numbers import read_number
from comgra_decl.torch_private import function_modes, graph_task, without_functions

_Scaled = tuple[weakref.ref[torch.Tensor], torch.Tensor]

_PARAMETERS = (
    "tensors",
    "grad_tensors",
    "retain_graph",
    "create_graph",
    "grad_variables",
    "inputs",
)
"""The parameters of `torch.autograd.backward` that this wrapper supports."""

_is_compiling = torch.compiler.is_dynamo_compiling


class LossWatch:
    """Reports every tensor on which the program calls `backward()`, before it runs.

    `Tensor.backward` looks up `torch.autograd.backward` at each call, so one wrapper covers both.
    Under mixed precision, `backward()` is called on the loss times the gradient scale; the loss
    itself is the tensor that the program passed to `GradScaler.scale`.

    Args:
        each: called with the loss at every `backward`, recorded or not, in the form that
            `read_number` returns, or in nested lists if the tensor has dimensions. None to skip
            this. Must not raise.
        together: a lock held during all callbacks.
        on_fault: called with an error in tracing itself.

    Attributes:
        thread: the thread in which `each` may be called without further checks; 0 if none.
    """

    _on_loss: Callable[[torch.Tensor, torch.Tensor], object]
    _on_done: Callable[[bool], object]
    _on_thread: Callable[[Any], bool]

    def __init__(
        self,
        each: Callable[[object], None] | None,
        *,
        together: AbstractContextManager[Any],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._each = each
        self._together = together
        self._on_fault = on_fault
        self._before: Callable[[Any], None] | None = None
        self._recording = False
        self._timer: Callable[[bool], None] | None = None
        self._own: Callable[[], AbstractContextManager[Any]] | None = None
        self.thread = 0
        self._scaled: dict[int, _Scaled] = {}  # the last scaled loss, by thread
        self._inside: set[int] = set()  # by thread; function modes split one call into several
        self._hurry: Callable[[int], None] = lambda _: None
        self._patches = (
            Patch(torch.autograd, "backward", whole=self._new_backward),
            Patch(torch.amp.GradScaler, "scale", self._scale),
        )
        run_natively(self._scale, within=False)
        run_natively(self._expect, self._forget_scaled)

    def connect(
        self,
        *,
        on_loss: Callable[[torch.Tensor, torch.Tensor], object],
        on_done: Callable[[bool], object],
        on_thread: Callable[[Any], bool],
    ) -> None:
        """Set the callbacks, before `start`.

        Args:
            on_loss: called with (loss, the tensor on which `backward` was called) while a step is
                recorded.
            on_done: called after `backward` with True if it computed the gradients of all tensors
            that it reached.
            on_thread: called with the argument of `backward`; returns whether this thread's step is
                the one that may be recorded.
        """
        self._on_loss, self._on_done, self._on_thread = on_loss, on_done, on_thread

    def start(self) -> None:
        """Start reporting the losses in every step, if `each` is set."""
        if self._each is not None:
            self._apply()

    def stop(self) -> None:
        """Stop watching and release the last loss."""
        self._each = self._before = None
        self.record(False)

    def announce(self, before: Callable[[Any], None] | None) -> None:
        """Set a callback that receives the argument of each `backward` before it runs, or None."""
        self._before = before
        if before is not None:
            self._apply()
            self._settle()
        else:
            self.record(self._recording)

    def record(self, recording: bool) -> None:
        """Set whether steps are recorded from this call on."""
        self._recording = recording
        if recording:
            self._apply()
        elif self._each is None and self._before is None and self._timer is None:
            for patch in self._patches:
                patch.restore()
        if not recording:
            self._scaled.clear()
        self._settle()

    def _apply(self) -> None:
        for patch in self._patches:
            patch.apply()

    def time(
        self,
        timer: Callable[[bool], None] | None,
        *,
        own: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """Set a function that is called with True before and False after each `backward`.

        Args:
            timer: the function; None for none.
            own: returns a context for the work that tracing itself does before `backward`; None
                for none.
        """
        self._timer, self._own = timer, own
        if timer is not None:
            self._apply()
            self._settle()
        else:
            self.record(self._recording)

    def follow(self, thread: int) -> None:
        """Set the thread that calls `backward`; 0 if unknown."""
        if thread != self.thread:
            self.thread = thread
            self._settle()

    def _expect(self, scaled: _Scaled) -> None:
        for thread, earlier in [*self._scaled.items()]:  # scaled by a thread that ended since
            if earlier[0]() is None:
                del self._scaled[thread]
        self._scaled[this_thread.number] = scaled
        self._settle()

    def _forget_scaled(self) -> _Scaled | None:
        """Return and remove the last loss that this thread has scaled."""
        if not self._scaled:
            return None
        scaled = self._scaled.pop(this_thread.number, None)
        self._settle()
        return scaled

    def _scaled_elsewhere(self, tensors: list[torch.Tensor]) -> _Scaled | None:
        """Return a loss scaled by another thread, if `backward` is called on it."""
        for thread, scaled in [*self._scaled.items()]:
            if any(scaled[0]() is tensor for tensor in tensors):
                del self._scaled[thread]
                self._settle()
                return scaled
        return None

    def _settle(self) -> None:
        """Set the thread in which the wrapper only has to call `each`."""
        closely = self._recording or self._each is None or self._scaled or self._inside
        watched = self._before is not None or self._timer is not None
        self._hurry(0 if closely or watched else self.thread)

    # -- the wrappers --------------------------------------------------------------------------

    def _new_backward(self, original: Callable[..., Any], on: list[bool]) -> Callable[..., Any]:
        if self._each is None or tuple(inspect.signature(original).parameters) != _PARAMETERS:
            return self._any_backward(original, on)
        return self._quick_backward(original, on, self._each)

    def _any_backward(self, original: Callable[..., Any], on: list[bool]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if (
                _is_compiling()
                or not on[0]
                or graph_task() != -1
                or this_thread.number in self._inside
            ):
                return original(*args, **kwargs)
            return self._backward(original, *args, **kwargs)

        run_natively(backward, self._backward, within=False)
        run_natively(self._begins, self._ends)
        return backward

    def _quick_backward(
        self, original: Callable[..., Any], on: list[bool], each: Callable[[object], None]
    ) -> Callable[..., Any]:
        """Return the wrapper that remains in place in every step.

        When it runs, its data is no longer in the CPU caches, so every unnecessary access is
        measurable.
        """
        inside, plain, quick = self._inside, torch.Tensor, 0

        def hurry(thread: int) -> None:
            nonlocal quick
            quick = thread

        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: Any = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> Any:
            if (
                not _is_compiling()  # first, because compiled code is guarded on what it reads
                and quick == this_thread.number
                and type(tensors) is plain
                and grad_tensors is None  # so it has one element, or `backward` raises
                and not function_modes()
                and tensors.is_cpu
                and graph_task() == -1
            ):
                try:
                    each(tensors.tolist())  # unlike `item`, skips the dispatcher and keeps the GIL
                except (RuntimeError, TypeError, ValueError):  # no storage, or inside a transform
                    each(None)
                return original(
                    tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
                )
            given = tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            if _is_compiling() or not on[0] or graph_task() != -1 or this_thread.number in inside:
                return original(*given)
            return self._backward(original, *given)

        run_natively(backward, self._backward, within=False)
        run_natively(self._begins, self._ends)
        self._hurry(0)  # called through an earlier wrapper that the program stored
        self._hurry = hurry
        self._settle()
        return backward

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recording = False
        thread = this_thread.number
        self._inside.add(thread)
        try:
            given, own = args[0] if args else kwargs.get("tensors"), self._own
            if own is None:
                recording = self._begins(given)
            else:
                with own():
                    recording = self._begins(given)
        except Exception as error:
            self._on_fault(error)
        whole = False
        timer = self._timer
        try:
            if timer is not None:
                timer(True)
            result = original(*args, **kwargs)
            whole = dict(zip(_PARAMETERS, args, strict=False), **kwargs).get("inputs") is None
        finally:
            if timer is not None:
                timer(False)
            self._inside.discard(thread)
            try:
                self._ends(recording, whole=whole)
            except Exception as error:
                self._on_fault(error)
        return result

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Ignore `backward` calls within the context, because tracing itself makes them."""
        thread = this_thread.number
        self._inside.add(thread)
        try:
            yield
        finally:
            self._inside.discard(thread)

    def _begins(self, tensors: Any) -> bool:
        """Report a `backward` call; return whether it belongs to a recorded step."""
        self._settle()
        with self._together:
            followed = self._on_thread(tensors)
            if self._before is not None:
                self._before(tensors)  # a step may end, and another begin
            recording = followed and self._recording
            self._tell(tensors, recording)
        return recording

    def _ends(self, recording: bool, *, whole: bool) -> None:
        self._settle()
        if recording:
            with self._together:
                self._on_done(whole)

    def _tell(self, tensors: Any, recording: bool) -> None:
        for loss, tensor in self._losses(tensors):
            if recording:
                self._on_loss(loss, tensor)
            if self._each is not None:
                self._each(read_number(loss))

    def _losses(self, tensors: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        found = tensors_in(tensors)
        scaled = self._forget_scaled() or self._scaled_elsewhere([tensor for _, tensor in found])
        for _, tensor in found:
            known = scaled is not None and scaled[0]() is tensor
            yield scaled[1] if scaled is not None and known else tensor, tensor

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        result = original(scaler, outputs)
        if isinstance(outputs, torch.Tensor) and outputs is not result:
            try:
                with without_functions():
                    # Between recorded steps, tracing must not keep the graph of the loss alive.
                    loss = outputs if self._recording else outputs.detach()
                    self._expect((weakref.ref(result), loss))
            except Exception as error:
                self._on_fault(error)
        return result
