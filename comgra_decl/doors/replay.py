"""Repeat a recorded step, as it was or with something changed: `comgra.replay`."""

from __future__ import annotations

import inspect
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import nn

from comgra_decl.doors import environment
from comgra_decl.doors.look import OF_TENSORS, Look, remove_with
from comgra_decl.errors import ComgraError, ReplayError, did_you_mean, shown
from comgra_decl.hooks.call_context import is_inner_step
from comgra_decl.hooks.hook_lists import before_steps, tidy
from comgra_decl.hooks.plans import facts_of
from comgra_decl.hooks.probing.copying import unwrapped
from comgra_decl.hooks.probing.loading import load
from comgra_decl.hooks.probing.packing import unpacked
from comgra_decl.hooks.probing.replays import names_of
from comgra_decl.hooks.probing.seclusion import undisturbed
from comgra_decl.hooks.pytree import first_batch_size
from comgra_decl.query import Run
from comgra_decl.query.checkpoints import Checkpoint, Kept, all_tensors
from comgra_decl.record.context import RunContext
from comgra_decl.record.session import Session
from comgra_decl.spec.base import Int, Number, SpecModel
from comgra_decl.spec.nodes import Selectors
from comgra_decl.spec.selectors import is_selected, misses

if TYPE_CHECKING:
    from comgra_decl.hooks import HookManager
    from comgra_decl.record.ranks import Rank
    from comgra_decl.spec import Spec
    from comgra_decl.store.location import Where

_NOT_KEPT = (
    "the run keeps nothing to replay at step {step}. Declare `checkpoints: {{every: 50, replay: "
    "{replay}}}` in its spec{why}"
)

_WITHOUT_GRADIENTS = (
    "train_step calls the model without gradients before the call that is trained, and this call "
    "draws random numbers or changes buffers. The run keeps their state at the trained call only. "
    "Record a run that makes this call in evaluation mode, or after the trained one"
)


