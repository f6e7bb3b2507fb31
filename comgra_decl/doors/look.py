"""Record one call of a model without training it: `comgra.look(model, *inputs)`."""

from __future__ import annotations

import copy
import inspect
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from comgra_decl.doors import environment
from comgra_decl.errors import CallError, ProbeError, SpecError, shown
from comgra_decl.hooks.probing.copying import CleanCopy, unwrapped
from comgra_decl.hooks.probing.loading import EXTRA_STATE, load
from comgra_decl.hooks.probing.seclusion import Autocast, undisturbed
from comgra_decl.hooks.pytree import first_batch_size, tensors_in
from comgra_decl.hooks.tensors.loss_calls import nodes_behind
from comgra_decl.query import Run
from comgra_decl.query.checkpoints import Checkpoint, all_tensors, as_tensor
from comgra_decl.record.context import RunContext
from comgra_decl.record.session import Session
from comgra_decl.spec.probes import probe_type

if TYPE_CHECKING:
    from comgra_decl.hooks import HookManager
    from comgra_decl.record.ranks import Rank
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Location, Where

Loss = Callable[..., torch.Tensor]

_OF_UPDATES = ("update", "optimizer_state")
"""What a spec may capture of an optimizer step, which a single call does not have."""

OF_TENSORS = (
    *("nodes", "exclude", "stats", "histogram", "samples"),
    *("annotations", "tokens", "graph"),
)
"""The keys of a spec that apply to a single call."""

_MOST_SAMPLES = 65536

_SAMPLES = "look"
"""The probe whose samples are those of the call."""


class Look(Run):
    """The record of one call (`comgra.look`), or of repeated steps (`comgra.replay`): a `Run`.

    It is stored in a temporary folder, which is removed together with this object, or when Python
    exits. `save` keeps it.

    Attributes:
        step: the step of the first record: that of the checkpoint whose weights were used, or else
            0.
    """

    step = 0

    def save(self, path: Where) -> Location:
        """Write the record to `path` as an ordinary run, which `open_run` reads.

        Args:
            path: the folder of the new run, or its location in a bucket. If the folder exists and
                is not a run, the run becomes a folder inside it.

        Returns:
            Where the run is.

        Raises:
            StoreError: the folder is a run, which is never overwritten, or cannot be written.
        """
        from comgra_decl.store.copying import copy_run

        return copy_run(self.path, path)


