"""The curvature of a loss in the space of the parameters: both ends and the density of its Hessian.

The Hessian is never formed. Its products with vectors are gradients of a gradient (Pearlmutter
1994), from which the Lanczos algorithm finds eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from comgra_decl.errors import ProbeError
from comgra_decl.hooks.probing.measuring import Gauge
from comgra_decl.hooks.probing.subject import Drawn, Map, Subject
from comgra_decl.hooks.pytree import gradient_function
from comgra_decl.records import EIGENVALUES
from comgra_decl.spec.pictures import HessianSpec

Floats = NDArray[np.float64]

_SEED = 0

_MOST_BYTES = 2 << 30
"""Memory that the vectors of the algorithm may take: one vector per point."""

_ASYMMETRIC = 1e-2
"""Largest difference between v·Hw and w·Hv, relative to the largest eigenvalue. Rounding in float32
usually leaves less than 1e-4, but more than 1e-3 was seen; an operation with a wrong second
derivative, about 1."""


def hessian(spec: HessianSpec, subject: Subject) -> Drawn:
    """Return the ends and the density of the spectrum of the Hessian of the mean loss.

    Raises:
        ProbeError: the loss is unknown, or has no second derivative; the message states why.
    """
    parameters = subject.trained(spec.select)
    _require_precise(parameters)
    size = sum(p.numel() for p in parameters)
    points = min(spec.points, size)
    if spec.top + spec.lowest > points:
        raise ProbeError(
            f"{size} parameters have no {spec.top + spec.lowest} eigenvalues; lower `top`"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    needed = points * size * dtype.itemsize
    if needed > _MOST_BYTES:
        raise ProbeError(
            f"{points} vectors of {size} parameters need {needed / 2**30:.1f} GiB, more than "
            f"{_MOST_BYTES >> 30}; `select` fewer parameters, or use fewer points"
        )
    random = torch.Generator().manual_seed(_SEED)
    with _twice_differentiable(subject.copy.device):
        multiply, value, name = _products(spec, subject, parameters)
        found = []
        for _ in range(spec.vectors):
            start = torch.randn(size, generator=random, dtype=dtype).to(subject.copy.device)
            found.append(lanczos(multiply, start, points, random=random))
    chosen = [*range(points - 1, points - 1 - spec.top, -1), *range(spec.lowest - 1, -1, -1)]
    traces = size * np.array([(each.nodes * each.weights).sum() for each in found])
    error = float(traces.std(ddof=1) / np.sqrt(len(traces))) if len(traces) > 1 else None
    parts = {
        EIGENVALUES: found[0].nodes[chosen],
        f"{EIGENVALUES}.residuals": found[0].residuals[chosen],
        f"{EIGENVALUES}.nodes": np.stack([each.nodes for each in found]),
        f"{EIGENVALUES}.weights": np.stack([each.weights for each in found]),
    }
    maps = [Map("", role, torch.from_numpy(v), per_sample=False) for role, v in parts.items()]
    facts = {
        "method": spec.method,
        "measure": name,
        "value": value,
        "parameters": size,
        "trace": float(traces.mean()),
        "trace_error": error,
    }
    return Drawn(maps, facts)


def _require_precise(parameters: Sequence[nn.Parameter]) -> None:
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        if dtype not in (torch.float32, torch.float64):
            raise ProbeError(
                f"some parameters are {dtype}; second derivatives need float32 or float64"
            )


@contextmanager
def _twice_differentiable(device: torch.device) -> Iterator[None]:
    """Use kernels with second derivatives, unlike fused attention and cuDNN's recurrent layers."""
    with (
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield


_ONCE = "torch::autograd::Error"
"""What torch puts behind the outputs of a backward that is marked with `once_differentiable`."""

Multiply = Callable[[torch.Tensor], torch.Tensor]


def _products(
    spec: HessianSpec,
    subject: Subject,
    parameters: Sequence[nn.Parameter],
) -> tuple[Multiply, float, str]:
    """Return what multiplies the Hessian by a vector, the mean loss, and the name of the loss."""
    args, kwargs = subject.samples.to(subject.copy.device)
    output = subject.run(args, kwargs, None)
    gauge = Gauge(spec, subject.samples, output)
    loss = gauge(output)[0].mean()
    if not loss.requires_grad:
        raise ProbeError("the model's outputs have no gradient")
    gradients = _derived(
        lambda: torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    )
    reached: list[torch.Tensor | None] = [*gradients]
    kept = [(p, g) for p, g in zip(parameters, reached, strict=True) if g is not None]
    if not kept:
        raise ProbeError("the loss does not depend on these parameters")
    curved = [each for each in kept if each[1].requires_grad]
    _require_second([g for _, g in curved])

    def multiply(vector: torch.Tensor) -> torch.Tensor:
        pieces = vector.split([p.numel() for p in parameters])
        of = {
            id(p): piece.reshape(p.shape).to(p.device, p.dtype)
            for p, piece in zip(parameters, pieces, strict=True)
        }
        if not curved:  # the loss is linear in these parameters
            return torch.zeros_like(vector)
        products = _derived(
            lambda: torch.autograd.grad(
                [g for _, g in curved],
                parameters,
                [of[id(p)].to(g.dtype) for p, g in curved],
                retain_graph=True,
                materialize_grads=True,
            )
        )
        return torch.cat([each.detach().reshape(-1).to(vector) for each in products])

    return multiply, float(loss.detach()), gauge.name


def _require_second(gradients: Sequence[torch.Tensor]) -> None:
    """Refuse functions marked with `once_differentiable`, which torch may silently take as 0."""
    waiting = [gradient_function(g) for g in gradients]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        if node is not None:
            if node.name() == _ONCE:
                raise ProbeError(
                    "a custom function of the model has no second derivative, which a Hessian "
                    "needs, because its backward is marked with once_differentiable"
                )
            following = {other for other, _ in node.next_functions} - seen
            seen |= following
            waiting += following


def _derived(compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ProbeError(
            "an operation of the model has no second derivative, which a Hessian needs: "
            f"{str(error).splitlines()[0]}"
        ) from error


@dataclass(frozen=True)
class Ritz:
    """What the Lanczos algorithm finds from one vector.

    Attributes:
        nodes: [points], estimated eigenvalues, ascending.
        weights: [points], the squared component of the vector along each one; their sum is 1.
        residuals: [points], the distance within which each one has an eigenvalue of the matrix, at
            least that of rounding errors.
    """

    nodes: Floats
    weights: Floats
    residuals: Floats


def lanczos(
    multiply: Multiply, start: torch.Tensor, points: int, *, random: torch.Generator
) -> Ritz:
    """Return what `points` products of a symmetric matrix reveal about its eigenvalues.

    The vectors are made orthogonal to all earlier ones, twice (Parlett 1998, chapter 13). If they
    span everything that the matrix makes of `start`, another random vector follows, so that
    eigenvalues that occur several times are found as often.

    Args:
        multiply: multiplies the matrix by a vector.
        start: the first vector, [size].
        points: the number of products, at most `size`.
        random: draws further vectors.

    Raises:
        ProbeError: the products are not finite, or the matrix is not symmetric.
    """
    basis = start.new_empty((points, len(start)))
    diagonal, beside = np.zeros(points), np.zeros(points)
    vector = start / start.norm()
    for i in range(points):
        basis[i] = vector
        product = multiply(vector)
        if not bool(product.isfinite().all()):
            raise ProbeError("the second derivative of the loss is not finite")
        along = (basis[: i + 1] @ product).double().cpu().numpy()
        diagonal[i] = along[i]
        scale = max(np.abs(diagonal[: i + 1]).max(), beside.max())
        expected = np.zeros(i)
        expected[i - 1 :] = beside[i - 1 : i] if i else 0.0
        if i and np.abs(along[:i] - expected).max() > _ASYMMETRIC * scale:
            raise ProbeError(
                "an operation of the model has a wrong second derivative, because the Hessian is "
                "not symmetric"
            )
        if i + 1 == len(start):
            break
        rest = _orthogonal(product, basis[: i + 1])
        length = float(rest.norm())
        if length <= 10 * torch.finfo(rest.dtype).eps * scale:
            length, rest = 0.0, torch.randn(len(start), generator=random).to(rest)
            rest = _orthogonal(_orthogonal(rest, basis[: i + 1]), basis[: i + 1])
        vector = rest / rest.norm()
        beside[i] = length
    matrix = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    nodes, vectors = np.linalg.eigh(matrix)
    rounding = 10 * torch.finfo(start.dtype).eps * np.abs(nodes).max()
    residuals = np.maximum(beside[-1] * np.abs(vectors[-1]), rounding)
    return Ritz(nodes, vectors[0] ** 2, residuals)


def _orthogonal(vector: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        vector = vector - basis.T @ (basis @ vector)
    return vector