@dataclass(frozen=True)
class Batch:
    """The arguments with which a step called its model, and what the loss compared the output with.

    Attributes:
        args: the positional arguments of the model.
        kwargs: its keyword arguments.
        targets: the targets of the loss, in the order in which they were used, as the loss got
            them. Empty if the model computes the loss itself, or if the targets are its inputs.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[torch.Tensor, ...]

    @property
    def target(self) -> torch.Tensor:
        """The only target.

        Raises:
            ReplayError: there is none, or more than one.
        """
        if len(self.targets) != 1:
            raise ReplayError(f"the batch has {len(self.targets)} targets, not one; use `targets`")
        return self.targets[0]


class Change(SpecModel):
    """What is different from the recorded step."""

    without: tuple[Int, ...] = ()
    """Samples to leave out, by their place in the batch."""

    clip: Annotated[Number, Field(gt=0)] | None = None
    """Scale the gradients of all parameters so that their norm is at most this."""

    lr: Annotated[Number, Field(ge=0)] = 1.0
    """Factor of the learning rates."""

    freeze: Selectors = Field(default_factory=list)
    """Modules whose parameters are not trained, as in `nodes`."""


TrainStep = Callable[..., object]


def replay(
    run: Run | Where,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., torch.Tensor] | None = None,
    train_step: TrainStep | None = None,
    change: Mapping[str, Any] | None = None,
    steps: int = 1,
    scaler: Any = None,
    spec: str | Path | Mapping[str, Any] | Spec | None = None,
) -> Look:
    """Repeat a recorded training step, as it was or with something changed, and record it.

        again = comgra.replay(run, 400, model=model, optimizer=optimizer, loss=F.cross_entropy)
        clipped = comgra.replay(..., change={"clip": 1.0})

    The run must have been recorded with `checkpoints: {replay: true}`. Model and optimizer receive
    the state at the beginning of the step, whatever theirs is, and keep the one after the last
    step. The model gets the recorded batch and the recorded random numbers. The generators, and
    which modules train, are as before afterwards.

    Args:
        run: the run, or its path.
        step: one of `run.checkpoints`.
        model: a model of the same architecture.
        optimizer: an optimizer of the same class, with the model's parameters in the same order.
        loss: receives the model's output and the recorded targets, and returns the loss. The step
            is then `zero_grad`, the model, the loss, `backward` and `optimizer.step`.
        train_step: for any other step: receives model, optimizer and a `Batch` for each call of the
            model with gradients in the step, and makes the whole step.
        change: what to change: `without` (numbers of samples), `clip` (largest norm of the
            gradients), `lr` (a factor) and `freeze` (modules, as in `nodes`).
        steps: how many steps to repeat; more than one if the run keeps them (`replay: {steps: 3}`).
        scaler: the `torch.amp.GradScaler` that `train_step` uses, which also gets its state.
        spec: what to record; by default, what the run has recorded, without functions of your own.

    Returns:
        A `Run` with one record for each step, under the numbers of the steps.

    Raises:
        ReplayError: the step cannot be replayed, or `train_step` is not one step.
        UnknownNameError: there is no such checkpoint.
        SpecError: the spec is invalid.
    """
    source = _opened(run)
    changed = _checked(loss, train_step, change, step, steps)
    step = int(step)  # those of `run.steps` are numpy's
    kept = _kept(source, step, steps)
    checkpoint = source.checkpoint(step)
    folder = Path(tempfile.mkdtemp(prefix="comgra-replay-"))
    try:
        content = _content(source, spec)
        name = "-".join([f"step-{step}", *_named(change or {})])
        placed = _placed(content, folder, range(step, step + steps), name=name)
        context = RunContext(config={"replay": {"run": str(source.path), **(change or {})}})
        session = _Session(placed, context=context, first=step)
        own = train_step or _usual(loss)
        with ExitStack() as stack:
            stack.enter_context(undisturbed())
            _Player(session, model, optimizer, scaler, changed).play(checkpoint, kept, own, stack)
        found = Look(session.result())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    found.step = step
    remove_with(found, folder)
    return found


# -- arguments ---------------------------------------------------------------------------------


def _opened(run: Run | Where) -> Run:
    from comgra_decl.query import open_run

    return run if isinstance(run, Run) else open_run(run)


def _checked(
    loss: object, train_step: object, change: object, step: object, steps: object
) -> Change:
    if (loss is None) == (train_step is None):
        raise ReplayError(
            "pass either loss, a function of the model's output and the targets, or train_step, a "
            "function of model, optimizer and batch"
        )
    for name, value in (("loss", loss), ("train_step", train_step)):
        if value is not None and not callable(value):
            raise ReplayError(f"{name} must be a function, got {shown(value)}")
    if change is not None and not isinstance(change, Mapping):
        raise ReplayError(f"change must map what is different to its value, got {shown(change)}")
    if not isinstance(step, (int, np.integer)):
        raise ReplayError(f"step must be one of `run.checkpoints`, got {shown(step)}")
    if not isinstance(steps, int) or steps < 1:
        raise ReplayError(f"steps must be a whole number of at least 1, got {shown(steps)}")
    if environment.is_recording():
        raise ReplayError("comgra.replay cannot be used while this process records a run")
    try:
        return Change.model_validate({} if change is None else change)
    except ValidationError as error:
        raise ReplayError(f"change: {'; '.join(map(_problem, error.errors()))}") from None


def _problem(found: Any) -> str:
    """Return what pydantic found wrong in a change."""
    where, keys = ".".join(map(str, found["loc"])), [*Change.model_fields]
    if found["type"] == "extra_forbidden":
        near = did_you_mean(where, keys)
        return f"there is no {where!r}{near or '; the keys are ' + ', '.join(keys)}"
    return f"{where}: {found['msg']}"


def _kept(run: Run, step: int, steps: int) -> list[Kept]:
    """Return what the run keeps of the steps.

    Raises:
        ReplayError: it keeps nothing, or the steps cannot be replayed.
    """
    found = [Kept(run, number) for number in range(step, step + steps)]
    for number, kept in enumerate(found, start=step):
        if "refused" in kept.facts:
            raise ReplayError(f"step {number} cannot be replayed: {kept.facts['refused']}")
        if not kept.facts and number == step:
            run.checkpoint(step)  # says which steps there are
        if not kept.facts:
            raise ReplayError(
                _NOT_KEPT.format(
                    step=number,
                    replay="true" if steps == 1 else f"{{steps: {steps}}}",
                    why="" if steps == 1 else f" for {steps} steps from each checkpoint on",
                )
            )
    return found


def _content(run: Run, spec: Any) -> dict[str, Any]:
    """Return what to record of a step."""
    from comgra_decl.doors.checked_spec import declared

    if spec is not None:
        whole = declared(spec).model_dump(mode="json", by_alias=True)
    else:
        whole = _without_functions(run.spec.model_dump(mode="json", by_alias=True))
    keys = (*OF_TENSORS, "values", "preview")
    return {key: whole[key] for key in keys if key in whole}


def _without_functions(value: Any) -> Any:
    """Return the spec of a run without what would import code: a run is not trusted."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not _is_function(each)}
        return {key: _without_functions(each) for key, each in kept.items()}
    if isinstance(value, list):
        return [_without_functions(each) for each in value if not _is_function(each)]
    return value


