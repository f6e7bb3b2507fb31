"""Opt-in statistics of tensors, compared with numpy."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from comgra_decl.stats import spectral
from comgra_decl.stats.extra import Extras
from comgra_decl.stats.measures import (
    EffectiveRank,
    Function,
    FunctionError,
    Measure,
    Quantiles,
    Simple,
    Top,
    kurtosis,
    negative_fraction,
)

from .oracle import rows_of
from .recording import ready, reducer
from .test_neutral import SURROUNDINGS

Floats = NDArray[np.float64]

NEGATIVE = Simple("negative_fraction", negative_fraction)
KURTOSIS = Simple("kurtosis", kurtosis)
QUANTILES = Quantiles({"low": 0.1, "half": 0.5, "most": 1.0, "least": 0.0})


def measured(tensor: torch.Tensor, batch_dim: int | None, measure: Measure) -> Floats:
    """Returns what a step records for one tensor, [samples, names]."""
    by, extras = reducer(), Extras(measure.names)
    extras.add(by.add(tensor, batch_dim=batch_dim), tensor, batch_dim, measure)
    reduced = ready(by.finish())
    table, settle = extras.finish(reduced.starts, reduced.rows, reduced.aggregates)
    settle()
    return table


def moments(rows: Floats) -> Floats:
    with np.errstate(all="ignore"):
        centred = rows - rows.mean(1, keepdims=True)
        return np.asarray((centred**4).mean(1) / (centred**2).mean(1) ** 2)


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16),
    *(torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_dim", [0, 1, None])
def test_every_dtype_against_numpy(dtype: torch.dtype, batch_dim: int | None) -> None:
    x = (torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    rows = rows_of(x, batch_dim)
    np.testing.assert_array_equal(measured(x, batch_dim, NEGATIVE)[:, 0], (rows < 0).mean(1))
    np.testing.assert_allclose(measured(x, batch_dim, KURTOSIS)[:, 0], moments(rows), rtol=1e-5)
    expected = np.quantile(rows, [0.1, 0.5, 1, 0], axis=1).T
    np.testing.assert_allclose(measured(x, batch_dim, QUANTILES), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("measure", [Top(), EffectiveRank()])
def test_matrices_of_narrow_dtypes(dtype: torch.dtype, measure: Measure) -> None:
    x = (torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    np.testing.assert_allclose(measured(x, 0, measure), measured(x.double(), 0, measure), rtol=1e-5)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flipped": lambda x: x.flip(0),
    "transposed": lambda x: x.transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "strided": lambda x: x[:, ::2, ::3],
    "conjugated": lambda x: torch.complex(x, x).conj(),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "needs gradient": lambda x: (x.requires_grad_() * 1).abs(),
}


@pytest.mark.parametrize("form", FORMS)
def test_however_it_lies_in_memory(form: str) -> None:
    x = FORMS[form](torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(5)))
    rows = rows_of(x, 0)
    np.testing.assert_array_equal(measured(x, 0, NEGATIVE)[:, 0], (rows < 0).mean(1))
    np.testing.assert_allclose(measured(x, 0, KURTOSIS)[:, 0], moments(rows), rtol=1e-4)
    np.testing.assert_allclose(
        measured(x, 0, QUANTILES)[:, :2], np.quantile(rows, [0.1, 0.5], axis=1).T, atol=1e-6
    )


@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    ),
    st.floats(0, 1),
)
def test_any_quantile_of_any_numbers(rows: NDArray[np.float32], quantile: float) -> None:
    found = measured(torch.from_numpy(rows), 0, Quantiles({"q": quantile}))
    expected = np.quantile(rows.astype(np.float64), quantile, axis=1)
    slack = 1e-12 * np.abs(rows.astype(np.float64)).max()
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=slack)


def test_quantiles_of_many_values_look_at_some_of_all_features() -> None:
    x = torch.arange(64.0).expand(2, 5000, 64)  # the same 64 features in 5000 places
    found = measured(x, 0, Quantiles({"half": 0.5, "most": 1.0, "least": 0.0}))
    np.testing.assert_allclose(found, [[31.5, 63, 0]] * 2, atol=1.0)


def test_infinities_are_numbers_to_quantiles_and_nan_is_not() -> None:
    x = torch.tensor([[-torch.inf, 1, torch.inf], [1, torch.nan, 2], [torch.inf] * 3])
    found = measured(x, 0, Quantiles({"least": 0.0, "half": 0.5, "most": 1.0}))
    np.testing.assert_array_equal(
        found, [[-np.inf, 1, np.inf], [np.nan] * 3, [np.inf, np.inf, np.inf]]
    )


@pytest.mark.parametrize("measure", [NEGATIVE, KURTOSIS, QUANTILES, Top(), EffectiveRank()])
def test_nothing_has_no_statistics(measure: Measure) -> None:
    assert np.isnan(measured(torch.zeros(3, 0), 0, measure)).all()
    assert measured(torch.zeros(0, 3), 0, measure).shape == (0, len(measure.names))


def test_equal_values_have_no_kurtosis_and_a_large_mean_does_not_spoil_it() -> None:
    assert np.isnan(measured(torch.full((1, 9), 7.0), 0, KURTOSIS)).all()
    x = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(6)) + 1e4
    np.testing.assert_allclose(measured(x, 0, KURTOSIS)[:, 0], moments(rows_of(x, 0)), rtol=1e-3)


def test_a_batch_of_single_numbers() -> None:
    x = torch.tensor([1.0, -2.0])
    np.testing.assert_array_equal(measured(x, 0, NEGATIVE), [[0], [1]])
    np.testing.assert_array_equal(measured(x, 0, Quantiles({"q": 0.3})), [[1], [-2]])
    scalar = torch.tensor(-3.0)
    np.testing.assert_array_equal(measured(scalar, None, NEGATIVE), [[1]])


# -- custom functions


def test_a_function_sees_samples_first_and_its_numbers_are_recorded() -> None:
    seen = []

    def spread(x: torch.Tensor, *, times: float) -> torch.Tensor:
        seen.append((tuple(x.shape), x.dtype, x.requires_grad))
        return (x.amax((1, 2)) - x.amin((1, 2))) * times

    x = torch.randn(5, 3, 4, requires_grad=True).double()
    found = measured(x, 1, Function("spread", spread, {"times": 2.0}))
    rows = rows_of(x, 1)
    np.testing.assert_allclose(found[:, 0], 2 * (rows.max(1) - rows.min(1)))
    assert seen == [((3, 5, 4), torch.float64, False)]


def test_single_numbers_are_given_as_a_column() -> None:
    shapes = []

    def shape(x: torch.Tensor) -> Any:
        shapes.append(tuple(x.shape))
        return x[:, 0]

    function = Function("f", shape, {})
    np.testing.assert_array_equal(measured(torch.tensor([4.0, 5.0]), 0, function), [[4], [5]])
    np.testing.assert_array_equal(measured(torch.tensor(6.0), None, function), [[6]])
    assert shapes == [(2, 1), (1, 1)]


def test_a_function_that_writes_and_draws_random_numbers_changes_nothing() -> None:
    def rude(x: torch.Tensor) -> torch.Tensor:
        x.fill_(torch.randn(()) + np.random.rand() + random.random())
        return x.flatten(1).mean(1)

    x = torch.randn(2, 3)
    before, state = x.clone(), (random.getstate(), torch.get_rng_state())
    version, legacy = x._version, np.random.get_state()[1].copy()  # type: ignore[index]
    measured(x, 0, Function("rude", rude, {}))
    assert torch.equal(x, before)
    assert x._version == version
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    np.testing.assert_array_equal(np.random.get_state()[1], legacy)  # type: ignore[index]


def test_what_a_function_returns_may_be_changed_by_it_later() -> None:
    kept = torch.zeros(2)
    by, extras = reducer(), Extras(["f"])
    x = torch.ones(2, 3)
    extras.add(by.add(x, batch_dim=0), x, 0, Function("f", lambda _: kept.add_(1), {}))
    kept.add_(10)
    reduced = ready(by.finish())
    table, settle = extras.finish(reduced.starts, reduced.rows, {})
    settle()
    np.testing.assert_array_equal(table, [[1], [1]])


def _raises(_: torch.Tensor) -> torch.Tensor:
    raise KeyError("what")


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "it raised KeyError: 'what'": _raises,
    "it returned str instead of": lambda _: "text",
    "it returned float instead of": lambda _: 1.0,
    r"shape \(2, 3\) and dtype float32 instead of 2 numbers": lambda x: x,
    r"shape \(\) and dtype float32 instead of 2 numbers": lambda x: x.sum(),
    "dtype complex64": lambda x: x[:, 0].to(torch.complex64),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_function_that_gives_no_statistic_is_told(message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        measured(torch.ones(2, 3), 0, Function("f", WRONG[message], {}))


def test_one_number_for_the_whole_batch_stands_for_every_sample() -> None:
    x = torch.tensor([[0.0, 1, 0], [0, 0, 2]])
    for answer in (lambda x: (x == 0).all(0).double().mean(), lambda x: float((x == 0).all(0)[0])):
        found = measured(x, 0, Function("dead", answer, {}, whole=True))
        np.testing.assert_allclose(found, [[answer(x)]] * 2)
    with pytest.raises(FunctionError, match=r"shape \(2,\) .* instead of 1 numbers"):
        measured(x, 0, Function("dead", lambda x: x.sum(1), {}, whole=True))


def test_one_sample_may_be_a_plain_number() -> None:
    found = measured(torch.ones(2, 3), None, Function("f", lambda x: float(x.sum()), {}))
    np.testing.assert_array_equal(found, [[6]])


# -- neutral, and undisturbed


def _mean(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1).amax(1) @ torch.ones(x.shape[2]).to(x) if x.dim() == 3 else x[:, 0]


EVERYTHING: list[Measure] = [
    *(NEGATIVE, KURTOSIS, QUANTILES, Top(), EffectiveRank()),
    Function("mean", _mean, {}),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 70, 80)])
def test_surroundings_do_not_matter(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    spectral._start.cache_clear()
    for measure in EVERYTHING:
        with SURROUNDINGS[name]():
            found = measured(x, 0, measure)
        with torch.enable_grad():
            again = measured(x, 0, measure)
        np.testing.assert_array_equal(found, again)
        assert np.isfinite(found).all()


def test_nothing_of_the_tensor_changes_or_is_kept() -> None:
    leaf = torch.randn(3, 70, 80, requires_grad=True)
    x = leaf * 1
    before, version, state = x.detach().clone(), x._version, torch.get_rng_state()
    for measure in EVERYTHING:
        measured(x, 0, measure)
    assert torch.equal(x, before)
    assert (x._version, x.requires_grad, leaf.grad) == (version, True, None)
    assert torch.equal(torch.get_rng_state(), state)
    x.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))  # type: ignore[arg-type]
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
