"""The GPU kernels, run here on the host by Triton's interpreter."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comgra_decl import torch_private
from comgra_decl.records import Raw
from comgra_decl.stats import Reducer, device, fused, trie
from comgra_decl.stats.device import ASYNCHRONOUS
from comgra_decl.stats.quiet import buffer
from comgra_decl.stats.statistics import FORMULAS, row_statistics
from comgra_decl.stats.support import CannotReduceError
from comgra_decl.stats.trie import PutOff

from .recording import Tensors, Tolerance, check, ready, reduce, reducer

if platform.system() != "Linux":
    pytest.importorskip("triton")  # it is built only for Linux
from comgra_decl.stats.fused import Arena, Launcher, Plan, Rows, kind_of
from tests.support.shortened import combined, shortened

with_interpreter = pytest.mark.skipif(
    version("triton").startswith(("3.0.", "3.1.", "3.2.")),
    reason="the interpreter of Triton before 3.3 lacks operations of our kernels",
)
pytestmark = [
    with_interpreter,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # what a GPU computes without a warning
]


def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats 100 samples as very many, of which 8 are kept."""
    monkeypatch.setattr(trie, "MOST_ROWS", 100)
    monkeypatch.setattr(trie, "KEPT", 8)
    monkeypatch.setattr(fused, "CHUNK_ROWS", 64)
    monkeypatch.setattr(fused, "_LONG_CHUNK", 48)
    monkeypatch.setattr(fused, "_MOMENT_ROWS", 32)


class OnGpu(Reducer):
    """Treats tensors on the host as tensors on a GPU with Triton."""

    _host = torch.device("cpu", 0)  # a name that no tensor's device has
    _away = (*ASYNCHRONOUS, "cpu")

    @property
    def step(self) -> Any:
        return self._device(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _by_triton(
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Torch's operations would also give the right numbers."""
    monkeypatch.setattr(fused, "_warned", set())
    yield
    if "fails" not in request.node.name:
        assert "Triton's kernels cannot be used" not in caplog.text


def on_gpu(histogram_elements: int | None = None) -> OnGpu:
    return OnGpu(histogram_elements=histogram_elements, sample_count=3)


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
OTHERS = [
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
]
SHAPES: list[tuple[tuple[int, ...], int | None]] = [
    ((), None),
    ((1,), 0),
    ((7,), None),
    ((3, 16), 0),
    ((40, 17), 0),  # many short rows
    ((300, 3), 0),
    ((2, 1025), 0),
    ((3, 4096), 0),  # the longest of the short ones
    ((2, 4097), 0),  # the shortest of the long ones
    ((9000,), None),
    ((2, 3, 3001), 0),
    ((3, 5, 7), 1),  # samples are not in front
]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    if dtype is torch.bool:
        return x > 0
    if not dtype.is_floating_point:
        x = (x * 10).round().clamp(0 if "uint" in str(dtype) else -100, 100)
    return x.to(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            each,
            marks=[]
            if each in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
            else [pytest.mark.slow],
        )
        for each in (*FLOATS, *INTEGERS, *OTHERS)
    ],
    ids=str,
)
def test_triton_sums_equal_the_oracle(dtype: torch.dtype) -> None:
    tensors = [(numbers(shape, dtype), batch_dim) for shape, batch_dim in SHAPES]
    by = on_gpu()
    check(tensors, reduce(tensors, by))
    assert by.step.launcher is not None


@pytest.mark.parametrize("dtype", FLOATS[:1], ids=str)
@pytest.mark.parametrize("length", [60, 3000, 9000])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_triton_keeps_the_spread_of_numbers_far_from_zero(
    dtype: torch.dtype, length: int, offset: float
) -> None:
    x = (numbers((3, length), torch.float64) / 3 + offset).to(dtype)
    check([(x, 0)], reduce([(x, 0)], on_gpu()), Tolerance(relative=1e-6, std=1e-6))