def look(
    model: nn.Module,
    *inputs: Any,
    spec: str | Path | Mapping[str, Any] | Spec = "debug",
    weights: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    pictures: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Look:
    """Record one call of a model, without training it and without a run folder.

        cache = comgra.look(model, images, loss=lambda output: F.cross_entropy(output, labels))
        cache.slot("layer1").value(0), cache.slot("layer1").grad.value(0), cache.edges()

    The call is made on a copy of the model with copies of the inputs, in the mode that each module
    has. The model, its gradients and hooks, the inputs and the random number generators do not
    change, even if the call fails. The values of all samples in the batch are kept, regardless of
    their size, for the tensors that the spec selects.

    Args:
        model: the model. Wrappers such as DistributedDataParallel and `torch.compile` are removed.
        *inputs: its positional arguments.
        spec: name of a preset, path of a YAML file, a mapping with the same keys, or a Spec. Only
            what it says about tensors and pictures applies: nodes, statistics, histograms, the
            graph, and pictures, for which the samples of the call take the place of the probe's.
            Interventions are ignored; `comgra-decl look` makes them.
        weights: parameters and buffers by name, as in the state dict of the model or its wrapper,
            or from `run.checkpoint(step)`; None to use those of the model.
        loss: receives the model's output and returns the scalar whose gradients are recorded; None
            to record no gradients. If it has a parameter called `model`, it also receives the copy,
            for terms such as a penalty on parameters. It is called as it is, so a loss that is a
            module with buffers may change them.
        pictures: pictures of the samples, as in a spec but without `of`: `{"cam": {"method":
            "grad_cam", "select": "conv2"}}` for `cache.picture("cam")`. They need further passes
            through a copy, and with them, the call itself is made with gradients enabled.
        **kwargs: keyword arguments of the model.

    Returns:
        A `Run` with one record. Its type is "train" with a loss, and "eval" without one.

    Raises:
        CallError: the model cannot be copied, the weights do not fit, the loss is not a scalar with
            gradients or uses parameters of the model itself, nothing was recorded, or a session is
            recording in this process.
        SpecError: the spec is invalid.
    """
    _check(model, loss)
    content = _declared(spec, pictures)
    step = weights.step if isinstance(weights, Checkpoint) else 0
    gradient = torch.is_grad_enabled() or loss is not None or bool(content["pictures"])
    folder = Path(tempfile.mkdtemp(prefix="comgra-look-"))
    try:
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            own = _copied(model)
            stack.callback(own.close)
            if own.device.type == "meta":
                raise CallError(
                    f"{type(own.module).__name__} is on the meta device, where tensors have no "
                    "values to record. Move it with model.to_empty(device=...) and load its weights"
                )
            if weights is not None:
                load(own.module, _tensors(weights))
            args, named = _inputs(inputs, kwargs, own)
            stack.enter_context(torch.set_grad_enabled(gradient))
            stack.enter_context(Autocast.now(own.device.type).again())
            batch = first_batch_size(args, named) or 1
            placed = _placed(content, folder, step, batch=batch)
            with own.apart():
                run = _recorded(placed, _Called(own.module, args, named), loss, model)
        found = Look(run)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    found.step = step
    remove_with(found, folder)
    return found


def remove_with(found: Look, folder: Path) -> None:
    """Remove a temporary folder together with the record that it contains."""
    weakref.finalize(found, _remove, folder, os.getpid())


def _check(model: object, loss: object) -> None:
    if not isinstance(model, nn.Module):
        raise CallError(f"model must be a torch.nn.Module, got {shown(model)}")
    if loss is not None and not callable(loss):
        raise CallError(
            f"loss must be a function of the model's output, got {shown(loss)}; for example "
            "loss=lambda output: output.sum()"
        )
    if environment.is_recording():
        raise CallError(
            "comgra.look cannot be used while this process records a run. Use it before or after, "
            "or declare a probe, which passes samples through a copy of the model during training"
        )


def _declared(
    source: str | Path | Mapping[str, Any] | Spec, pictures: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the content of the spec of a single call."""
    from comgra_decl.doors.checked_spec import declared

    spec = declared(source)
    if not spec.enabled:
        raise SpecError(["comgra.enabled: comgra.look has nothing to record with `enabled: false`"])
    content = spec.model_dump(mode="json", by_alias=True)
    for name, entry in [*content["nodes"].items()]:
        entry["values"] = True
        entry["capture"] = [what for what in entry["capture"] if what not in _OF_UPDATES]
        if not entry["capture"]:
            del content["nodes"][name]
    declared_pictures = {**content["pictures"], **_checked_pictures(pictures)}
    return {
        **{key: content[key] for key in OF_TENSORS},
        "pictures": {name: {**each, "of": _SAMPLES} for name, each in declared_pictures.items()},
        "values": {"max_elements": 1 << 62},
        "preview": False,
        "rules": "off",
        "kpis": {"loss": True, "automatic": False},
        "run": {"group": "look", "name": "look"},
        "store": {"commit_interval": 0},
    }


def _checked_pictures(pictures: object) -> dict[str, Any]:
    given = {} if pictures is None else pictures
    if not isinstance(given, Mapping):
        raise CallError(f"pictures must map names to pictures, got {shown(pictures)}")
    for name, picture in given.items():
        if not isinstance(picture, Mapping):
            raise CallError(f"pictures[{name!r}] must be a mapping, got {shown(picture)}")
    return dict(given)


def _placed(content: dict[str, Any], folder: Path, step: int, *, batch: int) -> Spec:
    """Return the spec of a call with the given number of samples, stored in a folder."""
    from comgra_decl.spec import load_spec

    samples = {**content["samples"], "count": min(batch, _MOST_SAMPLES)}
    if content["pictures"]:  # `by` would choose among the samples and reorder them
        own = {"samples": {"count": samples["count"]}, "mode": "as_is"}
        content = {**content, "probes": {_SAMPLES: own}}
    schedule = {"steps": [step], "step": "explicit", "max_iterations": None}
    run = {**content["run"], "root": str(folder)}
    return load_spec({**content, "run": run, "schedule": schedule, "samples": samples})


def _copied(model: nn.Module) -> CleanCopy:
    try:
        return CleanCopy(model, {}, traceable=True)
    except ProbeError as error:
        name = type(unwrapped(model)).__name__
        raise CallError(f"comgra.look records a copy of {name}, but {error}") from error


def _tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not isinstance(weights, Mapping):
        raise CallError(
            f"weights must map names to tensors or arrays, as a state dict does, got "
            f"{shown(weights)}"
        )
    if isinstance(weights, Checkpoint):
        return all_tensors(weights)
    tensors = {n: as_tensor(v) if isinstance(v, np.ndarray) else v for n, v in weights.items()}
    for name, tensor in tensors.items():
        if not (isinstance(tensor, torch.Tensor) or name.endswith(EXTRA_STATE)):
            raise CallError(f"weights[{name!r}] must be a tensor or array, got {shown(tensor)}")
    return tensors


def _inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], model: CleanCopy
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments; tensors that require gradients are leaves."""
    memo: dict[int, Any] = {}
    for _, tensor in (*tensors_in(args), *tensors_in(kwargs)):
        moved = tensor.detach().to(model.device if model.moved else tensor.device, copy=True)
        memo[id(tensor)] = moved.requires_grad_() if tensor.requires_grad else moved
    try:
        copied: tuple[tuple[Any, ...], dict[str, Any]] = copy.deepcopy((args, kwargs), memo)
    except Exception as error:
        raise CallError(
            f"an argument of the model cannot be copied ({type(error).__name__}: {error})"
        ) from error
    return copied


class _Called(NamedTuple):
    """A copy of the model and its arguments."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors whose gradients a loss may have."""
        inputs = (tensor for _, tensor in tensors_in((self.args, self.kwargs)))
        return [t for t in (*self.module.parameters(), *inputs) if t.requires_grad]


def _recorded(spec: Spec, called: _Called, loss: Loss | None, model: nn.Module) -> Path:
    """Call the copy of `model`, record the call, and return the folder of the run."""
    session = _CallSession(spec, context=RunContext(), model=called.module)
    try:
        session.start()
        environment.recorded(session, True)
        output = called.module(*called.args, **called.kwargs)
        if loss is not None:
            more = {"model": called.module} if _takes_model(loss) else {}
            value = loss(output, **more)
            _check_loss(value, called.leaves)
            _check_graph(value, model)
            _backward(value.reshape(()), called.leaves)
            session.end_call()
    finally:  # also ends the writer's thread if the session failed to start
        environment.recorded(session, False)
        session.finish()
    return session.result()


def _takes_model(loss: Loss) -> bool:
    try:
        return "model" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # a built-in function
        return False


def _check_loss(value: object, leaves: list[torch.Tensor]) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        what = shown(value) if shape is None else f"the shape {shape}"
        raise CallError(f"loss must return a tensor with one element, got {what}")
    if not value.requires_grad or not leaves:
        raise CallError(
            "the loss has no gradients: neither a parameter of the model nor an input requires "
            "them, or the model or the loss detaches its result. Omit `loss` to record only values"
        )


def _backward(loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Compute the gradients of leaves; other tensors that the loss uses keep their `.grad`."""
    nodes = [*nodes_behind(loss, most=math.inf)]
    if not any(type(node).__name__.startswith("CheckpointFunction") for node in nodes):
        torch.autograd.backward(loss, inputs=leaves)
        return
    # Reentrant checkpoints accept no `inputs`, so other tensors are put back afterwards.
    own = {id(leaf) for leaf in leaves}
    others = [node.variable for node in nodes if hasattr(node, "variable")]
    before = [(t, t.grad) for t in others if id(t) not in own]
    for tensor, _ in before:
        tensor.grad = None
    try:
        loss.backward()
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _check_graph(loss: torch.Tensor, model: nn.Module) -> None:
    """Refuse a loss with terms whose gradients would be missing from those of the copy."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for node in nodes_behind(loss, most=math.inf):
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise CallError(
                f"the loss uses {name!r} of the model itself, but the gradients are those of a "
                "copy. Give the loss a parameter called `model`, which receives the copy, as in "
                "loss=lambda output, model: output.sum() + model.weight.square().sum()"
            )


class _CallSession(Session):
    """The session of a single call, whose errors are raised instead of logged."""

    _in_batch_order = True  # all samples are recorded

    def __init__(self, spec: Spec, *, context: RunContext, model: nn.Module) -> None:
        super().__init__(spec, context=context)
        self._model = model

    def _rank(self) -> Rank | None:
        """Return None: each process of a distributed job looks on its own."""
        return None

    def _manager(self, **arguments: Any) -> HookManager:
        manager = super()._manager(**arguments)
        (step,) = self._spec.schedule.steps or [0]
        manager.begin_at(step)
        manager.expect(self._model)
        manager.probe_single_call()
        return manager

    def end_call(self) -> None:
        """Read the gradients of the parameters, and close the record."""
        if self._hooks is not None:
            self._hooks.end_call()

    def _tracing_failed(self, error: BaseException) -> None:
        self._fault = error

    def _store_failed(self, error: BaseException) -> None:
        self._fault = error

    def result(self) -> Path:
        """Return the folder of the run.

        Raises:
            CallError: the call could not be recorded.
        """
        if self._fault is not None:
            raise CallError(f"the call could not be recorded: {self._fault}") from self._fault
        assert isinstance(self.path, Path)
        run = Run(self.path)
        if len(run.records) == 0:
            raise CallError(
                "nothing was recorded: the model has no tensors, or the spec selects none of them. "
                'Select modules under `nodes`, as in {all: {select: "**"}}'
            )
        self._check_pictures(run)
        return self.path

    def _check_pictures(self, run: Run) -> None:
        """Raise an error if the pictures could not be made at all; one of them says why itself."""
        if self._spec.probes and probe_type(_SAMPLES) not in run.types:
            start = f"probe {_SAMPLES!r}: "
            found = [w.removeprefix(start) for w in run.report["warnings"] if w.startswith(start)]
            raise CallError(f"no pictures could be made: {'; '.join(found) or 'see the report'}")


def _remove(folder: Path, owner: int) -> None:
    """Remove the folder of a record, unless a forked child has inherited the object."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
