"""The logit lens: a model's last norm and head, applied to the output of any layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.errors import ProbeError, did_you_mean
from comgra_decl.hooks.modes import CallWatch
from comgra_decl.hooks.probing.loading import tensors_in_file
from comgra_decl.hooks.probing.places import with_tensor
from comgra_decl.hooks.probing.subject import Subject
from comgra_decl.hooks.pytree import tensors_in

_HOW = "name it in the picture, as in {}: {}"


class Lens:
    """The layers of a model seen through its last norm and its head.

    What the model computes between them and after the head, such as a scale or a softcap, is part
    of the lens, except for changes of the shape.

    Args:
        subject: the copy of the model and the samples.
        layers: the paths of the layers.
        norm: the path of the norm; None to find it.
        head: the path of the head; None to find it.
        translators: the path of a file of affine maps, which make it a tuned lens; None for none.

    Attributes:
        norm: the path of the norm; None if the head receives the last layer's output as it is.
        head: the path of the head.
        final: the logits of the model itself, [samples, positions, tokens].

    Raises:
        ProbeError: the model has no such norm or head; the message says what to declare.
    """

    def __init__(
        self,
        subject: Subject,
        layers: Sequence[str],
        *,
        norm: str | None,
        head: str | None,
        translators: str | None = None,
    ) -> None:
        self._modules = {subject.copy.paths[id(m)]: m for m in subject.copy.module.modules()}
        for key, path in (("norm", norm), ("head", head)):
            if path is not None and path not in self._modules:
                hint = did_you_mean(path, self._modules)
                raise ProbeError(f"the model has no module {path!r} for `{key}`{hint}")
        named = frozenset(path for path in (norm, head) if path is not None)
        self._watch = watch = _Calls(frozenset(layers), named, head)
        args, kwargs = subject.samples.to(subject.copy.device)
        with watch.from_norm, watch.from_head:
            output = subject.run(args, kwargs, watch)
        self.head = head if head is not None else watch.last_linear()
        called = watch.calls.get(self.head)
        if called is None:
            raise ProbeError(f"the head {self.head!r} was not called with a tensor")
        self.norm = norm if norm is not None else watch.norm_before(called)
        self._between = called.from_norm if self.norm == called.norm else []
        self._after = watch.after_head(output)
        if called.output.shape[-1] < 2:
            raise ProbeError(
                f"{self.head!r} returns one number at each position, so it does not predict "
                f"tokens; {_HOW.format('head', 'lm_head')}"
            )
        for path in layers:
            if path not in watch.outputs:
                raise ProbeError(f"{path} was not called, or returns no floating-point tensor")
        self.final = _applied(self._after, self._modules[self.head](called.given))
        self._maps = {} if translators is None else _translators(translators, watch.outputs)

    def predictions(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path, logits) for each layer in the order of the calls.

        The logits are [samples, positions, tokens].
        """
        for path, hidden in self._watch.outputs.items():
            try:
                translate = self._maps.get(path)
                given = hidden if translate is None else F.linear(hidden, *translate)
                seen = given if self.norm is None else self._modules[self.norm](given)
                logits = self._modules[self.head](_applied(self._between, seen))
                logits = _applied(self._after, logits)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                through = " and ".join(filter(None, (self.norm, self.head)))
                raise ProbeError(
                    f"the output of {path}, {list(hidden.shape)}, does not go through {through}: "
                    f"{error}"
                ) from None
            yield path, logits


def equal_layers(subject: Subject) -> list[str]:
    """Return the paths of the longest stack of layers: modules of one class in a list.

    If there are several lists, the one with the most parameters counts.

    Raises:
        ProbeError: the model has no list of at least two such modules.
    """
    paths = subject.copy.paths
    lists = [
        [*module]
        for module in subject.copy.module.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
    ]
    sizes = {
        i: sum(p.numel() for layer in layers for p in layer.parameters())
        for i, layers in enumerate(lists)
        if len({type(layer) for layer in layers}) == 1
    }
    if not any(sizes.values()):
        raise ProbeError(
            "the model has no nn.ModuleList of equal layers; name them, as in select: "
            "transformer.h.*"
        )
    return [paths[id(layer)] for layer in lists[max(sizes, key=sizes.__getitem__)]]