def _is_function(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _placed(content: dict[str, Any], folder: Path, steps: Iterable[int], *, name: str) -> Spec:
    from comgra_decl.spec import load_spec

    return load_spec(
        {
            **content,
            "rules": "off",
            "kpis": {"loss": True, "automatic": False},
            "run": {"root": str(folder), "group": "replay", "name": name},
            "schedule": {"steps": [*steps], "max_iterations": None, "eval": None},
            "store": {"commit_interval": 0},
        }
    )


def _named(change: Mapping[str, Any]) -> Iterator[str]:
    for key, value in change.items():
        many = value if isinstance(value, (list, tuple)) else [value]
        text = "-".join(map(str, many))
        yield f"{key}-{''.join(c if c.isalnum() or c in '.-' else '_' for c in text)}"


def _usual(loss: Callable[..., torch.Tensor] | None) -> TrainStep:
    """Return the usual training step with a loss."""
    assert loss is not None

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *batches: Batch) -> None:
        if len(batches) != 1:
            raise ReplayError(
                f"the step called the model {len(batches)} times. Pass train_step, which receives "
                "model, optimizer and one batch for each call"
            )
        (batch,) = batches
        _check_takes(loss, batch.targets)
        optimizer.zero_grad()
        loss(model(*batch.args, **batch.kwargs), *batch.targets).backward()
        optimizer.step()

    return train_step


def _check_takes(loss: Callable[..., Any], targets: Sequence[torch.Tensor]) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a built-in function
        return
    try:
        signature.bind(None, *targets)
    except TypeError as error:
        raise ReplayError(
            f"loss cannot be called with the output and {len(targets)} recorded targets ({error}). "
            "A target is what the loss compares the output with, unless it is an input of the "
            "model; pass train_step, which receives all of them"
        ) from None


# -- playing -----------------------------------------------------------------------------------


class _Session(Session):
    """The session of a replay, whose errors are raised instead of logged."""

    def __init__(self, spec: Spec, *, context: RunContext, first: int) -> None:
        super().__init__(spec, context=context)
        self._first = first
        self.before_model: Callable[[], None] = lambda: None
        self.stepped = 0

    def _rank(self) -> Rank | None:
        """Return None: each process of a distributed job replays on its own."""
        return None

    def _manager(self, **arguments: Any) -> HookManager:
        from comgra_decl.hooks import HookManager

        manager = HookManager(self._spec, ended=self._count, **arguments)
        manager.begin_at(self._first)
        manager.before_models(lambda *_: self.before_model())
        return manager

    def _count(self) -> None:
        self.stepped += 1

    def _tracing_failed(self, error: BaseException) -> None:
        self._fault = error

    def _store_failed(self, error: BaseException) -> None:
        self._fault = error

    def result(self) -> Path:
        """Return the folder of the run.

        Raises:
            ReplayError: it could not be recorded.
        """
        if self._fault is not None:
            if isinstance(self._fault, ComgraError):
                raise self._fault
            raise ReplayError(f"the step could not be recorded: {self._fault}") from self._fault
        assert isinstance(self.path, Path)
        return self.path


