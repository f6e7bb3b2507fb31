"""The spectrum of a Hessian equals that of the dense matrix, which torch computes row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.hooks.probing.curvature import lanczos
from comgra_decl.hooks.probing.subject import Drawn
from comgra_decl.spec import load_spec
from tests.probing.nets import MODELS
from tests.probing.test_methods import picture
from tests.support.shortened import shortened

ROLES = ("eigenvalues", "eigenvalues.residuals", "eigenvalues.nodes", "eigenvalues.weights")


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)
    ).to(dtype)


def dense(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], within: nn.Module | None = None
) -> np.ndarray[Any, Any]:
    """Return the Hessian of a loss, whose rows are those of a second backward pass."""
    parameters = [*(within or model).parameters()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        first = torch.autograd.grad(loss(model), parameters, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in first])
        columns = torch.autograd.grad(
            flat, parameters, torch.eye(len(flat), dtype=flat.dtype), is_grads_batched=True,
            materialize_grads=True,
        )  # fmt: skip
    return torch.cat([g.flatten(1) for g in columns], 1).double().numpy()


def parts(found: Drawn) -> dict[str, np.ndarray[Any, Any]]:
    assert [m.role for m in found.maps] == [*ROLES]
    return {m.role: m.values.numpy() for m in found.maps}


X, LABELS = (
    torch.linspace(-2, 2, 40, dtype=torch.float64).reshape(8, 5).sin(),
    [0, 1, 2, 0, 1, 2, 1, 1],
)


def cross_entropy(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), torch.tensor(LABELS))


def test_both_ends_equal_those_of_the_dense_hessian() -> None:
    model = small()
    wanted = np.linalg.eigvalsh(dense(model, cross_entropy))
    found = picture(model, X, LABELS, method="hessian", top=3, lowest=2, points=60)
    ours = parts(found)
    np.testing.assert_allclose(
        ours["eigenvalues"], [*wanted[:-4:-1], wanted[1], wanted[0]], rtol=0, atol=1e-6 * wanted[-1]
    )
    assert found.facts["parameters"] == len(wanted) == 79
    assert found.facts["value"] == pytest.approx(cross_entropy(model).item(), rel=1e-12)
    assert found.facts["measure"] == "loss"


@pytest.mark.slow
def test_the_spectrum_of_a_larger_network_and_the_error_of_its_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3)
    ).double()
    matrix = dense(model, cross_entropy)
    wanted = np.linalg.eigvalsh(matrix)
    found = picture(model, X, LABELS, method="hessian", top=3, points=60, vectors=10)
    assert found.facts["parameters"] == len(wanted) == 1347
    np.testing.assert_allclose(
        parts(found)["eigenvalues"], [*wanted[:-4:-1], wanted[0]], rtol=0, atol=1e-6 * wanted[-1]
    )
    assert 0 < found.facts["trace_error"] < abs(np.trace(matrix))
    assert abs(found.facts["trace"] - np.trace(matrix)) < 3 * found.facts["trace_error"]


def test_an_eigenvalue_of_the_hessian_lies_within_each_residual() -> None:
    model = small()
    wanted = np.linalg.eigvalsh(dense(model, cross_entropy))
    ours = parts(picture(model, X, LABELS, method="hessian", top=5, lowest=3, points=9))
    assert ours["eigenvalues.residuals"].max() > 1e-6  # nine points are too few
    for value, residual in zip(ours["eigenvalues"], ours["eigenvalues.residuals"], strict=True):
        assert np.abs(wanted - value).min() <= residual + 1e-12


def test_residuals_include_the_rounding_errors_of_float32() -> None:
    model = small()
    wanted = np.linalg.eigvalsh(dense(model, cross_entropy))
    ours = parts(picture(model.float(), X.float(), LABELS, method="hessian", top=3, points=79))
    for value, residual in zip(ours["eigenvalues"], ours["eigenvalues.residuals"], strict=True):
        assert 0 < np.abs(wanted - value).min() <= residual < 1e-4


@pytest.mark.slow
def test_the_moments_of_the_density_agree_with_those_of_the_dense_hessian() -> None:
    model = small()
    matrix = dense(model, cross_entropy)
    size, vectors = len(matrix), 400
    found = picture(model, X, LABELS, method="hessian", points=12, vectors=vectors)
    nodes, weights = (parts(found)[f"eigenvalues.{key}"] for key in ("nodes", "weights"))
    assert nodes.shape == (vectors, 12)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    power = np.eye(size)
    for exponent in range(1, 5):
        power = power @ matrix
        # the variance of v'Av for v uniform on the sphere (Avron and Toledo 2011)
        trace, squares = np.trace(power), (power**2).sum()
        variance = 2 * (squares - trace**2 / size) / (size * (size + 2))
        moment = (weights * nodes**exponent).sum(1).mean()
        assert abs(moment - trace / size) < 4 * np.sqrt(variance / vectors)
    assert abs(found.facts["trace"] - np.trace(matrix)) < 4 * found.facts["trace_error"]


def test_a_selection_restricts_the_hessian_to_the_parameters_of_these_modules() -> None:
    model = small()
    part = model[2]  # type: ignore[index]
    wanted = np.linalg.eigvalsh(dense(model, cross_entropy, part))
    found = picture(model, X, LABELS, method="hessian", select="2", points=1000)
    assert found.facts["parameters"] == 28
    np.testing.assert_allclose(
        parts(found)["eigenvalues"], wanted[[-1, 0]], rtol=0, atol=1e-10 * wanted[-1]
    )
    assert found.facts["trace"] == pytest.approx(
        28 * (parts(found)["eigenvalues.nodes"] * parts(found)["eigenvalues.weights"]).sum()
    )


def test_parameters_that_are_not_trained_are_left_out() -> None:
    model = small()
    model[0].requires_grad_(False)  # type: ignore[index]
    found = picture(model, X, LABELS, method="hessian", points=10)
    assert found.facts["parameters"] == 79 - 36


@pytest.mark.parametrize("name", shortened(["tied", "recurrent", "transformer"], tried=1))
def test_models_with_recurrence_attention_and_tied_weights(name: str) -> None:
    torch.manual_seed(1)
    make, inputs = MODELS[name]
    model, x = make().double().eval(), inputs()
    x = x.double() if x.is_floating_point() else x
    labels = [i % 3 for i in range(len(x))]

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), torch.tensor(labels))

    found = picture(model, x, labels, method="hessian", points=80)
    wanted = np.linalg.eigvalsh(dense(model, loss))
    np.testing.assert_allclose(
        parts(found)["eigenvalues"], wanted[[-1, 0]], rtol=0, atol=1e-6 * wanted[-1]
    )


def test_the_loss_of_a_language_model_is_that_of_the_next_tokens() -> None:
    torch.manual_seed(0)

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            q = self.embed(tokens)[:, None]
            return self.head(F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0])

    model, tokens = Tiny().double(), torch.randint(5, (4, 6))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:])

    wanted = np.linalg.eigvalsh(dense(model, loss))
    found = picture(model, tokens, method="hessian", points=35)
    np.testing.assert_allclose(
        parts(found)["eigenvalues"], wanted[[-1, 0]], rtol=0, atol=1e-8 * wanted[-1]
    )


# -- the algorithm


def test_eigenvalues_that_occur_several_times_are_found_as_often() -> None:
    values = torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0, -2.0, -2.0, 0.0], dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))
    matrix = rotation @ values.diag() @ rotation.T
    random = torch.Generator().manual_seed(0)
    found = lanczos(lambda v: matrix @ v, torch.randn(8).double(), 8, random=random)
    np.testing.assert_allclose(found.nodes, sorted(values.tolist()), atol=1e-12)


def test_a_loss_that_is_linear_in_the_parameters_has_no_curvature() -> None:
    found = picture(
        nn.Linear(4, 3).double(), torch.randn(2, 4).double(), method="hessian", measure=1, points=9
    )
    assert (parts(found)["eigenvalues"] == 0).all()


# -- refusals


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.saved_tensors[0].cos()


class Wrong(torch.autograd.Function):
    """Scales the gradient by something that is not the derivative of anything."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.saved_tensors[0].flip(1).exp()


