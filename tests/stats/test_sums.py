"""Every statistic of every kind of tensor equals an independent computation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from comgra_decl.records import Raw
from comgra_decl.stats import CannotReduceError, Reducer, sums
from comgra_decl.stats import reducer as module
from comgra_decl.stats.reducer import ARENA_ELEMENTS
from comgra_decl.stats.sums import BLOCK, LargeSums, exact, exact_large
from tests.support.shortened import examples

from .recording import Tolerance, batch_of, check, reduce, reducer

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SMALL, LARGE = (6, 5, 7), (3, 11, 1700)


@pytest.fixture(params=["compiled", "torch"], scope="module", autouse=True)
def recipe(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs every test with the compiled kernel and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            for user in (sums, module):
                patch.setattr(user, "kernel_for", lambda _dtype: None)
        yield


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_point_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(*shape).to(dtype)
    check([(x, 0), (x * 3 + 1, None), (-x.abs(), 0)])


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_integers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    high = 2 if dtype is torch.bool else 100
    low = 0 if dtype in (torch.bool,) or not dtype.is_signed else -100
    x = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    check([(x, 0), (x, None)])


def test_wide_integers_are_not_squeezed_through_float32() -> None:
    check([(torch.tensor([2**24 + 1, 2**24 + 3]), None), (torch.tensor([2**31 - 1, -(2**31)]), 0)])


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_complex_tensors_give_the_statistics_of_their_magnitude(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.complex(normal(*shape), normal(*shape, seed=1))
    x[0, 0, 0] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        x = x.to(dtype)
    check([(x, 0), (x.conj(), None)])


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_float8(name: str, shape: tuple[int, ...]) -> None:
    x = normal(*shape).to(getattr(torch, name))
    check([(x, 0), (x, None)])


EVERY_DTYPE = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
PACKED = ("bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "float4", "q")


@pytest.mark.filterwarnings("ignore")  # some dtypes warn about themselves
@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_of_torch_is_reduced_or_refused_by_name(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    name = str(dtype).removeprefix("torch.")
    whole = name.removeprefix("u") in ("int16", "int32", "int64")
    if name.removeprefix("u").startswith(PACKED) and not whole:
        if name.startswith("q"):
            x = torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)
        else:
            x = torch.empty(shape, dtype=dtype)
        with pytest.raises(CannotReduceError, match=f"dtype {x.dtype}".replace("torch.", "")):
            reducer().add(x, batch_dim=0)
    else:
        x = normal(*shape).abs().add(0.5).to(dtype)
        check([(x, 0), (x, None)])


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_below_the_normal_ones_are_not_zeros(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = (normal(*shape).double() * 1e-39).to(dtype)
    assert (x[x != 0].abs() < torch.finfo(torch.float32).tiny).all()
    check([(x, 0), (x, None)], tolerance=Tolerance(relative=1e-5, std=1e-4))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_doubles_beyond_float32_are_stored_as_infinite_and_counted_as_finite(
    shape: tuple[int, ...],
) -> None:
    x = normal(*shape).double().abs() * 1e100 + 1e100
    check([(x, 0), (-x, None)])
    batch = batch_of(reduce([(x, 0)]))
    assert np.isposinf(batch.aggregates[0, 0, 0, 0])
    assert (batch.aggregates[0, 0, -1] == 0).all()


def test_scalars_rows_of_one_element_and_empty_tensors() -> None:
    check(
        [
            (torch.tensor(3.5), None),
            (torch.tensor(-2, dtype=torch.int64), None),
            (normal(5), 0),
            (normal(40_000), 0),
            (torch.zeros(3, 0), 0),
            (torch.zeros(0), None),
            (torch.zeros(0, 4), 0),
        ]
    )


def test_a_batch_of_no_samples_has_no_statistics_but_also_nothing_that_is_not_finite() -> None:
    batch = batch_of(reduce([(torch.zeros(0, 4), 0), (normal(2, 3), 0)]))
    assert np.isnan(batch.aggregates[0, 0, :-1]).all()
    assert (batch.aggregates[0, 0, -1] == 0).all()
    assert np.isnan(batch.samples[0, 0]).all()


@pytest.mark.parametrize("elements", [ARENA_ELEMENTS + d for d in (-1, 0, 1, 2)])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_sizes_around_the_largest_that_is_copied(elements: int, rows: int) -> None:
    x = normal(rows, -(-elements // rows))
    check([(x, 0), (normal(elements), None)])


@pytest.mark.parametrize("n", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
def test_rows_of_about_a_block_and_more(n: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the size of a block depends on it
    try:
        check([(normal(n), None), (normal(2, n) + 0.5, 0)])
    finally:
        torch.set_num_threads(threads)


def test_many_short_rows_in_a_large_tensor() -> None:
    check([(normal(60_000, 5), 0), (normal(9_000, 33).clamp_min(0), 0)])


@pytest.mark.parametrize("shape", [(4, 50), (2, 40_000)])
@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e5])
def test_a_std_far_below_the_mean(ratio: float, shape: tuple[int, ...]) -> None:
    x = (normal(*shape).double() + ratio).float()
    check([(x, 0), (-x, None)], tolerance=Tolerance(std=1e-4))


@pytest.mark.parametrize("shape", [(3, 7), (3, 20_000)])
def test_constants_have_no_spread(shape: tuple[int, ...]) -> None:
    for value in (0.0, 1.0, -0.1, 1e-20, 12345.678):
        x = torch.full(shape, value)
        check([(x, 0)])
        assert (batch_of(reduce([(x, 0)])).samples[0, 0, :3, 2] == 0).all()


@pytest.mark.parametrize("shape", [(4, 9), (4, 12_000)])
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-18, 1e15, 1e25, 1e38])
def test_magnitudes_whose_squares_leave_float32(scale: float, shape: tuple[int, ...]) -> None:
    x = (normal(*shape).clamp(-3, 3).double() * scale).float()
    check([(x, 0), (x[:, 1:], None)])


def test_a_large_mean_with_a_spread_that_vanishes_when_squared() -> None:
    x = (1e-14 * (1 + 1e-4 * normal(2, 40_000).double())).float()
    check([(x, 0), (x[:, :20], 0)], tolerance=Tolerance(std=1e-4))


@pytest.mark.parametrize("shape", [(5, 8), (5, 9_000)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinities_are_counted_and_propagate_as_in_numpy(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = normal(*shape).to(dtype)
    x[0, 0] = torch.nan
    x[1, 1:3] = torch.inf
    x[2, 5] = -torch.inf
    x[3, 2], x[3, 6] = torch.inf, -torch.inf
    check([(x, 0), (x, None), (torch.full_like(x, torch.nan), 0)])


@pytest.mark.parametrize("scale", [1, 4000])
def test_memory_layouts(scale: int) -> None:
    base = normal(4, 6, 5, 3 * scale)
    nchw = normal(3, 8, 5, scale).contiguous(memory_format=torch.channels_last)
    check(
        [
            (base.transpose(0, 3), 3),
            (base[:, ::2, 1:, :], 0),
            (base.permute(2, 0, 3, 1), 1),
            (base.flip(0), -1),
            (nchw, 0),
            (nchw, None),
            (normal(5, 1, 7).expand(5, 30 * scale, 7), 0),
            (torch.tensor(0.25).expand(6, 50 * scale), 0),
            (torch.complex(base, -base).conj().imag, 0),
            (torch._neg_view(base), 0),
        ]
    )


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=examples(150))
@given(
    array=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9),
        elements=NUMBERS,
    ),
    batched=st.booleans(),
)
def test_any_small_float32_tensor(array: np.ndarray, batched: bool) -> None:
    check([(torch.from_numpy(array), 0 if batched else None)])


@settings(max_examples=examples(60))
@given(
    array=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
        elements=NUMBERS,
    ),
)
def test_the_recipe_for_long_rows_agrees_with_the_exact_one(array: np.ndarray) -> None:
    x = torch.from_numpy(array)
    with np.errstate(all="ignore"):
        found, expected = LargeSums()(x), exact(x).numpy()
        n = x.shape[1]
        for raw in (found, expected):  # the pivots differ: compare what does not depend on them
            raw[:, Raw.SUM] += n * raw[:, Raw.PIVOT]
            raw[:, Raw.SQUARES] -= (raw[:, Raw.SUM] - n * raw[:, Raw.PIVOT]) ** 2 / n
    exactly = [Raw.MIN, Raw.MAX, Raw.NONZERO, Raw.NONFINITE]
    np.testing.assert_array_equal(found[:, exactly], expected[:, exactly])
    scale = np.abs(np.nan_to_num(array, posinf=0, neginf=0)).max().astype(np.float64) * n
    sums = [Raw.SUM, Raw.ABS_SUM]
    np.testing.assert_allclose(found[:, sums], expected[:, sums], rtol=1e-6, atol=1e-6 * scale)


def test_exact_sums_do_not_depend_on_the_size_of_blocks() -> None:
    x = normal(5, 1000).double() + 7
    np.testing.assert_allclose(exact_large(x, 64).numpy(), exact(x).numpy(), rtol=1e-12, atol=1e-9)


def test_halves_of_a_batch_combine_to_the_whole() -> None:
    x = normal(64, 200) * 5 + 3
    whole = reduce([(x, None)]).raw[0]
    parts = [reduce([(half, None)]).raw[0] for half in x.chunk(2)]
    n = x.numel() // 2
    total = sum(p[Raw.SUM] + n * p[Raw.PIVOT] for p in parts)
    squares = sum(
        p[Raw.SQUARES] + 2 * p[Raw.PIVOT] * p[Raw.SUM] + n * p[Raw.PIVOT] ** 2 for p in parts
    )
    p = whole[Raw.PIVOT]
    expected = whole[Raw.SQUARES] + 2 * p * whole[Raw.SUM] + 2 * n * p**2
    assert total == pytest.approx(whole[Raw.SUM] + 2 * n * p, rel=1e-6)
    assert squares == pytest.approx(expected, rel=1e-6)
    for column in (Raw.ABS_SUM, Raw.NONZERO, Raw.NONFINITE):
        assert sum(p[column] for p in parts) == pytest.approx(whole[column], rel=1e-6)
    assert min(p[Raw.MIN] for p in parts) == whole[Raw.MIN]
    assert max(p[Raw.MAX] for p in parts) == whole[Raw.MAX]


def test_what_happens_to_a_tensor_after_it_was_added_does_not_matter() -> None:
    by: Reducer = reducer(histogram_elements=16)
    tensors = [normal(4, 8), normal(4, 20_000), normal(3, 3).double()]
    kept = [t.clone() for t in tensors]
    for tensor in tensors:
        by.add(tensor, batch_dim=0, values=True)
        tensor.fill_(torch.nan)
    reduced = by.finish()
    if reduced.wait is not None:
        reduced.wait()
    check([(k, 0) for k in kept], reduced)
    assert reduced.histogram_values is not None
    assert np.isfinite(reduced.histogram_values).all()
    assert all(np.isfinite(v).all() for v in reduced.values.values())
