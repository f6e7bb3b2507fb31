"""The samples and the copy of the model, as the picture methods use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.plans import facts_of
from comgra_decl.hooks.probing.copying import CleanCopy, Watch
from comgra_decl.hooks.probing.packing import with_packed_weights
from comgra_decl.hooks.probing.places import with_copies, with_tensor
from comgra_decl.hooks.probing.samples import Samples, widened
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.spec.axes import Layouts
from comgra_decl.spec.nodes import Selectors
from comgra_decl.spec.pictures import TokenTarget
from comgra_decl.spec.selectors import is_selected, misses
from comgra_decl.torch_private import torch_pytree

_TOKENS = (
    ". The built-in methods also explain a token at a position: "
    "`target: {token: top, position: -1}`"
)

Target = int | str | TokenTarget
"""A class, "label", "top", "loss" or a token, as in the spec."""


@dataclass
class Tap:
    """Captures the outputs of selected modules, and where their gradients arrive, during a call.

    Outputs are copied when they are returned, because a later operation may change them in place.
    Their edges are those of the same moment.

    Attributes:
        paths: the modules.
        outputs: a copy of the first tensor of numbers that each module returns, such as the first
            one of a tuple, in the order of the calls.
        channels: the dimension of the channels of each of these outputs.
        edges: where the gradients of these outputs arrive, for `torch.autograd.grad`. Outputs
            without history have one as well.
        replace: values to use instead of the first output of a module.
    """

    paths: frozenset[str]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    edges: dict[str, GradientEdge] = field(default_factory=dict)
    replace: dict[str, torch.Tensor] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    _layouts: Layouts = field(default_factory=Layouts)

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Do nothing at the beginning of a call."""

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Take an output, or replace it."""
        found = next((t for _, t in tensors_in(output) if t.is_floating_point()), None)
        if found is None or path in self.outputs:
            return output
        channels = 0
        if found.dim() > 1:
            class_ = type(module).__name__
            channels = 1 + self._layouts.unit_dim(found.shape[1:], node=path, module_class=class_)
        if path not in self.paths:
            return output
        self.channels[path] = channels
        tapped = self._tapped(path, found)
        return output if tapped is found else with_tensor(output, found, tapped)

    def _tapped(self, path: str, output: torch.Tensor) -> torch.Tensor:
        output = self.replace.get(path, output)
        if torch.is_grad_enabled() and not output.requires_grad and output.is_floating_point():
            leaf = output.detach().requires_grad_()
            output = leaf.clone()  # unlike a view, the model may write to it
        self.outputs[path] = output.detach().clone()
        if output.requires_grad:
            self.edges[path] = get_gradient_edge(output)  # the model may change it in place later
        return output


@dataclass(frozen=True)
class Point:
    """What a picture of the input explains: an argument, or the first embedding's output.

    Attributes:
        node: the path of the embedding; None for an argument of the model.
        role: the role of the tensor, such as "input" or "output".
        value: the tensor itself, [samples, ...].
    """

    node: str | None
    role: str
    value: torch.Tensor
    place: str = ""


@dataclass(frozen=True)
class Unchanged:
    """What the first pass of the samples has returned, which changes nothing.

    Attributes:
        output: the output of the model, in tensors of its own.
        embedded: the output of the embedding that was called first; None if none was called.
    """

    output: Any
    embedded: Point | None


@dataclass(frozen=True)
class Map:
    """One part of a picture.

    Attributes:
        node: the path of the module that it belongs to; None for the model's input.
        role: the role of the tensor in this node.
        values: [samples, ...]; any shape if it belongs to all samples together.
        per_sample: whether the first dimension of `values` is that of the samples.
    """

    node: str | None
    role: str
    values: torch.Tensor
    per_sample: bool = True


@dataclass(frozen=True)
class Drawn:
    """The result of a method.

    Attributes:
        maps: one map, or one for each selected layer.
        facts: further facts, in the form of `records.PICTURES`.
    """

    maps: list[Map]
    facts: dict[str, Any] = field(default_factory=dict)


class Subject:
    """A copy of the model and the samples that go through it.

    Args:
        copy: the copy, which is called many times.
        samples: the samples.

    Attributes:
        rewind: puts the copy and all generators back into the state before the first pass.
        facts: what is explained, in the form of `records.PICTURES`.
    """

    def __init__(self, copy: CleanCopy, samples: Samples) -> None:
        self.copy = copy
        self.samples = samples
        self.rewind: Callable[[], None] = lambda: None
        self.facts: dict[str, Any] = {}
        self._unchanged: Unchanged | None = None
        self._classes = None if samples.classes is None else samples.classes.to(copy.device)

    def check_gradients(self) -> None:
        """Raise ProbeError if gradients end in a layer, so that those before it would be wrong."""
        hidden = with_packed_weights(self.copy.module)
        if hidden is not None:
            raise ProbeError(f"gradients end in {hidden}, a quantized layer, which has none")

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch | None) -> Any:
        """Return the output of the copy, which starts from the same state each time."""
        self.rewind()
        return self.copy.run(args, kwargs, watch=watch)

    def observe(self, watch: Watch | None = None) -> Unchanged:
        """Make the first pass, which is that of the record; pictures reuse what it returns."""
        args, kwargs = self.samples.to(self.copy.device)
        first = _FirstEmbedding(watch)
        with torch.no_grad():
            output = with_copies(self.run(args, kwargs, first))  # it may be a buffer
        self._unchanged = Unchanged(output, first.point)
        return self._unchanged

    @property
    def unchanged(self) -> Unchanged:
        """What the first pass has returned."""
        return self._unchanged or self.observe()

    def scores(self) -> torch.Tensor:
        """Return the outputs in the first pass, as `call` does.

        Raises:
            ProbeError: the model returns something else.
        """
        return self.scores_of(self.unchanged.output)

    def call(self, point: Point | None = None, tap: Tap | None = None) -> torch.Tensor:
        """Return the outputs of the model, [samples] or [samples, classes].

        Args:
            point: a value to use in its place.
            tap: reads the outputs of modules.

        Raises:
            ProbeError: the model returns something else.
        """
        if point is not None and point.node is not None:
            tap = Tap(frozenset({point.node}), replace={point.node: point.value})
            point = None
        return self.scores_of(self.output(point, tap))

    def output(self, point: Point | None, watch: Watch | None) -> Any:
        """Return what the model returns, with an argument replaced by the value of a point."""
        args, kwargs = self.samples.to(self.copy.device)
        if point is not None:
            args, kwargs = _replaced(args, kwargs, point)
        return self.run(args, kwargs, watch)

    def selected(self, select: Selectors) -> list[str]:
        """Return the paths of the modules that a picture selects, in the order of the model.

        Raises:
            ProbeError: there are none; the message states which patterns match nothing.
        """
        modules = {self.copy.paths[id(m)]: m for m in self.copy.module.modules()}
        facts = [facts_of(path, module) for path, module in modules.items()]
        paths = [each.path for each in facts if is_selected(select, each)]
        if not paths:
            why = "; ".join(misses("select", select, facts))
            raise ProbeError(why or "select: matches no module of the model")
        return paths

    def trained(self, select: Selectors) -> list[nn.Parameter]:
        """Return the parameters that require a gradient: all, or those of the selected modules.

        Raises:
            ProbeError: there are none.
        """
        of = [*self.copy.module.modules()]
        if select:
            paths = {*self.selected(select)}
            of = [module for module in of if self.copy.paths[id(module)] in paths]
        found = {id(p): p for module in of for p in module.parameters(recurse=False)}
        parameters = [p for p in found.values() if p.requires_grad]
        if not parameters:
            whose = "the selected modules have no parameters of their own" if select else ""
            raise ProbeError(f"{whose or 'the model has no parameters'} that require a gradient")
        return parameters

    def scores_of(self, output: Any) -> torch.Tensor:
        """Return the tensor in an output that contains one number per sample, or one per class.

        It is at least float32, so that what is computed from it is not rounded to fewer digits.
        """
        size = len(self.samples)
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.dim() and tensor.shape[0] == size:
                if tensor.dim() > 2:
                    raise ProbeError(
                        f"the model returns {list(tensor.shape)}; pictures explain outputs of the "
                        "form [samples, classes] or [samples]"
                        + (_TOKENS if tensor.dim() == 3 else "")
                    )
                return self.columns(tensor)
        raise ProbeError("the model returns no tensor with one entry per sample")

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [batch] or [batch, classes], at least in float32, of a tensor that has them."""
        tensor = widened(tensor)
        return tensor[:, 0] if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor

    def point(self) -> Point:
        """Return the tensors that pictures of the input explain.

        Raises:
            ProbeError: the model receives neither floating-point numbers nor tokens.
        """
        args, kwargs = self.samples.to(self.copy.device)
        given = [*tensors_in(args), *tensors_in(kwargs)]
        for path, tensor in given:
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(self.samples):
                role = "input" if path == "[0]" else f"input{path}"
                return Point(None, role, tensor, path)
        if self.unchanged.embedded is None:
            raise ProbeError("the model receives neither floating-point inputs nor tokens to embed")
        return self.unchanged.embedded

    def classes(self, target: Target) -> torch.Tensor | None:
        """Return the class that the picture of each sample explains; None if there are no classes.

        Raises:
            ProbeError: the classes are unknown or do not exist.
        """
        scores = self.scores()
        if scores.dim() == 1:
            return None
        if target == "top":
            return scores.argmax(1)
        if isinstance(target, int):
            found = torch.full((len(scores),), target, device=scores.device)
        elif self._classes is None:
            raise ProbeError(
                "the classes of the samples are unknown, because no loss received one integer per "
                "sample. Use `target: top`, a number, or `labels`"
            )
        else:
            found = self._classes
        if found is self._classes and bool((found < 0).any()):
            without = ", ".join(map(str, torch.nonzero(found < 0)[:, 0].tolist()))
            raise ProbeError(f"samples {without} have no class; use `target: top` or a number")
        beyond = found[(found < 0) | (found >= scores.shape[1])]
        if len(beyond):
            raise ProbeError(
                f"class {int(beyond[0])} does not exist; the model has {scores.shape[1]} classes"
            )
        return found

    def explained(
        self, scores: torch.Tensor, classes: torch.Tensor | None, target: Target
    ) -> torch.Tensor:
        """Return the number that a picture explains, for each sample."""
        if classes is None:
            return scores
        if target == "loss":
            return F.cross_entropy(scores, classes, reduction="none")
        return scores.gather(1, classes[:, None])[:, 0]


class _FirstEmbedding:
    """Keeps a copy of what the first embedding returns.

    Args:
        inner: observes the same calls.
    """

    def __init__(self, inner: Watch | None) -> None:
        self.point: Point | None = None
        self._inner = inner

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pass the call on."""
        return None if self._inner is None else self._inner.before(path, module, args, kwargs)

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Keep the output, and return it unchanged."""
        if self.point is None and isinstance(module, nn.Embedding):
            self.point = Point(path, "output", output.detach().clone())
        return output if self._inner is None else self._inner.after(path, module, output)


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], point: Point
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = next(t for p, t in [*tensors_in(args), *tensors_in(kwargs)] if p == point.place)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return point.value if tensor is found else tensor

    replaced: tuple[tuple[Any, ...], dict[str, Any]] = torch_pytree.tree_map_only(
        torch.Tensor, other, (args, kwargs)
    )
    return replaced
