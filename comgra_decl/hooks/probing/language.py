"""What a token that a language model predicts depends on: targets, covered tokens and attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.functions.attention import FusedCall, recomputed_weights
from comgra_decl.hooks.probing.patterns import AttentionCalls
from comgra_decl.hooks.probing.samples import mapped, widened
from comgra_decl.hooks.probing.subject import Point, Subject, Target
from comgra_decl.hooks.pytree import gradient_function, tensors_in
from comgra_decl.hooks.tensors.loss_calls import function_name
from comgra_decl.spec.pictures import (
    AttentionRolloutSpec,
    OcclusionSpec,
    TokenBaseline,
    TokenTarget,
)


class TokenSubject(Subject):
    """A subject whose outputs are those for the tokens at one position.

    Args:
        of: the copy of the model and the samples.
        target: the token that is explained, at a single position.

    Attributes:
        other: the token whose output is subtracted, for each sample; None for none.
    """

    def __init__(self, of: Subject, target: TokenTarget) -> None:
        super().__init__(of.copy, of.samples)
        self.rewind = of.rewind
        self.facts = {"score": target.score}
        assert isinstance(target.position, int)  # see `by_position`
        self._unchanged = of.unchanged
        self._target = target
        self._position = target.position
        self._length = 0
        self.other: torch.Tensor | None = None

    def scores_of(self, output: Any) -> torch.Tensor:
        """Return the outputs for all tokens, [samples, tokens], at least in float32."""
        size = len(self.samples)
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point() and tensor.dim() > 1 and len(tensor) == size:
                if tensor.dim() > 3:
                    break
                return self.columns(tensor)
        raise ProbeError(
            "a token is explained if the model returns [samples, positions, tokens] or [samples, "
            "classes], which this model does not"
        )

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the outputs at the explained position, [batch, tokens], at least in float32."""
        scores = widened(self._placed(tensor))
        return scores.log_softmax(1) if self._target.score != "logit" else scores

    @property
    def length(self) -> int:
        """The number of positions in the output of the last call; 0 if there are none."""
        return self._length

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2:
            return tensor
        self._length, position = tensor.shape[1], self._position
        if not -self._length <= position < self._length:
            raise ProbeError(
                f"position {position} does not exist; the model returns {self._length}"
            )
        return tensor[:, position]

    def classes(self, target: Target) -> torch.Tensor | None:
        """Return the token that is explained for each sample.

        Raises:
            ProbeError: there is no such token.
        """
        scores, wanted = self.scores(), self._target
        if wanted.token == "top":
            found = scores.argmax(1)
        elif wanted.token == "next":
            found = self._next().to(scores.device)
        else:
            found = self._listed(wanted.token, scores)
        if wanted.rather_than is not None:
            self.other = self._listed(wanted.rather_than, scores)
            self.facts["rather_than"] = self.other.tolist()
        if self._length:
            self.facts["position"] = self._position
        named = [*found.tolist(), *self.facts.get("rather_than", ())]
        wrong = [token for token in named if not 0 <= token < scores.shape[1]]
        if wrong:
            raise ProbeError(f"token {wrong[0]} does not exist; the model has {scores.shape[1]}")
        return found

    def _listed(self, tokens: int | Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        if isinstance(tokens, int):
            return torch.full((len(scores),), tokens, device=scores.device)
        if len(tokens) != len(scores):
            raise ProbeError(f"{len(tokens)} tokens are given for {len(scores)} samples")
        return torch.tensor(tokens, device=scores.device)

    def _next(self) -> torch.Tensor:
        """Return the token of the input that follows the explained position."""
        place = self._position % self._length + 1 if self._length else 0
        given = [*tensors_in(self.samples.args), *tensors_in(self.samples.kwargs)]
        for _, tensor in given:
            usable = tensor.dtype == torch.int64 and tensor.shape[1:] == (self._length,)
            if usable and place < self._length:
                return tensor[:, place]
        raise ProbeError(
            f"no token of the input follows position {self._position}; name the `token`, or "
            "choose an earlier `position`"
        )

    def explained(
        self, scores: torch.Tensor, classes: torch.Tensor | None, target: Target
    ) -> torch.Tensor:
        """Return the output for the token, minus that for the other one, [samples]."""
        assert classes is not None  # see `classes`
        found = scores.gather(1, classes[:, None])
        if self.other is not None:
            found = found - scores.gather(1, self.other[:, None])
        return found[:, 0]


def by_position(target: TokenTarget, subject: Subject) -> Iterator[tuple[int, TokenTarget]]:
    """Yield each explained position, counted from 0, with the target at this position alone.

    Raises:
        ProbeError: the model has no positions, or not this one.
    """
    probing = TokenSubject(subject, target.model_copy(update={"position": 0}))
    with torch.no_grad():
        probing.call()
    if not probing.length:
        raise ProbeError(
            f"position: {target.position} needs a model that returns [samples, positions, tokens]"
        )
    for position in _positions(target.position, probing.length, omit=target.token == "next"):
        yield position, target.model_copy(update={"position": position})


def _positions(wanted: str | int | list[int], size: int, *, omit: bool = False) -> list[int]:
    """Return positions, counted from 0.

    Args:
        wanted: "all", a position or a list.
        size: the number of positions.
        omit: whether "all" omits the last one.

    Raises:
        ProbeError: there is no such position.
    """
    if isinstance(wanted, str):
        return [*range(size - omit)]
    listed = wanted if isinstance(wanted, list) else [wanted]
    for position in listed:
        if not -size <= position < size:
            raise ProbeError(f"position {position} does not exist; there are {size}")
    return [position % size for position in listed]


# -- covered tokens ----------------------------------------------------------------------------


def covered_tokens(
    spec: OcclusionSpec, subject: Subject, point: Point, classes: torch.Tensor | None
) -> torch.Tensor:
    """Return the mean drop in the explained number over the windows that cover each token.

    Args:
        spec: the picture.
        subject: the copy of the model and the samples.
        point: the embedding's output, [samples, positions, ...].
        classes: the class that is explained for each sample.

    Returns:
        [samples, positions].

    Raises:
        ProbeError: the window or the token does not fit.
    """
    value = point.value
    if len(spec.window) > 1 or value.dim() < 3:
        raise ProbeError(
            f"the input is tokens, so that a window covers positions: write `window: [1]` instead "
            f"of {spec.window}"
        )
    size, width = value.shape[1], spec.window[0]
    if width > size:
        raise ProbeError(f"a window of {width} positions does not fit: the input has {size}")
    cover = _cover(spec, subject, point)
    with torch.no_grad():
        whole = subject.explained(subject.scores(), classes, spec.target)
        total = torch.zeros(value.shape[:2], dtype=whole.dtype, device=value.device)
        times = torch.zeros(size, dtype=whole.dtype, device=value.device)
        begin = 0
        while True:
            here = slice(begin, begin + width)
            hidden = value.clone()
            hidden[:, here] = cover
            scores = subject.call(replace(point, value=hidden))
            total[:, here] += (whole - subject.explained(scores, classes, spec.target))[:, None]
            times[here] += 1
            if begin + width >= size:
                return total / times
            begin += spec.stride


def _cover(spec: OcclusionSpec, subject: Subject, point: Point) -> torch.Tensor | float:
    """Return what replaces the embedding of a token."""
    if spec.baseline == "mean":
        return point.value.mean(1, keepdim=True)
    if not isinstance(spec.baseline, TokenBaseline):
        assert isinstance(spec.baseline, (int, float))
        return float(spec.baseline)
    modules = {subject.copy.paths[id(m)]: m for m in subject.copy.module.modules()}
    embedding = modules[point.node or ""]
    assert isinstance(embedding, nn.Embedding)  # see `Subject.point`
    token = spec.baseline.token
    if token >= embedding.num_embeddings:
        raise ProbeError(
            f"token {token} does not exist; {point.node} has {embedding.num_embeddings}"
        )
    with torch.no_grad():
        found: torch.Tensor = embedding(torch.tensor([token], device=point.value.device))
    return found


# -- attention rollout -------------------------------------------------------------------------


def attention_rollout(spec: AttentionRolloutSpec, subject: Subject) -> torch.Tensor:
    """Return the attention of positions to each position of the input.

    With the weights A of a layer, as means over heads, and the share r of the residual connection,
    each layer mixes positions by r I + (1 - r) A, with rows that are divided by their sum. The
    result is the product over the layers, the last one on the left (Abnar and Zuidema 2020).

    Returns:
        [samples, attending positions, positions].

    Raises:
        ProbeError: the model has no self-attention whose weights can be read.
    """
    args, kwargs = _connected(subject.samples.to(subject.copy.device))
    watch = _AskForWeights(len(subject.samples))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its kernel bypasses modules and functions
    try:
        with torch.enable_grad(), _trainable(subject.copy.module), _ReadWeights(watch):
            subject.run(args, kwargs, watch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if watch.crosses:
        raise ProbeError(
            "the model has cross-attention: its keys are computed from another tensor than its "
            "queries. Attention rollout is defined for a single stack of self-attention"
        )
    layers = watch.weights
    if not layers:
        raise ProbeError(
            "the model has no self-attention whose weights can be read. They are read from "
            "nn.MultiheadAttention, scaled_dot_product_attention and softmax"
        )
    sizes = {len(weights[0]) for weights in layers}
    if len(sizes) > 1:
        raise ProbeError(
            f"attention rollout needs as many positions in each layer, but there are "
            f"{', '.join(map(str, sorted(sizes)))}"
        )
    (size,) = sizes
    positions = _positions(spec.position, size)
    same = torch.eye(size, dtype=torch.float64, device=layers[0].device)
    rolled = same.expand(len(layers[0]), size, size)
    for weights in layers:
        mixed = spec.residual * same + (1 - spec.residual) * weights.double()
        rolled = mixed / mixed.sum(-1, keepdim=True) @ rolled
    return rolled[:, positions].to(torch.float32)


def _connected(
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments such that autograd connects what is computed from them.

    They are no leaves, because a model may change its input in place.
    """
    with torch.enable_grad():
        found: tuple[tuple[Any, ...], dict[str, Any]] = mapped(
            arguments, lambda t: t.requires_grad_().clone() if t.is_floating_point() else t
        )
    return found


@contextmanager
def _trainable(module: nn.Module) -> Iterator[None]:
    """Let autograd also connect what is computed from frozen parameters of a copy."""
    frozen = [p for p in module.parameters() if p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


_PROJECTIONS = frozenset(
    """
    Add Addmm Alias Bmm Cat Clone Convolution Div Expand FusedRmsNorm Index Mean Mm Mul
    NativeBatchNorm NativeLayerNorm Neg Permute Pow Repeat ReshapeAlias Roll Rsqrt Select Slice
    Split SplitWithSizes Sqrt Squeeze Stack Sub T ToCopy Transpose Unbind UnsafeView Unsqueeze View
    ViewAsComplex ViewAsReal
    """.split()
)
"""Operations by which queries and keys are computed from a layer's input: linear maps, changes of
shape, positional encodings and norms."""

_MOST_OPERATIONS = 300


def _is_cross(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether queries and keys are projections of different tensors.

    False if autograd does not know how they were computed.
    """
    one, other = gradient_function(query), gradient_function(key)
    if query is key or one is None or other is None:
        return False
    return _is_apart(one, other)


def _is_apart(one: Any, other: Any) -> bool:
    """Return whether two autograd nodes have no tensor in common from which both are projected."""
    return not (_sources(one) & _sources(other))


def _sources(node: Any) -> set[Any]:
    """Return the nodes of the tensors of which a node is a projection, including itself."""
    seen, waiting = {node}, [node]
    while waiting and len(seen) < _MOST_OPERATIONS:
        current = waiting.pop(0)
        if function_name(current) not in _PROJECTIONS:
            continue
        following = {n for n, _ in current.next_functions if n is not None} - seen
        following = {n for n in following if n.name() != _LEAF or n.variable.dim() > 2}
        seen |= following
        waiting += following
    return seen


_LEAF = "torch::autograd::AccumulateGrad"
"""The node of a parameter or an input. Weights are not what queries and keys are projected from."""


def _is_cross_product(weights: torch.Tensor) -> bool:
    """Return whether a softmax received the scores of queries and keys of different tensors."""
    node = gradient_function(weights)
    for _ in range(_MOST_OPERATIONS):
        if node is None:
            return False
        parts = [n for n, _ in node.next_functions if n is not None and n.name() != _LEAF]
        if node.name().startswith(("Bmm", "Mm")) and len(parts) == 2:
            return _is_apart(*parts)
        node = parts[0] if parts else None
    return False


_ARGUMENTS = (
    *("query", "key", "value", "key_padding_mask", "need_weights"),
    *("attn_mask", "average_attn_weights", "is_causal"),
)
"""The arguments of `nn.MultiheadAttention` in order."""


class _AskForWeights:
    """Collects the attention weights of each layer, [samples, queries, keys], in order.

    Attributes:
        weights: the weights of self-attention, as means over heads.
        inside: whether a module of torch is called, which returns its own weights.
        crosses: whether there is attention whose queries and keys have different sources.
    """

    def __init__(self, samples: int) -> None:
        self.weights: list[torch.Tensor] = []
        self.inside = False
        self.crosses = False
        self._samples = samples
        self._asked: tuple[bool, ...] = True, True  # for weights, and for their mean over heads

    def take(self, weights: torch.Tensor) -> None:
        """Take the weights of one layer, [samples * heads, ...] or [samples, heads, ...]."""
        square = weights.dim() > 2 and weights.shape[-1] == weights.shape[-2]
        if square and not weights.shape[0] % self._samples:
            by_head = weights.detach().reshape(self._samples, -1, *weights.shape[-2:])
            self.weights.append(widened(by_head).mean(1))

    def before(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Ask torch's module for weights, which it otherwise does not compute."""
        if not isinstance(module, nn.MultiheadAttention):
            return None
        self.inside = True
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        self.crosses |= _is_cross(given["query"], given["key"])
        wanted = {"need_weights": True, "average_attn_weights": False}
        self._asked = tuple(bool(given.get(name, True)) for name in wanted)
        return (), {**given, **wanted}

    def after(self, path: str, module: nn.Module, output: Any) -> Any:
        """Take the weights, and return what the model expects."""
        if not isinstance(module, nn.MultiheadAttention):
            return output
        self.inside = False
        found, weights = output
        self.take(weights)
        asked, averaged = self._asked
        return found, (weights.mean(-3) if averaged else weights) if asked else None


class _ReadWeights(AttentionCalls):
    """Takes the weights of attention that functions compute, unless a module returns them."""

    def __init__(self, watch: _AskForWeights) -> None:
        super().__init__()
        self._watch = watch

    def of_softmax(
        self, result: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Take the weights."""
        if not self._watch.inside:
            self._watch.crosses |= _is_cross_product(result)
            self._watch.take(result)
        return result

    def of_fused(self, result: torch.Tensor, call: FusedCall) -> torch.Tensor:
        """Take the weights, which are recomputed."""
        if not self._watch.inside:
            self._watch.crosses |= _is_cross(call.query, call.key)
            most = call.weights_per_sample
            self._watch.take(recomputed_weights(call, samples=len(call.query), most=most))
        return result