BAD = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize(
    ("bad", "dtype", "length"),
    combined(
        [c for n in (1, 2, 3) for c in itertools.combinations(BAD, n)], FLOATS, [33, 5000], rounds=2
    ),
)
def test_triton_treats_what_is_not_finite_as_numpy_does(
    bad: tuple[float, ...], dtype: torch.dtype, length: int
) -> None:
    x = numbers((4, length), dtype)
    for row, place in enumerate((0, length // 2, length - len(bad))):
        x[row, place : place + len(bad)] = torch.tensor(bad)
    check([(x, 0)], reduce([(x, 0)], on_gpu()))


@pytest.mark.parametrize("length", [33, 9000])
@pytest.mark.parametrize("scale", shortened([1e-40, 1e37, 1e-30, 1e18, 1e25], tried=2))
def test_triton_reads_what_float32_cannot_add_up_once_more(scale: float, length: int) -> None:
    x = numbers((3, length), torch.float32) * scale / 4
    x[2] = 0
    check([(x, 0)], reduce([(x, 0)], on_gpu()))


@pytest.mark.parametrize(
    "layout", ["transposed", "strided", "channels_last", "sliced", "expanded", "negated", "flipped"]
)
def test_triton_reads_numbers_however_they_lie_in_memory(layout: str) -> None:
    x = numbers((4, 6, 8, 10), torch.float32)
    tensor = {
        "transposed": x.transpose(0, 3),
        "strided": x[:, :, ::2],
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "sliced": x[1:, 2:],
        "expanded": x[:, :1].expand(4, 6, 8, 10),
        "negated": torch.complex(x, x).conj().imag,
        "flipped": x.flip(1),
    }[layout]
    for dim in (0, 1, None):
        check([(tensor, dim)], reduce([(tensor, dim)], on_gpu()))


def test_triton_takes_complex_and_empty_tensors() -> None:
    x = torch.complex(numbers((3, 5000), torch.float32), numbers((3, 5000), torch.float32, seed=1))
    tensors: Tensors = [(x, 0), (x[:, :40], None), (torch.zeros(3, 0), 0), (torch.zeros(0, 3), 0)]
    check(tensors, reduce(tensors, on_gpu()))


@pytest.mark.parametrize("part", shortened([7, 5000, 1, 100], tried=1))
def test_triton_leaves_tensors_that_need_a_large_copy_to_torch_in_parts(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_MOST_COPIED", 0)
    monkeypatch.setattr(device, "_PART", part)
    x = numbers((9, 300), torch.float32)
    plain: Tensors = [(x, 0), (x.t(), 1), (x.bfloat16(), None)]
    scattered: Tensors = [(x[:, ::3], 0), (x.t(), 0), (torch.complex(x, x), 0)]
    converted: Tensors = [(numbers((9, 40), dtype), 0) for dtype in OTHERS]
    by = on_gpu(50)
    for _ in range(3):
        found = reduce(plain + scattered + converted, by)
        check(plain + scattered + converted, found)
    expected = reduce(scattered + converted, reducer(histogram_elements=50))
    found = reduce(scattered + converted, on_gpu(50))
    np.testing.assert_array_equal(found.histogram_values, expected.histogram_values)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([1, 5, 64, 100, 1500, 4097, 9000])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 5),
)
@settings(max_examples=3)
@pytest.mark.slow
def test_triton_gives_the_histogram_sample_of_the_host(
    shapes: list[tuple[int, int]], seed: int
) -> None:
    """Whether it is read at once, together or later."""
    by, host = on_gpu(histogram_elements=50), reducer(histogram_elements=50, sample_count=3)
    for step in range(4):
        made = [numbers(s, torch.float32, seed=seed + step) for s in shapes]
        for one in (by, host):
            for tensor in made:
                one.add(tensor, batch_dim=0)
        found, expected = ready(by.finish()), ready(host.finish())
        check([(tensor, 0) for tensor in made], found)
        np.testing.assert_array_equal(found.histogram_values, expected.histogram_values)
        np.testing.assert_array_equal(found.histogram_starts, expected.histogram_starts)


# -- deferred tensors


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each launch appends how many tensors it reads."""
    counted: list[int] = []
    launch = Launcher.launch

    def counting(self: Launcher, tensors: Any, sizes: Any) -> Any:
        counted.append(len(tensors))
        return launch(self, tensors, sizes)

    monkeypatch.setattr(Launcher, "launch", counting)
    return counted


def test_triton_reads_small_tensors_together_once_that_is_known_to_be_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by = on_gpu()
    counted = launches(monkeypatch)
    for step in range(4):
        made: Tensors = [(numbers((4, 20), torch.float32, seed=10 * step + k), 0) for k in range(6)]
        check(made, reduce(made, by))
        if step == 0:
            assert counted == [1] * 6
        elif step == 1:
            assert counted == [1] * 6 + [6]  # at once, and later to compare
        else:
            assert counted == [6]
        counted.clear()


def test_triton_reads_a_tensor_at_once_that_is_written_later_on() -> None:
    by = on_gpu()
    for step in range(4):
        x = numbers((4, 20), torch.float32, seed=step)
        expected = x.clone()
        by.add(x, batch_dim=0)
        x.mul_(2)
        reduced = ready(by.finish())
        assert reduced.lost == []
        check([(expected, 0)], reduced)


def test_triton_is_not_fooled_by_writes_that_are_not_counted() -> None:
    by = on_gpu()
    for step in range(4):
        x = numbers((4, 20), torch.float32, seed=step)
        expected = x.clone()
        by.add(x, batch_dim=0)
        x.data.mul_(2)
        reduced = ready(by.finish())
        assert reduced.lost == []
        check([(expected, 0)], reduced)


def test_triton_names_what_was_written_before_it_was_read() -> None:
    """A program that begins to write in place loses one record when it does so."""
    by = on_gpu()
    for step in range(6):
        x, y = (numbers((4, 20), torch.float32, seed=step + k) for k in (0, 50))
        expected = x.clone()
        by.add(x, batch_dim=0)
        by.add(y, batch_dim=0)
        if step >= 3:
            x.mul_(2)
        reduced = ready(by.finish())
        if step == 3:
            assert reduced.lost == [0]
            assert np.isnan(reduced.raw[reduced.starts[0]]).all()
            assert np.isfinite(reduced.raw[reduced.starts[1]]).all()
        else:
            assert reduced.lost == []
            check([(expected, 0), (y, 0)], reduced)


@pytest.mark.slow
def test_triton_holds_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_MOST_HELD", 4)
    by = on_gpu()
    counted = launches(monkeypatch)
    made: Tensors = [(numbers((2, 8), torch.float32, seed=k), 0) for k in range(10)]
    for _ in range(3):
        counted.clear()
        check(made, reduce(made, by))
    assert counted == [4, 4, 2]
    monkeypatch.setattr(device, "_MOST_BYTES_HELD", 3 * 2 * 8 * 4)
    counted.clear()
    check(made, reduce(made, by))
    assert counted == [3, 3, 3, 1]
    assert by.step._step.held == []


@pytest.mark.slow
def test_triton_reads_all_that_is_added_together_in_one_launch_for_each_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of parameters of any size, already in the first step."""
    by = on_gpu()
    by.add(torch.ones(2, 2), batch_dim=0)  # so that the device is known
    by.finish()
    counted = launches(monkeypatch)
    shapes = [(40,), (300_000,), (3,), (500, 600), (2000,), (64, 64)]
    made = [numbers(shape, torch.float32, seed=k) for k, shape in enumerate(shapes)]
    with by.together():
        for tensor in made:
            by.add(tensor, batch_dim=None)
        assert counted == []
    assert sorted(counted) == [1, 1, 2, 2]  # with widths 16, 64 and 4096, and the long ones
    copies = [tensor.clone() for tensor in made]
    for tensor in made:
        tensor.zero_()
    check([(tensor, None) for tensor in copies], ready(by.finish()))


def test_triton_reads_the_same_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    by = on_gpu()
    counted = launches(monkeypatch)
    x, y = numbers((4, 300), torch.float32), numbers((4, 300), torch.float32, seed=1)
    numbered = [by.add(t, batch_dim=0) for t in (x, y, x)]
    assert numbered == [0, 1, 0]
    assert counted == [1, 1]
    x.add_(1)
    assert by.add(x, batch_dim=0) == 2


def test_triton_reads_memory_once_in_a_step_however_it_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first repetitions are read again, to see that nothing was written uncounted."""
    by = on_gpu()
    counted = launches(monkeypatch)
    for step in range(4):
        x = numbers((4, 300), torch.float32, seed=step)
        others = [numbers((4, 300), torch.float32, seed=10 + step + k) for k in range(6)]
        made = [x, *others, x, x.detach(), x.view(4, 300), x.view(2, 600), x.t()]
        counted.clear()
        numbered = [by.add(t, batch_dim=0) for t in made]
        assert len(by._repeats._storages) == 9  # views with other shapes or strides are different
        reduced = ready(by.finish())
        same = numbered[7:10]
        assert same == ([7, 8, 9] if step == 0 else [0, 0, 0])
        for number, tensor in zip(numbered, made, strict=True):
            rows = reduced.raw[reduced.starts[number] :][: len(tensor)]
            expected = tensor.numpy().max(1)
            np.testing.assert_array_equal(rows[:, Raw.MAX], expected)


@pytest.mark.slow
def test_triton_takes_no_memory_for_read_that_another_tensor_had_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freed memory is reused by tensors with the same shape and version."""
    monkeypatch.setattr(device, "_SMALL", 1)  # nothing is held
    by = on_gpu()
    places = set()
    for step in range(4):
        expected = []
        for k in range(12):
            x = numbers((4, 300), torch.float32, seed=20 * step + k)
            expected.append(float(x.max()))
            places.add(x.data_ptr())
            assert by.add(x, batch_dim=0) == k
            del x
        reduced = ready(by.finish())
        highest = reduced.raw[:, Raw.MAX].reshape(12, 4).max(1)
        np.testing.assert_array_equal(highest, expected)
    assert len(places) < 48


@pytest.mark.parametrize("counts", [True, False])
def test_triton_reads_memory_again_that_was_written_in_between(counts: bool) -> None:
    by = on_gpu()
    for step in range(4):
        x = numbers((4, 300), torch.float32, seed=step)
        first = x.clone()
        by.add(x, batch_dim=0)
        # alive together: an object at another one's address would not replace the stored entry
        others = [numbers((4, 300), torch.float32, seed=30 + k) for k in range(5)]
        for other in others:
            by.add(other, batch_dim=0)
        (x if counts else x.data).mul_(2)
        number = by.add(x, batch_dim=0)
        reduced = ready(by.finish())
        assert number == 6
        rows = [reduced.raw[reduced.starts[i] :][:4, Raw.MAX] for i in (0, 6)]
        if 0 not in reduced.lost:
            np.testing.assert_array_equal(rows[0], first.numpy().max(1))
        np.testing.assert_array_equal(rows[1], x.numpy().max(1))


@pytest.mark.slow
def test_triton_defers_tensors_though_pieces_are_others_than_when_they_are_read_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In that case, their sums are rounded differently."""
    monkeypatch.setattr(fused, "_PROGRAMS", 2)
    by = on_gpu()
    counted = launches(monkeypatch)
    for step in range(3):
        counted.clear()
        made: Tensors = [
            (numbers((2, 30_000), torch.float32, seed=5 * step + k), 0) for k in range(3)
        ]
        check(made, reduce(made, by))
    assert counted == [3]


def test_triton_holds_few_bytes_of_copies_though_all_is_read_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "_MOST_BYTES_HELD", 3 * 4 * 20 * 4)
    by = on_gpu()
    by.add(torch.ones(2, 2), batch_dim=0)  # so that the device is known
    by.finish()
    counted = launches(monkeypatch)
    dense = [numbers((4, 20), torch.float32, seed=k) for k in range(7)]
    wide = [numbers((4, 40), torch.float32, seed=k)[:, ::2] for k in range(7)]
    for tensors, expected in ((dense, [7]), (wide, [3, 3, 1])):
        counted.clear()
        with by.together():
            for tensor in tensors:
                by.add(tensor, batch_dim=0)
        assert counted == expected
        check([(tensor, 0) for tensor in tensors], ready(by.finish()))


def test_triton_holds_known_tensors_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """No views of them are created, yet they are recognised."""
    by, entered = on_gpu(), 0

    def counted(self: Reducer, node: Any, tensor: torch.Tensor) -> None:
        nonlocal entered
        entered += 1
        original(self, node, tensor)

    original = Reducer._reduce
    monkeypatch.setattr(Reducer, "_reduce", counted)
    for step in range(5):
        x, y = (numbers((6, 20), torch.float32, seed=2 * step + k) for k in range(2))
        x.requires_grad_()
        made: Tensors = [(x, 0), (y.t(), 1), (y, None), (y[:2], 0)]
        entered = 0
        numbered = [by.add(tensor, batch_dim=dim) for tensor, dim in [*made[:1], *made]]
        assert numbered == [0, 0, 1, 2, 3]
        check(made, ready(by.finish()))
    assert entered == 1  # the one that spans both


@pytest.mark.parametrize("moment", ["written", "another stream", "in inference mode"])
def test_triton_holds_nothing_as_it_is_where_there_is_more_to_do(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = on_gpu()
    for step in range(6):
        x = numbers((6, 20), torch.float32, seed=step)
        y = x.clone()
        if step == 4 and moment == "another stream":
            monkeypatch.setattr(by.step, "_stays", lambda: False)
        if step == 4 and moment == "in inference mode":
            with torch.inference_mode():
                x = x.clone()
        by.add(x, batch_dim=0)
        as_it_is = any(each.rows is x for each in by.step._step.held)
        assert as_it_is == (step >= 2 and (step != 4 or moment == "written"))
        if step == 4 and moment == "written":
            x.add_(1)
            reduced = ready(by.finish())
            assert reduced.lost == [0]
            break
        monkeypatch.undo()
        check([(y, 0)], ready(by.finish()))


def test_triton_that_fails_is_said_once_and_torch_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by = on_gpu(histogram_elements=20)
    made: Tensors = [(numbers((4, 300), torch.float32, seed=k), 0) for k in range(3)]
    check(made, reduce(made, by))

    launch, left = Launcher.launch, [1]  # it fails in the middle of a step

    def fails(*given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("ptxas is gone")
        return launch(*given)

    monkeypatch.setattr(Launcher, "launch", fails)
    for _ in range(3):
        check(made, reduce(made, by))
    other = on_gpu()  # evaluations have their own
    check(made, reduce(made, other))
    (said,) = [record.message for record in caplog.records]
    assert "ptxas is gone" in said
    assert "torch's operations are used" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libcuda.so.1: cannot open shared object file"), True),
        (RuntimeError("0 active drivers"), True),
        (ModuleNotFoundError("No module named 'setuptools'", name="setuptools"), True),
        (ModuleNotFoundError("No module named 'triton'", name="triton"), False),
    ],
)
def test_triton_that_fails_to_be_imported_is_said_once_unless_it_is_not_installed(
    error: Exception, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = "comgra_decl.stats.triton_kernels"

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == kernels:
                raise error

    import comgra_decl.stats

    monkeypatch.delitem(sys.modules, kernels, raising=False)
    monkeypatch.delattr(comgra_decl.stats, "triton_kernels", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    fused.launcher_class.cache_clear()
    try:
        for _ in range(2):
            assert fused.launcher_class("cuda") is None
            fused.launcher_class.cache_clear()
    finally:
        fused.launcher_class.cache_clear()
    assert [str(error) in record.message for record in caplog.records] == [True] * said


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        (torch.float32, 3),
        (torch.bfloat16, 40),
        pytest.param(torch.uint16, 40, marks=pytest.mark.slow),
        pytest.param(torch.float32, 4100, marks=pytest.mark.slow),
    ],
)
def test_triton_aggregates_very_many_samples(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int
) -> None:
    few_rows(monkeypatch)
    x = numbers((201, length), dtype)
    if dtype.is_floating_point:
        x[150, 0], x[170:, -1] = torch.nan, torch.inf
        x[:3] = 0
        x[60:100] += 1e4
    by = on_gpu(histogram_elements=500)
    y = numbers((5, 7), torch.float32)
    made: Tensors = [(y, 0), (x, 0), (x.T.contiguous(), 1)]
    reduced = reduce(made, by)
    check(made, reduced)
    assert reduced.rows.tolist() == [5, 8, 8]
    monkeypatch.undo()
    host = reduce(made, reducer(histogram_elements=500))
    np.testing.assert_array_equal(reduced.histogram_values, host.histogram_values)
    assert by.step.launcher is not None


def test_triton_aggregates_as_formulas_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opt-in formulas as well, in stored order."""
    few_rows(monkeypatch)
    x = numbers((201, 33), torch.float32)
    reduced = reduce([(x, 0)], on_gpu())
    monkeypatch.undo()
    whole = reduce([(x, 0)])
    table = row_statistics(whole.raw.T, np.full(201, 33.0), FORMULAS)
    expected = [(row.mean(), row.std(), np.abs(row).max()) for row in table]
    np.testing.assert_allclose(reduced.aggregates[0], expected, rtol=2e-6, atol=1e-7)


def test_triton_that_fails_on_very_many_samples_leaves_them_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few_rows(monkeypatch)

    def fails(*_: Any) -> Any:
        raise RuntimeError("ptxas is gone")

    monkeypatch.setattr(Launcher, "pool", fails)
    made: Tensors = [(numbers((201, 200), torch.float32, seed=k), 0) for k in range(2)]
    by = on_gpu(histogram_elements=20)
    for _ in range(2):
        check(made, reduce(made, by))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.slow
def test_triton_results_that_are_many_leave_the_device_within_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "_MOST_LIVE", 2000)
    monkeypatch.setattr(fused, "_RESULT_ROWS", 16)
    monkeypatch.setattr(fused, "_SAMPLES", 100)
    monkeypatch.setattr(trie, "MOST_ROWS", 100)
    by = on_gpu(histogram_elements=60)
    shapes = [(10, 30), (40, 50), (3, 5000), (201, 20), (9, 9), (201, 4)] * 2
    made: Tensors = [(numbers(s, torch.float32, seed=k), 0) for k, s in enumerate(shapes)]
    monkeypatch.setattr(trie, "KEPT", 8)
    host = reduce(made, reducer(histogram_elements=60))
    shipped: list[bool] = []
    for _ in range(3):  # at once, tried, deferred
        live = []
        for tensor, batch_dim in made:
            by.add(tensor, batch_dim=batch_dim)
            assert by.step.launcher is not None
            live.append(sum(block.nbytes for block in by.step.launcher.results.used()))
        shipped += [bool(arena.shipped) for arena in by.step.launcher.arenas[:2]]
        reduced = ready(by.finish())
        check(made, reduced)
        np.testing.assert_array_equal(reduced.histogram_values, host.histogram_values)
        assert max(live) <= 2000 + 40 * 64
    assert shipped[:2] == [True, True]


