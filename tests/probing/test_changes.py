"""What a change gives: numpy's numbers, in memory of its own, for every dimension and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comgra_decl.errors import ProbeError, SpecError
from comgra_decl.hooks.probing.changes import Sampled, changed
from comgra_decl.hooks.probing.passes import Call, Edit
from comgra_decl.records import INTERVENTION
from comgra_decl.spec import load_spec
from comgra_decl.spec.interventions import ChangeSpec
from tests.support.recording import EVERYTHING, Recording, recording

LABELS = ["a", "b", "a", "b", "b"]
SAMPLES = Sampled(len(LABELS), LABELS)


def spec_of(do: Any, **more: Any) -> ChangeSpec:
    return ChangeSpec.model_validate({"select": "x", "do": do, **more})


def applied(spec: ChangeSpec, tensor: Tensor, clean: Tensor) -> Tensor:
    edit = Edit(spec, spec.parts, ["x"])
    return edit.applied(
        tensor, Call("x", spec.role, 0), clean, heads=lambda _: None, samples=SAMPLES
    )


# -- directions -----------------------------------------------------------------------------------

SHAPES = [(5, 4), (5, 3, 4), (5, 4, 4), (5, 6, 4, 3), (5, 4, 4, 4), (5, 5, 5, 5)]


def without(x: np.ndarray[Any, Any], direction: np.ndarray[Any, Any], dim: int) -> Any:
    """Return x without its component along a vector, row by row."""
    unit = direction / np.sqrt((direction**2).sum())
    rows = np.moveaxis(x, dim, -1)
    return np.moveaxis(rows - (rows @ unit)[..., None] * unit, -1, dim)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_direction_lies_along_the_dimension_that_is_named(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, clean = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    means = [
        clean.numpy()[[i for i, label in enumerate(LABELS) if label == c]].mean(0) for c in "ab"
    ]
    difference, whole = means[0] - means[1], clean.numpy()
    np.save(tmp_path / "whole.npy", whole)
    for dim in [*range(1, len(shape)), *range(1 - len(shape), 0)]:
        along = dim % len(shape)
        others = tuple(d for d in range(len(shape)) if d != along)
        one = np.arange(1.0, shape[along] + 1)
        of_samples = tuple(d - 1 for d in others if d)
        directions: list[tuple[Any, np.ndarray[Any, Any]]] = [
            ({"difference": ["a", "b"]}, difference.mean(of_samples)),
            (one.tolist(), one),
            (str(tmp_path / "whole.npy"), whole.mean(others)),
        ]
        for declared, direction in directions:
            found = changed(spec_of({"project_off": declared, "dim": dim}).do, x, clean, SAMPLES)
            np.testing.assert_allclose(
                found.numpy(), without(x.numpy(), direction, dim), atol=1e-12
            )


@pytest.mark.parametrize(
    ("shape", "do", "why"),
    [
        ((5, 4), {"project_off": [1.0] * 4, "dim": 3}, r"\[5, 4\] has no dimension 3"),
        ((5, 4), {"project_off": [1.0] * 4, "dim": -3}, r"\[5, 4\] has no dimension -3"),
        (
            (5, 4),
            {"project_off": [1.0] * 5, "dim": -2},
            r"dimension -2 of a tensor of shape \[5, 4\] is that",
        ),
        ((5, 3, 4), {"project_off": [[1.0] * 4], "dim": 1}, "but dimension 1 has 3 entries"),
        ((5, 3, 6, 4), {"project_off": [[1.0] * 4] * 6, "dim": 1}, "without dimension 1"),
        ((5, 3, 4), {"project_off": [1.0] * 3}, "dimension -1 has 4 entries"),
    ],
)
def test_a_direction_that_does_not_fit_is_refused(
    shape: tuple[int, ...], do: dict[str, Any], why: str
) -> None:
    x = torch.ones(shape)
    with pytest.raises(ProbeError, match=why):
        applied(spec_of(do), x, x)


def test_samples_are_no_direction_and_no_parts() -> None:
    with pytest.raises(SpecError, match="dimension 0 is that of the samples"):
        load_spec(
            {
                "probes": {"eyes": {}},
                "interventions": {
                    "a": {"of": "eyes", "select": "x", "do": {"project_off": [1], "dim": 0}}
                },
            }
        )
    x = torch.ones(5, 3, 4)
    with pytest.raises(
        ProbeError, match=r"u: dimension -3 of a tensor of shape \[5, 3, 4\] is that"
    ):
        applied(spec_of("zero", parts={"u": {"dim": -3}}), x, x)


def test_a_projection_of_halves_does_not_overflow() -> None:
    x = torch.full((5, 4), 200.0, dtype=torch.float16)
    found = changed(spec_of({"project_off": [400.0, 0.0, 0.0, 0.0]}).do, x, x, SAMPLES)
    assert found.dtype == torch.float16
    assert found.tolist() == [[0.0, 200.0, 200.0, 200.0]] * 5


# -- memory ---------------------------------------------------------------------------------------

KEPT = torch.ones(5, 4, 6, 6)


def kept(_: Tensor) -> Tensor:
    return KEPT


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def itself(x: Tensor) -> Tensor:
    return x


def function(name: str) -> dict[str, str]:
    return {"_target_": f"{__name__}.{name}"}


CHANGES: list[Any] = [
    "zero",
    "mean",
    {"noise": 1.0},
    {"scale": 2.0},
    {"clamp": [0, None]},
    {"add": 1.0},
    {"add": {"difference": ["a", "b"]}},
    {"patch": "clean"},
    {"patch": "other"},
    {"patch": 3},
    {"patch": [4, 3, 2, 1, 0]},
    {"patch": "row.npy"},
    {"project_off": {"difference": ["a", "b"]}, "dim": 1},
    function("kept"),
    function("in_place"),
    function("itself"),
]


def layouts() -> Iterator[Tensor]:
    """Yield the same shape as torch's own layers return it: in order, channels last, a part."""
    generator = torch.Generator().manual_seed(1)
    yield torch.randn(5, 4, 6, 6, generator=generator)
    yield torch.randn(5, 4, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    yield torch.randn(5, 6, 4, 6, generator=generator).transpose(1, 2)
    yield torch.randn(5, 12, 6, 6, generator=generator).chunk(3, 1)[1]
    yield torch.randn(5, 4, 1, 6, generator=generator).expand(-1, -1, 6, -1)


@pytest.mark.parametrize("do", CHANGES, ids=str)
@pytest.mark.parametrize("parts", [{}, {"channel": [1, 2]}], ids=["whole", "part"])
def test_the_model_receives_a_tensor_of_its_own_with_the_layout_of_the_original(
    do: Any, parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("row.npy", np.arange(6.0, dtype=np.float32))
    for tensor in layouts():
        clean = tensor.clone() + 1
        before, clean_before = tensor.clone(), clean.clone()
        new = applied(spec_of(do, parts=parts), tensor, clean)
        assert new.shape == tensor.shape
        assert new.stride() == torch.empty_like(tensor).stride()
        others = tuple(d for d in range(4) if d != 1)
        changed_channels = (new != tensor).any(others) if parts else torch.tensor([False])
        assert not changed_channels[[0, -1]].any()  # only the named ones
        new.fill_(-7.0)  # every element has a place of its own
        assert (new == -7).all()
        for held, wanted in (
            (tensor, before),
            (clean, clean_before),
            (KEPT, torch.ones_like(KEPT)),
        ):
            assert torch.equal(held, wanted)


class Careless(nn.Module):
    """Writes to what its layers return, and views it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.relu(self.first(x)))
        x += 1
        return self.head(x.view(-1, 6)).view(len(x), -1, 3).mean(1)


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Every change of every layer of a model that writes to its tensors, and then the clean one."""
    row = tmp_path_factory.mktemp("files") / "row.npy"
    np.save(row, np.arange(6.0, dtype=np.float32))
    declared: dict[str, Any] = {}
    for i, do in enumerate(["mean", {"patch": str(row)}, {"patch": 1}, function("in_place")]):
        for layer in ("first", "second"):
            declared[f"{layer}{i}"] = {"of": "eyes", "select": layer, "do": do}
    declared["again"] = {"of": "eyes", "select": ["first", "second"], "do": {"patch": "clean"}}
    declared["swept"] = {**declared["first0"], "sweep": ["node", "feature"]}
    probes = {"eyes": {"samples": {"count": 5}}}
    torch.manual_seed(0)
    model, x = Careless(), torch.randn(5, 2, 4)
    with recording(
        EVERYTHING, samples={"count": 5}, probes=probes, interventions=declared
    ) as found:
        F.cross_entropy(model(x), torch.arange(5) % 3).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert found.faults == []
    return found


def output_of(found: Recording, type_: str, node: str = "Careless") -> np.ndarray[Any, Any]:
    (step,) = found.of(type_)
    (info,) = [
        i
        for k, i in found.slots.items()
        if (k.node, k.role, k.pass_) == (node, "output", "forward")
    ]
    return step.values[info.id]


@pytest.mark.slow
def test_a_model_may_write_to_and_view_every_changed_tensor(careless: Recording) -> None:
    torch.manual_seed(0)
    model, x = Careless(), torch.randn(5, 2, 4)
    row = torch.arange(6.0)
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.mean(0, keepdim=True).expand_as(y).clone(),
        lambda y: row.expand_as(y).clone(),
        lambda y: y[1:2].expand_as(y).clone(),
        lambda y: 2 * y,
    ]
    for i, change in enumerate(changes):
        for layer in ("first", "second"):
            handle = model.get_submodule(layer).register_forward_hook(lambda *a, f=change: f(a[2]))
            with torch.no_grad():
                wanted = model(x).numpy()
            handle.remove()
            found = output_of(careless, f"intervention:{layer}{i}")
            assert found.tobytes() == wanted.tobytes(), (layer, i)


def test_what_the_unchanged_pass_gave_is_still_there_after_all_changes(careless: Recording) -> None:
    """`patch: clean` hands on remembered tensors, and the model then writes to them."""
    for node in ("first", "second", "Careless"):
        again = output_of(careless, "intervention:again", node)
        assert again.tobytes() == output_of(careless, "probe:eyes", node).tobytes()


def test_a_function_that_works_in_place_is_counted_like_any_other(careless: Recording) -> None:
    (step,) = careless.of("intervention:first3")
    (change,) = step.info.extra[INTERVENTION]["changes"]
    assert change["changed"] == change["elements"] == 5 * 2 * 6
    assert [w for w in careless.report["warnings"] if "first3" in w] == []