def _translators(
    name: str, outputs: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the weight and bias that translate the output of each layer."""
    found, maps = tensors_in_file(name), {}
    for path, output in outputs.items():
        weight, bias = found.get(f"{path}.weight"), found.get(f"{path}.bias")
        if weight is None:
            raise ProbeError(
                f"{name} has no '{path}.weight'{did_you_mean(f'{path}.weight', found)}; it must "
                "contain a weight for each selected layer"
            )
        size = output.shape[-1]
        fits = weight.shape == (size, size) and (bias is None or bias.shape == (size,))
        if not fits:
            given = "" if bias is None else f" and a bias of shape {list(bias.shape)}"
            raise ProbeError(
                f"{name} has a weight of shape {list(weight.shape)}{given} for {path}, whose "
                f"output has {size} features"
            )
        maps[path] = weight.to(output), None if bias is None else bias.to(output)
    return maps


class _Step(NamedTuple):
    """A call of a function that has computed one tensor from another."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: torch.Tensor
    result: torch.Tensor


class _Steps(CallWatch):
    """Remembers what is computed from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}
        self._steps: list[_Step] = []

    def begin(self, tensor: torch.Tensor) -> None:
        """Forget the earlier steps, and remember those that begin with a tensor."""
        self._known, self._steps = {id(tensor): tensor}, []

    def handle(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function, and remember it if it receives one of the tensors."""
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            given = (*args, *kwargs.values())
            source = next((t for t in given if id(t) in self._known), None)
            if source is not None:
                self._steps.append(_Step(func, args, kwargs, source, result))
                self._known[id(result)] = result
        return result

    def to(self, tensor: torch.Tensor) -> list[_Step] | None:
        """Return the steps from the first tensor to another; None if there are none."""
        if id(tensor) not in self._known:
            return None
        found = []
        for step in reversed(self._steps):  # an operation in place returns what it received
            if step.result is tensor:
                found.append(step)
                tensor = step.source
        return found[::-1]


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, also a quantized one."""
    return isinstance(module, nn.Linear) or (
        type(module).__name__.endswith("Linear") and hasattr(module, "out_features")
    )


def _scales(step: _Step) -> bool:
    """Return whether a step depends on nothing but its tensor and numbers, unlike a layer."""
    others = [t for _, t in (*tensors_in(step.args), *tensors_in(step.kwargs))]
    return all(tensor is step.source or not tensor.dim() for tensor in others)


def _applied(steps: Sequence[_Step], value: torch.Tensor) -> torch.Tensor:
    """Apply steps to another value, except slices and the like, and the softmax that follows."""
    for step in steps:
        softmax = getattr(step.func, "__name__", "") == "softmax"
        if step.result.shape == step.source.shape and not softmax:
            args = with_tensor(step.args, step.source, value)
            value = step.func(*args, **with_tensor(step.kwargs, step.source, value))
    return value


class _Call:
    """A call of a module with one tensor, by position or by name.

    Attributes:
        norm: the norm from whose output the tensor was computed; None if there is none.
        from_norm: the steps from there to the tensor.
    """

    def __init__(
        self,
        given: torch.Tensor,
        output: torch.Tensor,
        *,
        is_norm: bool,
        norm: str | None,
        from_norm: list[_Step],
    ) -> None:
        self.given = given
        self.output = output
        self.is_norm = is_norm
        self.norm = norm
        self.from_norm = from_norm


class _Calls:
    """Keeps the outputs of layers, and what norms and linear layers receive and return."""

    def __init__(self, layers: frozenset[str], named: frozenset[str], head: str | None) -> None:
        self.from_norm, self.from_head = _Steps(), _Steps()
        self._head = head
        self._norm: str | None = None  # the last one that was called
        self._path: dict[str, tuple[str | None, list[_Step]]] = {}
        self._layers = layers
        self._named = named  # the norm and the head, if the picture names them
        self._given: dict[str, torch.Tensor] = {}
        self._linear: list[str] = []
        self.outputs: dict[str, torch.Tensor] = {}
        self.calls: dict[str, _Call] = {}

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Keep the first tensor that a module receives."""
        given = [t for _, t in (*tensors_in(args), *tensors_in(kwargs)) if t.is_floating_point()]
        if given:
            self._given[path] = given[0]
            steps = self.from_norm.to(given[0])
            scales = steps is not None and all(_scales(step) for step in steps)
            self._path[path] = (self._norm, steps) if steps is not None and scales else (None, [])

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Keep an output, and return it unchanged."""
        first = next((t for _, t in tensors_in(output) if t.is_floating_point()), None)
        given = self._given.pop(path, None)
        if first is None:
            return output
        if path in self._layers and path not in self.outputs:
            self.outputs[path] = first.detach().clone()
        norm, linear = "norm" in type(module).__name__.lower(), _is_linear(module)
        if given is not None and (norm or linear or path in self._named):
            self.calls.pop(path, None)  # the last call counts
            before, steps = self._path[path]
            self.calls[path] = _Call(given, first, is_norm=norm, norm=before, from_norm=steps)
            if linear:
                self._linear.append(path)
            if norm:
                self._norm = path
                self.from_norm.begin(first)
            if path == self._head or (linear and self._head is None):
                self.from_head.begin(first)
        return output

    def after_head(self, output: Any) -> list[_Step]:
        """Return what the model has computed from the output of its head to return it."""
        for _, tensor in tensors_in(output):
            steps = self.from_head.to(tensor)
            if steps is not None and tensor.is_floating_point() and tensor.dim() > 1:
                return steps
        return []

    def last_linear(self) -> str:
        """Return the path of the linear layer that was called last."""
        if not self._linear:
            raise ProbeError(f"the head was not found; {_HOW.format('head', 'lm_head')}")
        return self._linear[-1]

    def norm_before(self, head: _Call) -> str | None:
        """Return the path of the norm whose output a head received; None if it received a layer's.

        The head may receive a part of it, such as the last position.
        """
        if head.norm is not None:
            return head.norm
        storage = head.given.untyped_storage().data_ptr()
        for path, call in reversed(self.calls.items()):
            if call.output.untyped_storage().data_ptr() == storage and call.is_norm:
                return path
        if any(torch.equal(head.given, hidden) for hidden in self.outputs.values()):
            return None
        raise ProbeError(
            "the last norm was not found, because the head receives the output of another module; "
            + _HOW.format("norm", "transformer.ln_f")
        )