class Inexact(torch.autograd.Function):
    """Almost the derivative: what is added is that of nothing, and small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.cos() + 0.1 * x.flip(1).exp())


class Through(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "once": (lambda: Through(Once.apply), {}, "no second derivative.*once_differentiable"),
    "wrong": (lambda: Through(Wrong.apply), {}, "wrong second derivative"),
    "inexact": (lambda: Through(Inexact.apply), {}, "wrong second derivative"),
    "detached": (lambda: Through(Tensor.detach), {}, "outputs have no gradient"),
    "frozen": (lambda: nn.Linear(4, 3).requires_grad_(False), {}, "no parameters that require"),
    "no layer": (lambda: nn.Linear(4, 3), {"select": "conv*"}, "matches no module"),
    "few": (lambda: nn.Linear(4, 3, bias=False), {"top": 13}, "12 parameters have no 14 eigen"),
    "coarse": (lambda: Through(Tensor.tanh).bfloat16(), {}, "bfloat16; second derivatives need"),
    "unlabelled": (lambda: nn.Linear(4, 3), {"labels": None}, "classes of the samples are unknown"),
    "huge": (lambda: nn.Linear(4, 1_000_000), {"points": 1000}, r"need 18.6 GiB, more than 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hessian_that_does_not_exist_is_refused_with_the_reason(case: str) -> None:
    make, spec, why = REFUSED[case]
    model = make()
    x = torch.randn(2, 4, dtype=next(model.parameters()).dtype)
    labels = spec.get("labels", [0, 1])
    rest = {k: v for k, v in spec.items() if k != "labels"}
    with pytest.raises(ProbeError, match=why):
        picture(model, x, labels, method="hessian", **{"points": 20, **rest})


def test_more_eigenvalues_than_points_are_refused_in_the_spec() -> None:
    spec = {"method": "hessian", "of": "eyes", "top": 5, "points": 5}
    with pytest.raises(SpecError, match=r"5 points find at most 5 eigenvalues"):
        load_spec({"probes": {"eyes": {"samples": {"count": 1}}}, "pictures": {"it": spec}})


# -- in a run


def test_the_sharpness_of_each_step_is_that_of_the_model_at_this_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x, classes = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    spec: dict[str, Any] = {
        "schedule": {"first": 100},
        "samples": {"count": 6},
        "probes": {"eyes": {"samples": {"count": 6}, "schedule": {"first": 0, "every": 2}}},
        "pictures": {
            "bend": {"method": "hessian", "of": "eyes", "top": 2, "points": 30, "vectors": 3}
        },
    }
    wanted = []

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), classes)

    with comgra.trace(spec, root=tmp_path) as session:
        for step in range(5):
            if step % 2 == 0:
                wanted.append(np.linalg.eigvalsh(dense(model, loss)))
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    found = run.picture("bend")
    assert (found.axes, found.labels) == (
        ("step", "eigenvalue"),
        {"step": [0, 2, 4], "eigenvalue": ["1", "2", "-1"]},
    )
    np.testing.assert_allclose(found.values, [w[[-1, -2, 0]] for w in wanted], atol=1e-6)
    only = run.picture("bend", 2)
    assert only.values.tolist() == [found.values[1].tolist()]
    assert only.facts["nodes"].shape == only.facts["weights"].shape == (3, 30)
    assert only.facts["residuals"].shape == (3,)
    assert only.facts["trace"] == pytest.approx(
        39 * (only.facts["nodes"] * only.facts["weights"]).sum(1).mean()
    )
