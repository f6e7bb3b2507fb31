"""Determine which tensors can be reduced, and in which precision; convert tensors to numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from comgra_decl.errors import ComgraError
from comgra_decl.stats.quiet import quiet
from comgra_decl.torch_private import functorch, is_functorch_wrapped

_DOUBLE_NAMES = ("float64", "complex128", "int32", "int64", "uint32", "uint64")
_DOUBLE = frozenset(getattr(torch, n) for n in _DOUBLE_NAMES if hasattr(torch, n))

# dtypes that torch cannot export to numpy: reinterpreted from an integer of the same width as the
# `ml_dtypes` type of the same name
_VIA_INTEGER: dict[torch.dtype, torch.dtype] = {torch.bfloat16: torch.int16}
for _name in (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
):
    if hasattr(torch, _name):
        _VIA_INTEGER[getattr(torch, _name)] = torch.uint8

# dtypes that convert to float32 or float64; not quantised and sub-byte types
_NUMBERS = frozenset(
    getattr(torch, name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 "
        "complex32 complex64 complex128"
    ).split()
    if hasattr(torch, name)
) | frozenset(_VIA_INTEGER)

PLAIN = (Tensor, torch.nn.Parameter)
"""Types that need no `plain`, unless they are wrapped by functorch."""


class CannotReduceError(ComgraError, TypeError):
    """A tensor has no statistics because of its layout, dtype or wrapper; the message states which.

    Concerns one tensor; the other tensors in the step are unaffected. Callers report it once per
    slot.
    """


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype as it is stored in the slot table, e.g. `"bfloat16"`."""
    return str(tensor.dtype).removeprefix("torch.")


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which statistics of `dtype` are computed.

    This is float64 for float64, complex128 and integers of 32 bits or more; 64-bit integers beyond
    2**53 are rounded. It is float32 for all narrower types, whose conversion is exact.
    """
    return torch.float64 if dtype in _DOUBLE else torch.float32


def plain(tensor: Tensor) -> Tensor:
    """Return the local, ordinary tensor behind `tensor`.

    For a DTensor, this is the local shard; ranks are merged offline, without communication.
    Asynchronous results of collectives are awaited. Wrappers of `torch.func.grad`, `vjp` and `jvp`
    return the numbers they wrap.

    Raises:
        CannotReduceError: wrappers without their own numbers (vmap, fake tensors, subclasses
            with their own dispatch, uninitialised parameters).
    """
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if is_functorch_wrapped(tensor):
        raise CannotReduceError(
            "cannot reduce a tensor inside vmap (functorch), where only one slice exists; "
            "comgra.node(tensor, name) records its inputs and outputs"
        )
    kind = type(tensor)
    if kind in PLAIN:
        return tensor
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            return plain(tensor.to_local())
    if kind.__name__ == "AsyncCollectiveTensor":
        return plain(tensor.wait())  # type: ignore[attr-defined]
    if torch.nn.parameter.is_lazy(tensor):
        raise CannotReduceError("cannot reduce an uninitialised parameter of a lazy module")
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise CannotReduceError(f"cannot reduce the tensor subclass {kind.__qualname__}")
    return tensor


def is_readable(tensor: Tensor) -> bool:
    """Return whether plain torch operations can read the numbers of a tensor."""
    return (
        type(tensor) in PLAIN
        and not is_functorch_wrapped(tensor)
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.dtype in _NUMBERS
    )


def is_allocated(tensor: Tensor) -> bool:
    """Return whether the storage of a tensor is allocated.

    FSDP frees the storage of a gathered parameter between uses.
    """
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN:
        return True
    return tensor.numel() == 0 or tensor.untyped_storage().size() > 0


def memory_address(tensor: Tensor) -> int:
    """Return the address of the first element of a strided tensor; 0 if it has no memory.

    `data_ptr` of a view into freed storage is its offset in bytes, and reading there would crash
    the program.
    """
    address = tensor.data_ptr()
    return 0 if address == tensor.storage_offset() * tensor.element_size() else address


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def check(tensor: Tensor, batch_dim: int | None) -> None:
    """Reject tensors without strided numbers in memory, or without the batch dimension.

    Raises:
        CannotReduceError: see the message.
    """
    if tensor.layout is not torch.strided:
        raise CannotReduceError(f"cannot reduce layout {str(tensor.layout).split('.')[-1]}")
    if tensor.is_nested:
        raise CannotReduceError("cannot reduce a nested tensor")
    if tensor.is_meta:
        raise CannotReduceError("cannot reduce a meta tensor, because it has no values")
    if tensor.dtype not in _NUMBERS:
        raise CannotReduceError(f"cannot reduce dtype {dtype_name(tensor)}")
    if batch_dim is not None and not -tensor.dim() <= batch_dim < tensor.dim():
        raise CannotReduceError(
            f"cannot reduce shape {tuple(tensor.shape)} along batch dim {batch_dim}: "
            f"it has {tensor.dim()} dimensions"
        )


def with_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory can be read: the same one, unless it has none.

    Raises:
        CannotReduceError: its storage was freed; reading it would crash the program.
    """
    if memory_address(tensor) or not tensor.numel():
        return tensor
    if tensor._is_zerotensor():  # autograd's zeros that were never written
        return tensor.clone()
    raise CannotReduceError("cannot reduce a tensor whose storage was freed")