# -- what a launch covers


def test_triton_plans_cover_each_element_once_beyond_32_bits() -> None:
    """2^31 elements and more require index arithmetic, not memory."""
    for each in (
        Rows(3, 2**31 + 17, 1, 0),
        Rows(2**19 + 3, 4096, 1, 0),
        Rows(1, 2**33, 2**20, 2**13),
    ):
        plan = Plan([each])
        order = np.argsort(plan.table[:, 1])
        first = plan.table[order, 1]
        size = plan.table[order, 2] * plan.table[order, 3]
        assert first[0] == 0
        np.testing.assert_array_equal(first[1:], (first + size)[:-1])
        assert first[-1] + size[-1] == each.rows * each.length
        assert plan.table[:, 7].sum() == each.picked
    assert plan.table[-1, 8] + plan.table[-1, 7] == 2**13


BEYOND = 2**31 + 12_345


@pytest.mark.parametrize("length", [60, 9000], ids=["short rows", "long rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_triton_kernels_read_and_sample_beyond_32_bits(dtype: torch.dtype, length: int) -> None:
    """A tensor's address is moved back by as many elements as its table moves ahead."""
    launcher = Launcher(torch.device("cpu"))
    x = numbers((3, length), dtype)
    sizes = Rows(3, length, 7, -(-3 * length // 7))
    plan = Plan([sizes])
    plan.table[:, 1] += BEYOND
    plan.table[:, 5] += BEYOND
    pointers = torch.tensor([x.data_ptr() - BEYOND * x.element_size()], dtype=torch.int64)
    results = torch.full((plan.results, 8), torch.nan, dtype=torch.float64)
    samples = torch.full((plan.samples,), torch.nan)
    language = launcher._kernels.tl.dtype
    arguments = x, pointers, torch.from_numpy(plan.table), results, samples, 0, 0
    type_, work = language(fused._POINTERS[dtype]), language("fp32")
    if plan.width:
        kernel = launcher._kernels.short_rows
        constants: Any = type_, work, fused._TILE // plan.width, plan.width, True, True
    else:
        kernel = launcher._kernels.long_rows
        constants = type_, work, fused._BLOCK, True, False, True
    kernel[len(plan.table), 1, 1](*arguments, *constants)
    raw, true = plan.merged(results.numpy()), x.double().numpy()
    np.testing.assert_array_equal(raw[:, Raw.MIN], true.min(1))
    np.testing.assert_array_equal(raw[:, Raw.MAX], true.max(1))
    np.testing.assert_allclose(raw[:, Raw.ABS_SUM], np.abs(true).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(samples.numpy(), true.reshape(-1)[::7].astype(np.float32))


def test_triton_plans_put_pieces_together_about_one_pivot() -> None:
    rng = np.random.default_rng(0)
    rows = Rows(4, 50_000, 1, 0)
    plan = Plan([rows])
    x = rng.normal(1e4, 1, (4, 50_000))
    x[1, 49_000], x[2, 3], x[3, 5], x[3, 49_999] = np.inf, np.nan, np.inf, -np.inf
    pieces = np.empty((plan.results, 8))
    for entry in plan.table:
        part = x.reshape(-1)[entry[1] : entry[1] + entry[2]]
        pivot = part[0] if np.isfinite(part).all() else 0.0
        with np.errstate(invalid="ignore"):
            pieces[entry[4]] = (
                pivot,
                (part - pivot).sum(),
                ((part - pivot) ** 2).sum(),
                np.abs(part).sum(),
                part.min(),
                part.max(),
                (part != 0).sum(),
                (~np.isfinite(part)).sum(),
            )
    raw = plan.merged(pieces)
    mean = raw[:, Raw.PIVOT] + raw[:, Raw.SUM] / 50_000
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(mean, x.mean(1), rtol=1e-12)
        np.testing.assert_array_equal(raw[:, Raw.MAX], x.max(1))
        np.testing.assert_array_equal(raw[:, Raw.MIN], x.min(1))
        variance = raw[:, Raw.SQUARES] / 50_000 - (raw[:, Raw.SUM] / 50_000) ** 2
    np.testing.assert_allclose(np.sqrt(variance[0]), x[0].std(), rtol=1e-9)
    np.testing.assert_array_equal(raw[:, Raw.NONFINITE], [0, 1, 1, 2])
    assert np.isinf(raw[1, Raw.SUM])
    assert np.isnan(raw[3, Raw.SUM])


def test_triton_launches_are_told_apart_by_dtype_and_width() -> None:
    kinds = [
        (torch.float32, 10),
        (torch.float32, 5000),
        (torch.bfloat16, 10),
        (torch.float32, 16),
        (torch.float32, 90_000),
    ]
    one, long, half, same, longer = (kind_of(d, Rows(2, length, 1, 0)) for d, length in kinds)
    assert one == same
    assert long == longer
    assert len({one, long, half}) == 3


class Kernel:
    """Tracks who launches: the kernel itself, which looks up the compiled variant, or its handle.

    Args:
        refuses: the handle of what is compiled takes other arguments.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.launched: list[tuple[str, tuple[int, ...], int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any) -> Any:
            self.launched.append(("kernel", grid, len(given)))
            return Handle(self)

        return launch


class Handle:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any) -> None:
            if self.kernel.refuses:
                raise TypeError("function takes exactly 12 arguments")
            self.kernel.launched.append(("handle", grid, len(given)))

        return launch


def test_triton_is_asked_once_for_what_is_compiled() -> None:
    launcher, kernel = Launcher(torch.device("cpu")), Kernel()
    x = torch.zeros(64)
    for tensor, constant in ((x, 1), (x, 1), (x[1:], 1), (x[2:], 1), (x, 2), (x.double(), 1)):
        launcher._run(kernel, 7, (tensor, x), (constant,))
    assert [who for who, _, _ in kernel.launched] == [
        *("kernel", "handle"),
        *("kernel", "handle"),  # not aligned
        *("kernel", "kernel"),
    ]
    assert {(grid, number) for _, grid, number in kernel.launched} == {((7, 1, 1), 3)}


def test_triton_tells_the_time_of_what_is_launched_for_the_first_time() -> None:
    """Kernels are compiled at that point."""
    by = on_gpu()
    x = numbers((4, 20), torch.float32)
    reduce([(x, 0)], by)
    assert by.take_compiling() > 0
    reduce([(x, 0), (numbers((9, 20), torch.float32), 0)], by)
    assert by.take_compiling() == 0
    reduce([(x, 0), (x.double(), 0)], by)
    assert by.take_compiling() > 0


def test_triton_that_takes_other_arguments_is_asked_each_time() -> None:
    launcher, kernel = Launcher(torch.device("cpu")), Kernel(refuses=True)
    for _ in range(3):
        launcher._run(kernel, 7, (torch.zeros(64),), ())
    assert [who for who, _, _ in kernel.launched] == ["kernel"] * 3


def test_triton_uses_the_memory_of_a_step_again() -> None:
    arena = Arena(torch.device("cpu"), torch.float64, 100, 8)
    taken = [arena.take(size) for size in (60, 40, 1, 500, 10)]
    assert taken == [(0, 0), (0, 60), (1, 0), (2, 0), (3, 0)]
    blocks = [arena.block(0).data_ptr(), arena.block(1).data_ptr()]
    assert [len(used) for used in arena.used()] == [100, 1, 500, 10]
    arena.restart()
    assert [*arena.used()] == []
    assert arena.take(100) == (0, 0)
    assert arena.take(100) == (1, 0)
    assert [arena.block(0).data_ptr(), arena.block(1).data_ptr()] == blocks


def test_triton_keeps_tables_of_few_bytes_for_sizes_that_keep_changing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "_MOST_TABLES", 4000)
    launcher = Launcher(torch.device("cpu"))
    kept = []
    for rows in [*range(300, 1300, 100), 90_000, 300]:
        sizes = (Rows(rows, 300, 1, 0),)
        plan, table = launcher._plan(sizes)
        assert launcher._plan(sizes)[1] is table
        kept.append(sum(each.nbytes for _, each in launcher._plans.values()))
        assert kept[-1] <= max(4000, plan.table.nbytes)
    assert max(kept[:5]) > 2000


COMPILE = """
import itertools, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from comgra_decl.stats import triton_kernels as kernels
from comgra_decl.stats.fused import _BLOCK, _POINTERS, _TILE, _WIDTHS, _WORK, work_dtype

ARGUMENTS = {"table": "*i64", "pointers": "*i64", "results": "*fp64", "samples": "*fp32"}
NAMES = {"uint8": "u8", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64"}

PLACES = dict.fromkeys(("place", "sample_place", "rows", "elements"), "i32")

def compiled(kernel, name, work, constants, target):
    pointer = "*" + NAMES.get(name, name)
    types = {"TYPE": tl.dtype(name), "WORK": tl.dtype(work)}
    constants |= {n: value for n, value in types.items() if n in kernel.arg_names}
    signature = {"x": pointer, **ARGUMENTS, "out": "*fp64", **PLACES}
    signature = {n: signature.get(n, "constexpr") for n in kernel.arg_names}
    places = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    assert triton.compile(source, target=target).asm

which = sys.argv[1]
targets = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
dtypes = {name: _WORK[work_dtype(dtype)] for dtype, name in _POINTERS.items()}
every = sys.argv[2] == "all"
for name, work in dtypes.items() if every else [("bf16", "fp32")]:
    for many in (False, True) if every else (True,):
        flags = {"MANY": many, "SAMPLED": many}
        long = flags | {"BLOCK": _BLOCK, "ALIGNED": many}
        compiled(kernels.long_rows, name, work, long, targets[which])
        for width in _WIDTHS if every else (64,):
            short = flags | {"WIDTH": width, "ROWS": _TILE // width if every else 4}
            compiled(kernels.short_rows, name, work, short, targets[which])
compiled(kernels.row_moments, "fp64", "fp64", {"ROWS": 1024 if every else 64}, targets[which])
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "which"),
    [
        ("cuda", "few"),
        pytest.param("cuda", "all", marks=pytest.mark.slow),
        pytest.param("hip", "all", marks=pytest.mark.slow),
    ],
)
def test_triton_compiles_the_kernels_for_gpus_that_are_not_here(
    tmp_path: Path, target: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, target, which], capture_output=True, text=True, check=False
    )
    assert done.stdout == "compiled\n", done.stderr[-2000:]


def test_triton_puts_nothing_off_that_no_version_is_counted_for() -> None:
    by = on_gpu()
    for step in range(4):
        with torch.inference_mode():
            x = numbers((4, 20), torch.float32, seed=step)
            expected = x.clone()
            by.add(x, batch_dim=0)
            x.mul_(2)
        check([(expected, 0)], ready(by.finish()))
    (node,) = by._root.children.values()
    assert node.put_off is not PutOff.SAFE


# -- streams and captured graphs


class Streams:
    """A stand-in for a GPU's streams: which is current, and what was done on which.

    Attributes:
        done: (stream, what) in order.
        capturing: whether the current stream is being captured.
    """

    def __init__(self) -> None:
        self.current = Stream(self, 1)
        self.done: list[tuple[int, str]] = []
        self.capturing = False

    def current_stream(self, _: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def Event(self, **_: object) -> Any:  # noqa: N802 - as torch calls it
        def record(stream: Stream) -> None:
            self.done.append((stream.cuda_stream, "record"))

        return SimpleNamespace(record=record, synchronize=lambda: None)


class Stream:
    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.cuda_stream = streams, number

    def wait_stream(self, other: Stream) -> None:
        self.streams.done.append((self.cuda_stream, f"wait for {other.cuda_stream}"))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Gives tensors on the host the streams of a GPU."""
    stand_in = Streams()
    original, launch = device.DeviceStep.__init__, Launcher.launch

    def begin(step: device.DeviceStep, *given: Any) -> None:
        original(step, *given)
        step._module, step.device = stand_in, torch.device("cuda", 0)

    def noted(launcher: Launcher, tensors: Any, sizes: Any) -> Any:
        stand_in.done.append((stand_in.current.cuda_stream, f"launch {len(tensors)}"))
        return launch(launcher, tensors, sizes)

    def unpinned(*shape: int, pinned: bool = False, **how: Any) -> torch.Tensor:
        del pinned
        return buffer(*shape, **how)

    monkeypatch.setattr(device.DeviceStep, "__init__", begin)
    monkeypatch.setattr(Launcher, "launch", noted)
    monkeypatch.setattr(device, "buffer", unpinned)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stand_in.capturing)

    def raw(_: int) -> int:
        return stand_in.current.cuda_stream

    monkeypatch.setitem(vars(torch_private), "raw_stream", raw)
    return stand_in


def test_triton_reads_put_off_tensors_on_the_stream_that_made_them(streams: Streams) -> None:
    by = on_gpu()
    other = Stream(streams, 2)
    for step in range(4):
        made: Tensors = [(numbers((4, 20), torch.float32, seed=3 * step + k), 0) for k in range(3)]
        streams.done.clear()
        for tensor, dim in made[:2]:
            by.add(tensor, batch_dim=dim)
        with streams.stream(other):
            by.add(made[2][0], batch_dim=0)
            reduced = ready(by.finish())
        check(made, reduced)
    assert streams.done == [
        (1, "wait for 2"),  # where the previous step ended, since both use the same memory
        (1, "launch 2"),
        (2, "wait for 1"),
        (2, "launch 1"),
        (2, "record"),
    ]


def test_triton_does_nothing_while_a_graph_is_captured(streams: Streams) -> None:
    """A replay would repeat it."""
    by = on_gpu()
    for step in range(5):
        x, y = (numbers((4, 20), torch.float32, seed=2 * step + k) for k in range(2))
        assert by.add(x, batch_dim=0) == 0
        streams.done.clear()
        streams.capturing = True
        for tensor in (x.clone(), y):
            with pytest.raises(CannotReduceError, match="CUDA graph"):
                by.add(tensor, batch_dim=0)
        assert streams.done == []
        streams.capturing = False
        assert by.add(y, batch_dim=0) == 1
        check([(x, 0), (y, 0)], ready(by.finish()))