class _Player:
    """Repeats steps.

    Args:
        session: records them.
        model: the model.
        optimizer: its optimizer.
        scaler: the gradient scaler, if the step uses one.
        change: what to change.
    """

    def __init__(
        self,
        session: _Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        change: Change,
    ) -> None:
        self._session = session
        self._model, self._inner = model, unwrapped(model)
        self._optimizer, self._scaler, self._change = optimizer, scaler, change
        self._taken = 0  # optimizer steps in the step that is being repeated

    def play(
        self, checkpoint: Checkpoint, kept: Sequence[Kept], train_step: TrainStep, stack: ExitStack
    ) -> None:
        """Make the steps.

        Args:
            checkpoint: the weights at the beginning of the first step.
            kept: what is kept of each step.
            train_step: makes a step.
            stack: restores what is changed for the steps only.
        """
        first = kept[0].facts
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, int(first.get("threads", 1))))
        stack.enter_context(_as_recorded(self._inner, first))
        self._freeze()
        load(self._inner, all_tensors(checkpoint))
        self._optimizer.zero_grad(set_to_none=True)
        self._check_optimizer(first)
        self._load_optimizer(unpacked(first["optimizer"], kept[0].tensor))
        self._load_scaler(kept[0])
        tidy()  # so that these run before what the session adds
        stack.callback(before_steps.add(self._count).remove)
        if self._change.clip is not None:
            stack.callback(before_steps.add(self._clip).remove)
        try:
            self._session.start()
            environment.recorded(self._session, True)
            for number, each in enumerate(kept):
                self._play(number, each, train_step)
        finally:
            environment.recorded(self._session, False)
            self._session.finish()

    def _play(self, number: int, kept: Kept, train_step: TrainStep) -> None:
        facts = kept.facts
        groups = unpacked(facts["optimizer"], kept.tensor)["param_groups"]
        for own, group in zip(self._optimizer.param_groups, groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
            own["lr"] = own["lr"] * self._change.lr if self._change.lr != 1 else own["lr"]
        batches = [self._batch(call, kept) for call in facts["calls"]]
        first, *others = facts["calls"]
        # Runs of older versions have the states at the first call alone.
        states = [facts["generators"], *(call.get("generators") for call in others)]
        unseen, calls = [first], iter(states)

        def before_model() -> None:
            unseen.clear()
            if (state := next(calls, None)) is not None:
                _set_generators(unpacked({"dict": [*state.items()]}, kept.tensor))

        self._session.before_model = before_model
        self._taken = 0
        with _watched(self._inner, unseen):
            train_step(self._model, self._optimizer, *batches)
        if self._session.stepped != number + 1 or self._taken > 1:
            taken = max(self._taken, self._session.stepped - number)
            raise ReplayError(
                f"train_step must take one optimizer step, but took {taken}. It must use the model "
                "and the optimizer that it receives"
            )
        if unseen:
            raise ReplayError("train_step did not call the model that it receives")

    def _batch(self, call: Mapping[str, Any], kept: Kept) -> Batch:
        args, kwargs, targets = (
            unpacked(call[key], kept.tensor) for key in ("args", "kwargs", "targets")
        )
        if not self._change.without:
            return Batch(args, kwargs, tuple(targets))
        size = first_batch_size(args, kwargs)
        if size is None:
            raise ReplayError("change.without: the model receives no tensor with samples")
        wrong = [i for i in self._change.without if not -size <= i < size]
        keep = sorted({*range(size)} - {i % size for i in self._change.without})
        if wrong or not keep:
            why = f"there is no sample {wrong[0]}" if wrong else "no sample is left"
            raise ReplayError(f"change.without: {why}; the batch has {size} samples")
        return Batch(
            _fewer(args, size, keep),
            _fewer(kwargs, size, keep),
            tuple(_fewer(each, size, keep, rows=True) for each in targets),
        )

    def _check_optimizer(self, facts: Mapping[str, Any]) -> None:
        """Raise an error if the optimizer is another one; older runs do not tell."""
        own = type(_innermost(self._optimizer)).__name__
        recorded = facts.get("optimizer_class", own)
        if own != recorded:
            raise ReplayError(
                f"the optimizer must be of the class {recorded}, as in the run, got {own}"
            )
        names = names_of(self._optimizer, self._inner)
        expected = facts.get("trained", names)
        if len(names) != len(expected):
            return  # the message about the groups says more
        for number, (name, wanted) in enumerate(zip(names, expected, strict=True)):
            if name != wanted:
                raise ReplayError(
                    f"parameter {number} of the optimizer must be {_told(wanted)}, as in the run, "
                    f"but is {_told(name)}. Pass an optimizer with the parameters of the model "
                    "that is replayed, in the same order"
                )

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        own = sum(len(group["params"]) for group in self._optimizer.param_groups)
        count = sum(len(group["params"]) for group in state["param_groups"])
        if own != count or len(self._optimizer.param_groups) != len(state["param_groups"]):
            raise ReplayError(
                f"the optimizer has {own} parameters in {len(self._optimizer.param_groups)} "
                f"groups, but that of the run has {count} in {len(state['param_groups'])}"
            )
        try:
            self._optimizer.load_state_dict(state)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ReplayError(f"the optimizer cannot load the recorded state: {error}") from error

    def _load_scaler(self, kept: Kept) -> None:
        found = kept.facts.get("scaler")
        if (found is None) != (self._scaler is None):
            raise ReplayError(
                "the step used no GradScaler; leave out `scaler`"
                if found is None
                else "the step used a GradScaler; pass the one that train_step uses as `scaler`"
            )
        if found is not None:
            self._scaler.load_state_dict(unpacked(found, kept.tensor))
            if getattr(self._optimizer, "_step_supports_amp_scaling", False) and self._change.clip:
                raise ReplayError("change.clip: a fused optimizer receives scaled gradients")

    def _freeze(self) -> None:
        patterns = self._change.freeze
        if not patterns:
            return
        facts = [facts_of(path, part) for path, part in self._inner.named_modules()]
        chosen = [fact.path for fact in facts if is_selected(patterns, fact)]
        if not chosen:
            why = "; ".join(misses("change.freeze", patterns, facts))
            raise ReplayError(why or "change.freeze: matches no module")
        for path in chosen:
            self._inner.get_submodule(path).requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self._inner.parameters()):
            raise ReplayError("change.freeze: no parameter of the model is left to train")

    def _count(self, *_: Any) -> None:
        self._taken += not is_inner_step(inspect.currentframe())

    def _clip(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._optimizer:
            assert self._change.clip is not None
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._change.clip)


