"""Tensors that are not plain blocks of float32 numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from tests.awkward.watching import (
    as_numpy,
    assert_recorded,
    assert_same,
    both,
    refused,
    step_of,
    watched,
)
from tests.support.recording import EVERYTHING, recording


class Wrapped(nn.Module):
    """Returns what `convert` makes of a linear layer's output, from `inner`."""

    def __init__(self, convert: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(3, 4), Converts(convert)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.inner(out)
        return out.sum()


class Converts(nn.Module):
    def __init__(self, convert: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.convert = convert

    def forward(self, x: Tensor) -> Any:
        return self.convert(x)


def wrapped(convert: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    return both(lambda: Wrapped(convert), lambda m: m(torch.randn(5, 3)))


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": Tensor.double,
    "float16": Tensor.half,
    "bfloat16": Tensor.bfloat16,
    "float8": lambda x: x.detach().to(torch.float8_e4m3fn),
    "int64": lambda x: (100 * x.detach()).long(),
    "int8": lambda x: (100 * x.detach()).to(torch.int8),
    "uint8": lambda x: (x.detach().abs() * 10).to(torch.uint8),
    "bool": lambda x: x > 0,
    "complex64": lambda x: torch.complex(x, -x),
    "complex128": lambda x: torch.complex(x.double(), x.double() + 1),
    "conjugate view": lambda x: torch.complex(x, -x).conj(),
    "negative view": lambda x: torch.complex(x, -x).conj().imag,
    "scalar": Tensor.mean,
    "vector": lambda x: x.sum(1),
    "expanded": lambda x: x[:, :1].expand(-1, 7),
    "expanded batch": lambda x: x[:1].expand(5, 4),
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "flipped": lambda x: x.flip(0),
    "diagonal view": lambda x: x.diagonal(),
    "no elements": lambda x: x[:, :0],
    "no samples": lambda x: x[:0],
    "many dims": lambda x: x.view(5, 1, 2, 1, 2, 1, 1),
    "infinite": lambda x: x / 0,
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_numbers_of_any_kind_are_recorded_as_they_are(name: str) -> None:
    seen, traced = wrapped(CONVERSIONS[name])
    value = seen.outputs["inner", 0]
    got = traced.value("inner")
    if name.startswith(("bfloat", "float8")):
        got = got.astype(np.float32)
    assert_same(got, value, name)
    assert str(value.dtype).removeprefix("torch.") == next(
        info.dtype for key, info in traced.slots.items() if key.node == "inner"
    )
    assert refused(traced) == {}


def test_images_in_another_memory_format() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def call(net: nn.Module) -> Tensor:
        return net(torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)).square().sum()

    seen, traced = both(make, call)
    assert seen.outputs["2", 0].is_contiguous(memory_format=torch.channels_last)
    assert_recorded(seen, traced, root="Sequential")


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.relu().to_sparse(),
    "coo, not coalesced": lambda x: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [1, 1, 2]]), x.flatten()[:3], (5, 4)
    ),
    "hybrid coo": lambda x: x.relu().to_sparse(1),
    "csr": lambda x: x.detach().relu().to_sparse_csr(),
    "csc": lambda x: x.detach().relu().to_sparse_csc(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_recorded_with_their_zeros(name: str) -> None:
    seen, traced = wrapped(SPARSE[name])
    value = seen.outputs["inner", 0]
    assert value.layout != torch.strided
    assert_same(traced.value("inner"), value, name)
    assert len(traced.rows("inner")) == 5
    assert traced.total("inner") == pytest.approx(as_numpy(value).astype(float).sum(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_matrix_too_large_to_write_out_is_refused_by_name() -> None:
    def huge(x: Tensor) -> Tensor:
        index = torch.tensor([[0, 1], [1, 2]])
        return torch.sparse_coo_tensor(index, x.flatten()[:2], (100_000, 100_000))

    seen, traced = wrapped(huge)
    assert ("inner", 0) in seen.outputs
    assert not traced.has("inner")
    assert refused(traced) == {"inner output": "cannot reduce layout sparse_coo"}
    assert traced.has("linear")


def test_sparse_gradients_of_an_embedding() -> None:
    nodes = {
        "all": {
            "select": "**",
            "capture": ["parameter_grad", "parameter_grad_raw"],
            "values": True,
        }
    }
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(nodes=nodes) as traced:
        model(torch.tensor([1, 4, 1])).square().sum().backward()
        optimizer.step()
    assert traced.faults == []
    gradient = model.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    for pass_ in ("grad", "grad:raw"):
        got = traced.value("Embedding", "weight", pass_=pass_)
        np.testing.assert_array_equal(got[0], gradient.to_dense().numpy())


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor([x[0, :1], x[1, :3], x[2]], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_recorded_part_after_part(layout: torch.layout) -> None:
    parts: list[Tensor] = []

    def convert(x: Tensor) -> Tensor:
        result = nested(x, layout)
        parts.extend(part.detach().clone() for part in result.unbind())
        return result

    torch.manual_seed(0)
    model = Wrapped(convert)
    with recording() as traced:
        step_of(model, lambda m: m(torch.randn(5, 3)))
    assert traced.faults == []
    assert len(parts) == 3
    expected = torch.cat(parts).numpy()
    np.testing.assert_array_equal(traced.value("inner")[0], expected)
    assert traced.total("inner") == pytest.approx(expected.sum(dtype=float), rel=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_batch_goes_through_a_model(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    batch = torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 4)], layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as traced:
        model(batch).to_padded_tensor(0.0).sum().backward()
        optimizer.step()
    assert traced.faults == []
    expected = torch.cat([model[0](part) for part in batch.unbind()])
    assert traced.value("0").shape == (1, *expected.shape)
    gradient = model[0].weight.grad
    assert gradient is not None
    np.testing.assert_array_equal(traced.value("0", "weight", pass_="grad")[0], gradient.numpy())


def test_packed_sequences_are_recorded_as_the_tensors_that_they_are() -> None:
    model = nn.LSTM(3, 4, batch_first=True)
    packed = rnn.pack_padded_sequence(torch.randn(3, 5, 3), torch.tensor([5, 2, 4]), True, False)
    outputs: list[rnn.PackedSequence] = []
    model.register_forward_hook(lambda _m, _a, out: outputs.append(out[0]))
    nodes = {"all": {**EVERYTHING["nodes"]["all"], "capture": ["input", "output"]}}
    with recording(nodes=nodes) as traced:
        step_of(model, lambda m: m(packed)[0].data.sum())
    assert traced.faults == []
    got = traced.value("LSTM", "output[0].data")
    assert_same(got, outputs[0].data, "packed output")
    assert len(traced.rows("LSTM", "output[0].data")) in (1, 11)
    assert_same(traced.value("LSTM", "input[0].data"), packed.data, "packed input")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dynamically_quantised_encoder_in_front_of_a_head() -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    quantised = torch.ao.quantization.quantize_dynamic(body, {nn.Linear}, dtype=torch.qint8)
    model = nn.Sequential(quantised, nn.Linear(4, 2))
    with watched(model) as seen, recording() as traced:
        step_of(model, lambda m: m(torch.randn(5, 3)).square().sum())
    assert traced.faults == []
    assert ("0.0", 0) in seen.outputs
    for path in ("0.0", "0.1", "1"):
        assert_same(traced.value(path), seen.outputs[path, 0], path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantised_tensor_is_recorded_as_what_it_stands_for() -> None:
    def quantised(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x.detach(), 0.1, 10, torch.quint8)

    torch.manual_seed(0)
    model = Wrapped(quantised)
    with watched(model) as seen, recording() as traced:
        step_of(model, lambda m: m(torch.randn(5, 3)))
    np.testing.assert_array_equal(
        traced.value("inner"), seen.outputs["inner", 0].dequantize().numpy()
    )


def test_meta_tensors_have_no_numbers_and_are_refused_by_name() -> None:
    _, traced = wrapped(lambda x: x.detach().to("meta"))
    reason = "cannot reduce a meta tensor, because it has no values"
    assert refused(traced) == {"inner output": reason}
    assert traced.has("linear")


class Tagged(Tensor):
    """A subclass that does not override dispatch."""


class Logged(Tensor):
    """A subclass that computes like its elements, through its own function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLED.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


CALLED: list[Any] = []


@pytest.mark.parametrize("kind", [Tagged, Logged])
def test_subclasses_are_recorded_and_never_hear_of_it(kind: type[Tensor]) -> None:
    seen, traced = wrapped(lambda x: x.as_subclass(kind))
    assert_same(traced.value("inner"), seen.outputs["inner", 0].as_subclass(Tensor), "inner")
    CALLED.clear()
    model = Wrapped(lambda x: x.as_subclass(kind))
    plain = torch.randn(5, 3)
    model(plain)
    called = list(CALLED)
    CALLED.clear()
    with recording():
        model(plain)
    assert called == CALLED
