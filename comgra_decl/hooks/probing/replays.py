"""What it takes to repeat a recorded step: its batch, the random numbers, and the optimizer."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from comgra_decl.errors import ProbeError, reason_of
from comgra_decl.hooks.compiled.stance import anything_compiled
from comgra_decl.hooks.probing.copying import unwrapped
from comgra_decl.hooks.probing.packing import packed
from comgra_decl.hooks.tensors.capture import StepCapture
from comgra_decl.hooks.tensors.slots import Slot
from comgra_decl.records import PROBE_MODE, REPLAY, RawStep, StepInfo
from comgra_decl.stats import Reducer
from comgra_decl.torch_private import without_functions

if TYPE_CHECKING:
    from comgra_decl.hooks.plans import TopPlan
    from comgra_decl.hooks.tensors.slots import SlotTable

ANY_SIZE = 1 << 62

_COMPILED = (
    "the program uses torch.compile, and compiled code can round differently when it is run again. "
    "Record the run without torch.compile (TORCH_COMPILE_DISABLE=1) to replay its steps"
)
_SEVERAL = (
    "the step trains several models ({} and {}), whose order only the program knows. Make them "
    "modules of one model that is called once"
)
_PARTS = (
    "the step calls parts of {} separately. Call them in the `forward` of one module, and call that"
)
_OPTIMIZERS = (
    "the step has more than one optimizer step. Use one optimizer with several parameter groups"
)
_CLOSURE = (
    "the optimizer calls the model itself (`optimizer.step(closure)`), several times in one step. "
    "Only steps with one `optimizer.step()` can be replayed"
)
_BY_HAND = "no torch optimizer ends the step. Update the parameters with one"
_DEVICE = (
    "the generator of a {} device cannot be read. Only steps on the CPU and on CUDA can be replayed"
)
_CAPTURED = "the step is captured as a CUDA graph, in which generators cannot be read"


class Replays:
    """Stores what `comgra.replay` needs, for steps with a checkpoint and the steps that follow.

    Everything is read when it is used: arguments and generators before the model runs, targets
    when the loss gets them, the optimizer before it steps. If a step cannot be replayed, the reason
    is stored instead, and reported once.

    Args:
        steps: how many steps to keep from each checkpoint on, including its own.
        warn: called with the reason why steps cannot be replayed.

    Attributes:
        following: how many of the next steps are kept as well.
    """

    def __init__(self, steps: int, *, warn: Callable[[str], None]) -> None:
        self._steps = steps
        self._warn = warn
        self.following = 0
        self._refused: str | None = None  # for all further steps
        self._node = ""  # of the model; "" before it is called in a step
        self._module = 0  # its id
        self._model: weakref.ref[nn.Module] | None = None
        self._closure = False  # whether an optimizer calls a function, perhaps the model
        self._whole = False  # whether the optimizer's state is part of it
        self._facts: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._slots: dict[tuple[str, str], Slot] = {}
        self.nbytes = 0
        self._compiled = anything_compiled()  # before the session, perhaps for something else
        self._capture = StepCapture(
            Reducer(histogram_elements=None, sample_count=1),
            max_value_elements=ANY_SIZE,
            sample_count=1,
            followed=False,
        )

    # -- during a step -------------------------------------------------------------------------

    def enter(
        self,
        module: nn.Module,
        plan: TopPlan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        whole: bool,
    ) -> None:
        """Read the arguments of a call to a trained model, before any of it has run.

        Args:
            module: the model.
            plan: its plan.
            args: the positional arguments.
            kwargs: the keyword arguments.
            whole: whether the step has a checkpoint, so that the optimizer's state is kept, too.
        """
        node = plan.top.label
        if not self._node:
            self._node, self._module, self._whole = node, id(module), whole
            self._model = weakref.ref(module)
            if self._refused is None:
                self._try(lambda: self._begin(module))
        elif node != self._node:
            self._refuse(_SEVERAL.format(self._node, node))
        elif id(module) != self._module:
            self._refuse(_PARTS.format(node))
        self._try(lambda: self._call(args, dict(kwargs)))

    def _begin(self, module: nn.Module) -> None:
        _check(module, compiled=anything_compiled() and not self._compiled)
        self._capture.begin()
        parts = [*unwrapped(module).named_modules()]
        self._facts = {
            "model": self._node,
            "generators": self._generators("generators"),
            "threads": torch.get_num_threads(),
            "evaluating": [name for name, part in parts if not part.training],
            "frozen": [
                name
                for name, parameter in unwrapped(module).named_parameters()
                if not parameter.requires_grad
            ],
            "calls": self._calls,
        }

    def _generators(self, where: str) -> dict[str, Any]:
        name, keys, *rest = np.random.get_state()
        version, numbers, gauss = random.getstate()
        put = self._put
        found = {
            "torch": packed(torch.get_rng_state(), f"{where}.torch", put),
            "numpy": packed([str(name), _bits(keys), *map(_plain, rest)], f"{where}.numpy", put),
            "random": packed([version, _bits(numbers), gauss], f"{where}.random", put),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            if torch.cuda.is_current_stream_capturing():
                raise ProbeError(_CAPTURED)
            states = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
            found["cuda"] = packed(states, f"{where}.cuda", put)
        return found

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        where = f"calls.{len(self._calls)}"
        call = {
            "args": packed(args, f"{where}.args", self._put),
            "kwargs": packed(kwargs, f"{where}.kwargs", self._put),
            "targets": [],
        }
        if self._calls:  # the program may have drawn numbers since the call before
            call["generators"] = self._generators(f"{where}.generators")
        self._calls.append(call)

    def target(self, tensor: torch.Tensor) -> None:
        """Read a tensor that a loss compares the model's output with."""
        if self._calls:
            where = f"calls.{len(self._calls) - 1}.targets"
            targets = self._calls[-1]["targets"]
            self._try(lambda: targets.append(packed(tensor, f"{where}.{len(targets)}", self._put)))

    def stepping(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Read an optimizer that is about to step."""
        self._closure |= closure
        if not self._node:
            return
        if closure or "optimizer" in self._facts:
            self._refuse(_CLOSURE if closure else _OPTIMIZERS)
        self._try(lambda: self._read_optimizer(optimizer))

    def _read_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        numbers: dict[int, int] = {}
        groups = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            own = {key: value for key, value in group.items() if key != "params"}
            own["params"] = [numbers[id(parameter)] for parameter in group["params"]]
            groups.append(own)
        found: dict[str, Any] = {"param_groups": groups}
        if self._whole:
            found["state"] = {
                numbers.get(id(key), key): value for key, value in optimizer.state.items()
            }
        self._facts["optimizer"] = packed(found, "optimizer", self._put)
        model = self._model() if self._whole and self._model is not None else None
        if model is not None:
            self._facts["optimizer_class"] = type(optimizer).__name__
            self._facts["trained"] = names_of(optimizer, unwrapped(model))

    def scaling(self, scaler: Any) -> None:
        """Read a gradient scaler that is about to let its optimizer step."""
        if self._node and self._whole:
            self._try(
                lambda: self._facts.update(scaler=packed(scaler.state_dict(), "scaler", self._put))
            )

    def drop(self) -> None:
        """Forget the step, which is not recorded."""
        self._closure = False
        if self._node:
            self._capture.drop()
            self._node, self._facts, self._calls, self.nbytes = "", {}, [], 0

    def _try(self, read: Callable[[], None]) -> None:
        if self._refused is not None:
            return
        try:
            with without_functions(), torch.no_grad():
                read()
        except Exception as error:
            self._refuse(reason_of(error))

    def _put(self, where: str, tensor: torch.Tensor) -> None:
        key = self._node, where
        slot = self._slots.get(key)
        if slot is None:
            node = self._node
            slot = self._slots[key] = Slot(lambda: node, where, pass_=REPLAY, kind="input")
        self.nbytes += tensor.numel() * tensor.element_size()
        self._capture.add(slot, tensor.detach(), batch_dim=None, values=True)

    def _refuse(self, reason: str) -> None:
        if self._refused is None:
            self._refused = reason
            self._warn(f"checkpoints.replay: {reason}")

    # -- after a recorded step -----------------------------------------------------------------

    def ended(self, info: StepInfo, table: SlotTable) -> RawStep | None:
        """Return the record with what the step needs; None if it is neither due nor next."""
        if not self._node:
            self._closure = False
            self.following = 0  # a step in between is missing
            return None
        if "optimizer" not in self._facts:
            self._refuse(_CLOSURE if self._closure else _BY_HAND)
        self.following = self._steps - 1 if self._whole else max(0, self.following - 1)
        own = StepInfo(info.step, info.time, REPLAY, PROBE_MODE)
        if self._refused is not None:
            self.following = 0
            self._capture.begin()  # without what was read
            self._facts = {"refused": self._refused}
        own.extra[REPLAY] = self._facts
        raw = self._capture.close(own, table)
        if self._capture.refused:
            self._refuse("; ".join(f"{n}: {why}" for n, why in self._capture.refused.items()))
            own.extra[REPLAY] = {"refused": self._refused}
        self._node, self._facts, self._calls, self.nbytes = "", {}, [], 0
        self._closure = False
        return raw


def _check(module: nn.Module, *, compiled: bool) -> None:
    """Raise ProbeError if no step of a model can be replayed."""
    inner = unwrapped(module)
    if compiled or hasattr(module, "_orig_mod"):
        raise ProbeError(_COMPILED)
    for part in inner.modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            raise ProbeError(_COMPILED)
    for parameter in inner.parameters():
        if parameter.device.type not in ("cpu", "cuda"):
            raise ProbeError(_DEVICE.format(parameter.device.type))


def names_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Return the name in the model of each parameter of an optimizer; "" for those of others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(parameter), "") for parameter in parameters]


def _bits(numbers: Any) -> torch.Tensor:
    """Return 32-bit numbers of a generator's state as bytes."""
    return torch.from_numpy(np.asarray(numbers, np.uint32).view(np.uint8).copy())


def _plain(value: Any) -> Any:
    """Return a number without numpy's type."""
    return value.item() if isinstance(value, np.generic) else value