@contextmanager
def _watched(model: nn.Module, unseen: Sequence[object]) -> Iterator[None]:
    """Refuse calls without gradients that cannot be repeated, while `unseen` is not empty."""
    before: list[tuple[Any, list[torch.Tensor]]] = []

    def enter(*_: Any) -> None:
        if unseen and not torch.is_grad_enabled():
            before.append((_generators(), [buffer.clone() for buffer in model.buffers()]))

    def leave(*_: Any) -> None:
        if before:
            generators, buffers = before.pop()
            same = all(map(torch.equal, buffers, model.buffers()))
            if not same or generators != _generators():
                raise ReplayError(_WITHOUT_GRADIENTS)

    handles = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators, to compare them."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)]
    return of_torch, repr(np.random.get_state()), random.getstate()


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer in a wrapper, such as that of Accelerate."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _told(name: str) -> str:
    return repr(name) if name else "none of the model's"


@contextmanager
def _as_recorded(model: nn.Module, facts: Mapping[str, Any]) -> Iterator[None]:
    """Train and freeze what the program trained and froze, and undo it afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    trained = [(p, p.requires_grad) for p in model.parameters()]
    evaluating, frozen = set(facts.get("evaluating", ())), set(facts.get("frozen", ()))
    try:
        for name, part in model.named_modules():
            part.training = name not in evaluating
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for parameter, flag in trained:
            parameter.requires_grad_(flag)


def _fewer(value: Any, size: int, keep: Sequence[int], *, rows: bool = False) -> Any:
    """Return a value whose tensors with `size` samples have only some of them.

    Args:
        value: a tensor, or lists, tuples and dicts of them.
        size: the number of samples.
        keep: the samples to keep.
        rows: whether a tensor may have several rows per sample, such as flattened tokens.
    """
    if isinstance(value, dict):
        return {key: _fewer(each, size, keep, rows=rows) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fewer(each, size, keep, rows=rows) for each in value)
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.shape[0]:
        return value
    length = value.shape[0]
    if length != size and (not rows or length % size):
        return value
    index = torch.tensor(keep, device=value.device)
    grouped = value.detach().reshape(size, length // size, *value.shape[1:])[index]
    return grouped.flatten(0, 1).requires_grad_(value.requires_grad)


def _set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().view(np.uint32), *rest))
    version, numbers, gauss = states["random"]
    random.setstate((version, tuple(numbers.numpy().view(np.uint32).tolist()), gauss))
    for index, state in enumerate(states.get("cuda", ())):
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)