def real(tensor: Tensor) -> Tensor:
    """Return real numbers unchanged, complex ones as magnitudes."""
    if not tensor.is_complex():
        return tensor.resolve_neg()
    if tensor.dtype == torch.complex32:  # few operators support it
        tensor = tensor.to(torch.complex64)
    return tensor.abs()


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a copy as a numpy array in the tensor's own dtype; never a view.

    bfloat16 and float8 become the types of `ml_dtypes`, complex32 becomes complex64 (numpy has no
    half complex). Waits for the device if the tensor is on one.
    """
    with quiet():
        return as_numpy(tensor.detach().cpu().clone(memory_format=torch.contiguous_format))


def as_numpy(host: Tensor) -> NDArray[Any]:
    """Return a contiguous host tensor as a numpy array that shares memory where possible."""
    integer = _VIA_INTEGER.get(host.dtype)
    if integer is not None:
        import ml_dtypes  # needed for raw values, not for statistics

        kind = getattr(ml_dtypes, str(host.dtype).removeprefix("torch."), None)
        if kind is None:
            raise CannotReduceError(f"this version of ml_dtypes lacks {host.dtype}")
        return host.view(integer).numpy().view(kind)
    if host.dtype == torch.complex32:
        host = host.to(torch.complex64)
    return host.resolve_conj().resolve_neg().numpy()


def as_rows(tensor: Tensor, batch_dim: int | None) -> Tensor:
    """Return [samples, elements], contiguous, without a copy where memory allows.

    Statistics ignore the order of elements within a sample, so the value dims are taken in memory
    order. Tensors in channels_last format and transposed tensors are therefore not copied.
    """
    if tensor.is_contiguous() and not batch_dim:
        samples = 1 if batch_dim is None else tensor.shape[0]
        return tensor.view(samples, -1)
    view = _samples_first(tensor, batch_dim)
    return view.reshape(view.shape[0], -1).contiguous()


def is_one_block(tensor: Tensor, batch_dim: int | None) -> bool:
    """Whether `as_rows` returns the tensor's own memory."""
    return _samples_first(tensor, batch_dim).is_contiguous()


def parts_of(tensor: Tensor, batch_dim: int | None, most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield `as_rows` in order, in parts of at most `most` elements, each copied on demand.

    Yields:
        The first sample of a part, and its rows [r, n]: whole samples, or a part of one sample.
    """
    view = _samples_first(tensor, batch_dim)
    elements = view[0].numel()
    for first, samples in _split(view, max(1, most // elements)):
        if elements <= most:
            yield first, samples.reshape(samples.shape[0], -1).contiguous()
            continue
        for piece in _pieces(samples[0], most):
            yield first, piece.reshape(1, -1).contiguous()


def _samples_first(tensor: Tensor, batch_dim: int | None) -> Tensor:
    """Return a view [samples, values...] whose value dims are in memory order."""
    values = [d for d in range(tensor.dim()) if d != batch_dim]
    values.sort(key=tensor.stride, reverse=True)
    if batch_dim is None:
        return tensor.permute(values).unsqueeze(0)
    return tensor.permute(batch_dim, *values)


def _split(view: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, view.shape[0], size):
        yield first, view[first : first + size]


def _pieces(view: Tensor, most: int) -> Iterator[Tensor]:
    """Yield views of at most `most` numbers each that together cover `view`, in order."""
    if view.numel() <= most:
        yield view
        return
    slices = most // (view.numel() // view.shape[0])
    for _, part in _split(view, max(1, slices)):
        yield from [part] if slices else _pieces(part[0], most)
