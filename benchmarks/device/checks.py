"""Checks without which timings are meaningless: neutrality, correctness, waits, memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.device.nets import GptSize, gpt
from benchmarks.device.places import Place
from benchmarks.device.recording import RECORD, Declared, reduced
from benchmarks.device.timing import Deadline
from benchmarks.nets import Training
from comgra_decl.records import Raw, RawStep
from comgra_decl.stats.moments import MOST_ROWS

_STEPS = 6
_MIB = 1 << 20
_MOST_SHARE, _MOST_BYTES = 0.02, 64 * _MIB
_EXACT = 1e-6

State = dict[str, Tensor]


# -- neutral -------------------------------------------------------------------------------------


def difference(place: Place, size: GptSize, deadline: Deadline) -> str | None:
    """Return the first difference between traced and plain training; None if there is none.

    Compares losses, gradients, parameters, optimizer state and random numbers bit for bit, for a
    transformer with dropout, recording every other step.

    Raises:
        OutOfTimeError: the deadline is reached.
        RuntimeError: two plain training runs already differ.
    """
    deadline.check()
    training = gpt(place, size, dropout=0.1)
    with _deterministic():
        plain, again = trained(place, training), trained(place, training)
        deadline.check()
        unlike = _unlike(plain, again)
        if unlike is not None:
            raise RuntimeError(f"the plain training is not reproducible: {unlike}")
        every_other = Declared(RECORD.source, ("schedule.every=2",))
        with reduced(every_other) as recording:
            traced = trained(place, training)
    recording.check(_STEPS // 2)
    return _unlike(plain, traced)


def trained(place: Place, training: Training) -> State:
    """Train, and return losses, parameters, gradients, states and random numbers by name."""
    training.reset()
    losses = [training.step().detach() for _ in range(_STEPS)]
    left: State = {f"loss {i}": loss.clone() for i, loss in enumerate(losses)}
    for name, parameter in training.model.named_parameters():
        left[name] = parameter.detach().clone()
        if parameter.grad is not None:
            left[f"{name}.grad"] = parameter.grad.clone()
        for key, value in training.optimizer.state[parameter].items():
            left[f"{name}.{key}"] = torch.as_tensor(value).clone()
    left["random numbers"] = torch.rand(8, device=place.name)
    left["random numbers of the host"] = torch.rand(8)
    return left


def _unlike(one: State, other: State) -> str | None:
    if one.keys() != other.keys():
        return f"only one has {min(one.keys() ^ other.keys())}"
    for name, value in one.items():
        if not torch.equal(value, other[name]):
            far = (value.double() - other[name].double()).abs().max().item()
            return f"{name} differs by {far:.3g}"
    return None


def farthest(one: State, other: State) -> dict[str, float]:
    """Return the largest absolute differences between losses and between parameters."""
    losses = [name for name in one if name.startswith("loss ")]
    weights = [name for name in one if name.endswith((".weight", ".bias"))]
    return {
        what: max((one[n].double() - other[n].double()).abs().max().item() for n in names)
        for what, names in (("loss", losses), ("parameters", weights))
    }


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


# -- correct -------------------------------------------------------------------------------------


class _Shown(nn.Module):
    """Passes tensors through named children, whose outputs can be recorded; has a parameter."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.shown = nn.ModuleDict({name: nn.Identity() for name in names})
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        """Pass each tensor through the child with its name."""
        for name, child in self.shown.items():
            child(tensors[name])
        return self.one * 2


