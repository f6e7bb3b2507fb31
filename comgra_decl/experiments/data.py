"""Draw the first batches of a training script, as its model receives them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

_MOST_CLASSES = 1000
_MOST_CHANNELS = 16
_COLOURS = (1, 3, 4)  # numbers of channels of an image


@dataclass
class Drawn:
    """The batches that a script passes to its model.

    Attributes:
        tensors: the tensors of each batch, by label: the model's inputs, what a loss compares the
            output with, and other tensors of the DataLoader's batch.
        skipped: number of optimizer steps that were skipped to draw more batches.
        convolved: the labels of the tensors that the model passed to a convolution, which expects
            the channels after the samples.
    """

    tensors: dict[str, list[Array]] = field(default_factory=dict)
    skipped: int = 0
    convolved: set[str] = field(default_factory=set)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return max(map(len, self.tensors.values()), default=0)

    @property
    def target(self) -> str | None:
        """The label of the only target; None if there is none, or more than one."""
        found = [label for label in self.tensors if label.startswith("target")]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Summary:
    """What one tensor contains, over all batches.

    Attributes:
        label: its label.
        shapes: its different shapes.
        dtype: its dtype.
        low: the smallest finite value; None if there is none.
        high: the largest finite value.
        mean: the mean of the finite values.
        std: their standard deviation (with N, not N - 1).
        nonfinite: number of NaN and infinite values.
        channels: mean and standard deviation of each channel, if there are at most 16.
        repeated: number of samples that equal an earlier sample in their batch.
        shared: number of samples that equal a sample of an earlier batch.
        samples: number of samples.
        classes: for integers with at most 1000 different values: how often each of them occurs.
        fewest: the smallest number of different values in any batch, if there are `classes`.
    """

    label: str
    shapes: list[list[int]]
    dtype: str
    low: float | None
    high: float | None
    mean: float | None
    std: float | None
    nonfinite: int
    channels: list[tuple[float, float]]
    repeated: int
    shared: int
    samples: int
    classes: dict[int, int]
    fewest: int | None


def summary(label: str, batches: list[Array], *, convolved: bool = False) -> Summary:
    """Return what a tensor contains, over all batches, each of shape [samples, ...].

    Args:
        label: its label.
        batches: its values.
        convolved: whether the model passed it to a convolution.
    """
    flat = np.concatenate([batch.reshape(-1) for batch in batches]) if batches else np.empty(0)
    numbers = flat.astype(np.float64) if flat.dtype.kind in "fiub" else np.empty(0)
    finite = numbers[np.isfinite(numbers)]
    some = finite.size > 0
    repeated, shared, samples = _duplicates(batches)
    classes = _classes(flat)
    return Summary(
        label=label,
        shapes=[[*shape] for shape in dict.fromkeys(batch.shape for batch in batches)],
        dtype=str(flat.dtype),
        low=float(finite.min()) if some else None,
        high=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
        std=float(finite.std()) if some else None,
        nonfinite=int(numbers.size - finite.size),
        channels=_channels(batches, convolved=convolved),
        repeated=repeated,
        shared=shared,
        samples=samples,
        classes=classes,
        fewest=min(len(np.unique(batch)) for batch in batches) if classes else None,
    )


def _duplicates(batches: list[Array]) -> tuple[int, int, int]:
    """Return how many samples repeat one of their batch, or of an earlier batch, and their number.

    Samples with a single value, such as classes, are not compared.
    """
    repeated = shared = samples = 0
    earlier: set[bytes] = set()
    for batch in batches:
        if batch.ndim == 0:
            continue
        samples += len(batch)
        if batch[:1].size <= 1:
            continue
        here: set[bytes] = set()
        for sample in np.ascontiguousarray(batch):
            digest = hashlib.sha256(sample.tobytes()).digest()
            repeated += digest in here
            shared += digest not in here and digest in earlier
            here.add(digest)
        earlier |= here
    return repeated, shared, samples


def _classes(values: Array) -> dict[int, int]:
    if values.dtype.kind not in "iub" or not values.size:
        return {}
    names, counts = np.unique(values, return_counts=True)
    pairs = zip(names.tolist(), counts.tolist(), strict=True)
    return {int(name): int(count) for name, count in pairs} if len(names) <= _MOST_CLASSES else {}


def channel_axis(shape: tuple[int, ...], *, convolved: bool) -> int | None:
    """Return the axis of the channels of images [samples, ...] or features [samples, features].

    Images have their channels last if that is a number of colours and smaller than height and
    width, and if the second axis cannot be one.

    Args:
        shape: the shape of a batch.
        convolved: whether the model passed it to a convolution, so that the channels are second.
    """
    if len(shape) == 4 and not convolved:
        _, second, third, last = shape
        if second not in _COLOURS and last in _COLOURS and last < min(second, third):
            return 3
    return 1 if len(shape) in (2, 4) and shape[1] <= _MOST_CHANNELS else None


def _channels(batches: list[Array], *, convolved: bool) -> list[tuple[float, float]]:
    axes = {(channel_axis(batch.shape, convolved=convolved), batch.ndim) for batch in batches}
    axis, _ = next(iter(axes), (None, 0))
    if len(axes) != 1 or axis is None or batches[0].dtype.kind != "f":
        return []
    if len({batch.shape[axis] for batch in batches}) > 1:
        return []
    rows = [np.moveaxis(batch, axis, 0).reshape(batch.shape[axis], -1) for batch in batches]
    whole = np.concatenate(rows, axis=1).astype(np.float64)
    finite = [row[np.isfinite(row)] for row in whole]
    return [(float(row.mean()), float(row.std())) for row in finite if row.size]


# -- drawing -----------------------------------------------------------------------------------


@contextmanager
def drawing(drawn: Drawn, batches: int, end: Callable[[], BaseException]) -> Iterator[None]:
    """Collect the model's inputs and targets, and raise `end()` at the first step with enough.

    At earlier optimizer steps, the gradients are dropped, so the parameters do not change.

    Args:
        drawn: filled with tensors.
        batches: number of batches to draw.
        end: creates the exception that ends the program.
    """
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils.data import DataLoader

    from comgra_decl.hooks.patches import Patch

    watch = _Watch(drawn, batches, end)
    patch = Patch(DataLoader, "__iter__", watch.loaded)
    handles = [
        register_module_forward_pre_hook(watch.enter),
        register_module_forward_hook(watch.leave, always_call=True),
        register_optimizer_step_pre_hook(watch.step),
    ]
    patch.apply()
    try:
        with _losses(watch.compared):
            yield
    finally:
        patch.restore()
        for handle in handles:
            handle.remove()


def _losses(compared: Callable[[str, Any], None]) -> Any:
    """Return a mode that reports the target of each call of a loss function."""
    from comgra_decl.hooks.modes import CallWatch
    from comgra_decl.hooks.tensors.loss_calls import target_argument

    class Losses(CallWatch):
        def handle(
            self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            known = target_argument(func)
            if known is not None:
                name, at = known
                compared(func.__name__, kwargs.get(name, args[at] if at < len(args) else None))
            return func(*args, **kwargs)

    return Losses()


class _Watch:
    """Observes a program until enough batches are drawn."""

    def __init__(self, drawn: Drawn, batches: int, end: Callable[[], BaseException]) -> None:
        self._drawn, self._batches, self._end = drawn, batches, end
        self._depth = 0
        self._model: Any = None
        self._loaded: list[tuple[str, torch.Tensor]] = []
        self._done = 0

    def loaded(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Remember the tensors of a DataLoader's newest batch."""
        from comgra_decl.hooks.pytree import tensors_in

        for batch in original(loader):
            self._loaded = tensors_in(batch, "batch")
            yield batch

    def enter(self, module: Any, args: Any) -> None:
        """Collect the inputs of a call of the model in training."""
        import inspect

        import torch

        from comgra_decl.hooks.call_context import torch_variable
        from comgra_decl.hooks.module_tree import has_parameters

        self._depth += 1
        if self._depth > 1:
            self._note_convolution(module, args)
            return
        trains = module.training and torch.is_grad_enabled() and has_parameters(module)
        if not trains or self._model not in (None, module):
            return
        if self._done >= self._batches:
            return
        self._model = module
        self._done += 1
        frame = inspect.currentframe()  # a global hook is not given the keyword arguments
        caller = None if frame is None else frame.f_back
        kwargs = {} if caller is None else torch_variable(caller, "kwargs") or {}
        inputs = _inputs(module, args, kwargs)
        for label, tensor in inputs:
            self._keep(label, tensor)
        self._note_convolution(module, args)
        values = {_content(tensor) for _, tensor in inputs} if self._loaded else set()
        for path, tensor in self._loaded:
            if _content(tensor) not in values:
                self._keep(f"{path} (not passed to the model)", tensor)
        self._loaded = []

    def _note_convolution(self, module: Any, args: Any) -> None:
        """Note which input a convolution receives: the one with the shape of its argument."""
        from torch import nn

        kinds = (nn.Conv2d, nn.ConvTranspose2d)
        if not isinstance(module, kinds) or not args or args[0].ndim != 4:
            return
        shape = tuple(args[0].shape)
        for label, batches in self._drawn.tensors.items():
            if batches and batches[-1].shape == shape and shape[1] == module.in_channels:
                self._drawn.convolved.add(label)

    def leave(self, *_: Any) -> None:
        """Handle the end of a module call."""
        self._depth -= 1

    def compared(self, function: str, target: Any) -> None:
        """Collect the target of a loss."""
        import torch

        label = f"target of {function}"
        known = len(self._drawn.tensors.get(label, ()))
        if isinstance(target, torch.Tensor) and known < self._done:
            same = _content(target)
            for other, batches in [*self._drawn.tensors.items()]:
                beside = other.endswith("(not passed to the model)")
                if beside and batches and _content_of(batches[-1]) == same:
                    batches.pop()  # now it is known what it is
                    if not batches:
                        del self._drawn.tensors[other]
            self._keep(label, target)

    def step(self, optimizer: Any, *_: Any) -> None:
        """End the program, or skip the step to draw another batch."""
        if self._done >= self._batches:
            raise self._end()
        self._drawn.skipped += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # the optimizers of torch skip such parameters

    def _keep(self, label: str, tensor: torch.Tensor) -> None:
        import torch

        from comgra_decl.stats.support import is_readable

        if not is_readable(tensor):
            return
        plain = tensor.detach().to("cpu", copy=True)
        if plain.dtype is torch.bfloat16:
            plain = plain.to(torch.float32)
        self._drawn.tensors.setdefault(label, []).append(plain.numpy())


def _inputs(module: Any, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors passed to a module, named after the parameters of its `forward`."""
    import inspect

    from comgra_decl.hooks.pytree import tensors_in

    try:
        names = [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError):
        names = []
    found = []
    for number, value in enumerate(args):
        name = names[number] if number < len(names) else str(number)
        found += tensors_in(value, f"input {name}")
    for name, value in kwargs.items():
        found += tensors_in(value, f"input {name}")
    return found


def _content(tensor: torch.Tensor) -> bytes:
    """Return a digest of the values of a tensor, on any device and of any dtype."""
    import torch

    plain = tensor.detach().cpu()
    plain = plain.to(torch.float32) if plain.dtype.is_floating_point else plain
    return _content_of(plain.numpy())


def _content_of(values: Array) -> bytes:
    kind = np.float32 if values.dtype.kind == "f" else values.dtype
    plain = np.ascontiguousarray(values, kind)
    return hashlib.sha256(repr(plain.shape).encode() + plain.tobytes()).digest()