def wrong_sums(place: Place, size: int) -> tuple[list[str], int]:
    """Compare raw sums of all kinds of tensors with float64 sums computed on the host.

    Args:
        place: the device of the tensors.
        size: approximate number of elements in each of the larger tensors.

    Returns:
        Descriptions of the wrong sums, and the number of sums compared.
    """
    tensors = _tensors(place, size)
    raw = _raw_of(place, tensors)
    wrong: list[str] = []
    names = {info.id: info.key.node.rpartition(".")[2] for info in raw.new_slots}
    layout, compared, found = raw.layout, 0, set()
    for slot, tensor in zip(layout.slots, layout.tensors, strict=True):
        name = names[int(slot)]
        if name not in tensors:
            continue
        found.add(name)
        start, samples = int(layout.starts[tensor]), int(layout.samples[tensor])
        rows = raw.raw[start : start + int(layout.rows[tensor])]
        values = tensors[name].detach().cpu().to(torch.float64).numpy()
        values = values.reshape(samples, -1)
        wrong += [f"{name}: {what}" for what in _compared(rows, values[: len(rows)])]
        compared += rows.size
        if len(rows) < samples:
            found_, true = raw.aggregates[int(tensor)][:2], _aggregates(values)
            wrong += [] if np.allclose(found_, true, rtol=_EXACT) else [f"{name}: aggregates"]
            compared += found_.size
    return wrong + [f"{name} is not recorded" for name in tensors.keys() - found], compared


def _aggregates(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return mean, std and abs-max over samples [s, n] of the means of x and |x|: [2, 3]."""
    each = np.stack((values.mean(1), np.abs(values).mean(1)))
    return np.stack((each.mean(1), each.std(1), np.abs(each).max(1)), 1)


def _raw_of(place: Place, tensors: dict[str, Tensor]) -> RawStep:
    """Return the raw record of a step in which modules returned these tensors."""
    model = _Shown([*tensors]).to(place.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = {**RECORD.source} if isinstance(RECORD.source, dict) else {}
    source["nodes"] = {"all": {"select": "shown.*", "capture": ["output"], "batch_dim": 0}}
    with reduced(Declared(source), keep=True) as recording:
        for _ in range(2):  # the first step discovers the model
            optimizer.zero_grad()
            model(tensors).sum().backward()
            optimizer.step()
    recording.check(2)
    raw = recording.raw[1]
    raw.new_slots = recording.raw[0].new_slots + raw.new_slots
    if raw.wait is not None:
        raw.wait()
    return raw


def _tensors(place: Place, size: int) -> dict[str, Tensor]:
    """Return tensors of every kind that has raw sums, by name."""
    torch.manual_seed(0)
    device = place.name
    kinds = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float64": torch.float64,
    }
    made: dict[str, Tensor] = {}
    for name, dtype in kinds.items():
        few = torch.randn(4, size // 4, device=device)
        many = torch.randn(max(size // 64, 4), 64, device=device)
        made |= {f"{name}_few_long": few.to(dtype), f"{name}_many_short": many.to(dtype)}
        made[f"{name}_small"] = torch.randn(4, 33, device=device).to(dtype)
        made[f"{name}_zeros"] = torch.zeros(4, 100, device=device, dtype=dtype)
        made[f"{name}_turned"] = few.to(dtype).t()
        special = few.to(dtype)
        special[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device)
        made[f"{name}_special"] = special
    made["very_many"] = torch.randn(MOST_ROWS + 5, 3, device=device) + 1
    made["offset"] = torch.randn(4, size // 4, device=device) + 1e4
    made["tiny"] = torch.randn(4, 1000, device=device) * 1e-30
    made["large"] = torch.randn(4, 1000, device=device) * 1e30
    made["scalar"] = torch.tensor(3.5, device=device)
    made["one"] = torch.randn(1, device=device)
    made["integers"] = torch.randint(-100, 100, (4, size // 4), device=device)
    made["boolean"] = torch.randn(4, size // 4, device=device) > 0
    return made


def _compared(rows: NDArray[np.float64], values: NDArray[np.float64]) -> list[str]:
    """Return descriptions of the raw sums [r, 8] that differ from those of the values [r, n]."""
    with np.errstate(all="ignore"):
        n = values.shape[1]
        finite = np.isfinite(values).all(1)
        mean = rows[:, Raw.PIVOT] + rows[:, Raw.SUM] / n
        centred = rows[:, Raw.SQUARES] - rows[:, Raw.SUM] ** 2 / n
        std, spread = np.sqrt(np.maximum(centred, 0) / n), values.std(1)
        scale = np.abs(values).mean(1)
        exact = {
            "non-zero": (rows[:, Raw.NONZERO], (values != 0).sum(1)),
            "non-finite": (rows[:, Raw.NONFINITE], (~np.isfinite(values)).sum(1)),
            "minimum": (rows[finite, Raw.MIN], values[finite].min(1)),
            "maximum": (rows[finite, Raw.MAX], values[finite].max(1)),
        }
        near = {
            "mean": (mean, values.mean(1), scale),
            "std": (std, spread, spread),
            "mean of |x|": (rows[:, Raw.ABS_SUM] / n, scale, scale),
        }
        rounding = (1e-10 if n > 1 else _EXACT) * scale
        wrong = {
            name: finite & ~(np.abs(mine - true) <= _EXACT * unit + rounding)
            for name, (mine, true, unit) in near.items()
        }
    described = [
        f"{name} is {_first(mine, true, mine != true)}"
        for name, (mine, true) in exact.items()
        if not np.array_equal(mine, true)
    ]
    return described + [
        f"{name} is {_first(*near[name][:2], off)}" for name, off in wrong.items() if off.any()
    ]


def _first(mine: NDArray[np.float64], true: NDArray[np.float64], wrong: NDArray[np.bool_]) -> str:
    at = int(np.argmax(wrong))
    return f"{mine[at]!r} instead of {true[at]!r}"


# -- no waits ------------------------------------------------------------------------------------


def waits(place: Place, training: Training, what: Declared) -> str | None:
    """Return the error raised by an operation that waits for the device; None if none does.

    Checks recorded and idle steps after the first three, which make one-time allocations.
    Records are reduced afterwards, so that only the training thread is checked.
    """
    training.reset()
    with reduced(what, later=True) as recording:
        for _ in range(3):
            training.step()
        try:
            with place.forbid_waiting():
                for _ in range(4):
                    training.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return recording.faults[0] if recording.faults else None


# -- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peaks:
    """Peak bytes allocated by a training run, without and with every step recorded."""

    plain: int
    traced: int

    @property
    def fine(self) -> bool:
        """Whether tracing adds at most 2% or 64 MB, whichever is more."""
        return self.within(_MOST_SHARE)

    def within(self, share: float) -> bool:
        """Whether tracing adds at most this share or 64 MB, whichever is more."""
        return self.traced - self.plain <= max(share * self.plain, _MOST_BYTES)

    def __str__(self) -> str:
        """Return the plain peak and what tracing adds to it."""
        grown = (self.traced - self.plain) / _MIB
        share = (self.traced / max(self.plain, 1)) - 1
        return f"{self.plain / _MIB:,.0f} MiB, {grown:+,.0f} MiB ({share:+.1%})"


def peaks(
    place: Place, training: Training, deadline: Deadline, what: Declared = RECORD
) -> Peaks | None:
    """Return the peaks of a training run; None where the place does not count memory.

    Raises:
        OutOfTimeError: the deadline is reached.
    """

    def work() -> None:
        training.reset()
        for _ in range(3):
            training.step()

    deadline.check()
    plain = place.peak(work)
    deadline.check()
    with reduced(what) as recording:
        traced = place.peak(work)
    recording.check(None)
    return None if plain is None or traced is None else Peaks(plain, traced)


def huge_peaks(place: Place, shape: tuple[int, int], deadline: Deadline) -> Peaks | None:
    """Return the peaks of a training run whose output has very many samples.

    Raises:
        OutOfTimeError: the deadline is reached.
        RuntimeError: not enough memory is free.
    """
    deadline.check()
    samples, elements = shape
    needed = 8 * samples * elements
    if place.free_bytes() < needed:
        raise RuntimeError(f"needs {needed / 2**30:.0f} GiB")
    x = torch.ones(samples, 1, dtype=place.half, device=place.name)
    model = nn.Linear(1, elements, dtype=place.half, device=place.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def work() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    source = {**RECORD.source} if isinstance(RECORD.source, dict) else {}
    source["nodes"] = {"all": {"select": "**", "capture": ["output"]}}
    work()
    plain = place.peak(work)
    deadline.check()
    with reduced(Declared(source)) as recording:
        traced = place.peak(work)
    recording.check(2)
    return None if plain is None or traced is None else Peaks(plain, traced)
