"""Cells cut off in time, lists of one module, wrongly paired maps, and rates applied twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from comgra_decl.records import OPTIMIZERS
from comgra_decl.rules import Finding
from comgra_decl.rules.data.pairs import MisalignedPairs
from comgra_decl.rules.parameters.squared_rate import SquaredRate
from comgra_decl.rules.structure.recurrence import CutRecurrence
from comgra_decl.rules.structure.shared import SharedModule
from tests.rules.programs import BATCH, Tensor, findings, train
from tests.rules.tape import Tape

State = Tensor | tuple[Tensor, Tensor]


# -- cells -----------------------------------------------------------------------------------------


class Loop(nn.Module):
    """A cell called at each of 6 time steps; `carry` turns its output into the next state."""

    def __init__(self, kind: type[nn.Module], carry: Callable[[int, State], State | None]) -> None:
        super().__init__()
        self.cell, self.head, self.carry = kind(3, 4), nn.Linear(4, 2), carry

    def forward(self, x: Tensor) -> Tensor:
        state: State | None = None
        outs = []
        for at in range(x.shape[1]):
            new = self.cell(x[:, at], state)
            outs.append(new[0] if isinstance(new, tuple) else new)
            state = self.carry(at, new)
        out: Tensor = self.head(torch.stack(outs, 1).mean(1))
        return out


def looped(
    kind: type[nn.Module], carry: Callable[[int, State], State | None], length: int = 6
) -> Callable[[], None]:
    return lambda: train(
        Loop(kind, carry), lambda net: net(torch.randn(BATCH, length, 3)).square().sum()
    )


def detached(_at: int, state: State) -> State:
    return (state[0].detach(), state[1].detach()) if isinstance(state, tuple) else state.detach()


def reset(_at: int, _state: State) -> None:
    return None


def kept(_at: int, state: State) -> State:
    return state


def truncated(at: int, state: State) -> State:
    return detached(at, state) if at % 3 == 2 else state


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("carry", [detached, reset])
def test_a_cell_without_gradients_through_time_is_found(
    kind: type[nn.Module], carry: Callable[[int, State], State | None]
) -> None:
    (found,) = findings(CutRecurrence(), looped(kind, carry))
    assert (found.severity, found.evidence) == ("error", {"calls": 6})
    assert ("detached" if carry is detached else "reset") in found.message


class OwnCell(nn.Module):
    """A hand-written cell, whose first state is missing."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, size), nn.Linear(inputs, size)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        new = self.outer(x)
        return torch.tanh(new if state is None else new + self.inner(state))


def test_a_cell_written_by_hand_counts_if_its_state_is_detached() -> None:
    assert len(findings(CutRecurrence(), looped(OwnCell, detached))) == 1
    assert not findings(CutRecurrence(), looped(OwnCell, kept))
    assert not findings(CutRecurrence(), looped(OwnCell, reset))  # perhaps no recurrence


class Rounds(nn.Module):
    """Message passing: a cell updates all nodes in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, nodes: Tensor) -> Tensor:
        adjacency = torch.ones(BATCH, BATCH) / BATCH
        for _ in range(5):
            nodes = self.cell(adjacency @ nodes, nodes)
        return nodes


@pytest.mark.parametrize(
    "program",
    [
        looped(nn.GRUCell, kept),
        looped(nn.LSTMCell, truncated),
        looped(nn.GRUCell, detached, length=3),
        lambda: train(Rounds(), lambda net: net(torch.randn(BATCH, 4)).square().sum()),
    ],
    ids=["kept", "truncated", "short", "rounds"],
)
def test_cells_with_gradients_through_time_are_not(program: Callable[[], None]) -> None:
    assert not findings(CutRecurrence(), program)


# -- lists -----------------------------------------------------------------------------------------


class Heads(nn.Module):
    """A body and a list of heads; each receives what `into` makes of the body's output."""

    def __init__(self, heads: Sequence[nn.Module], into: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.heads, self.into = nn.Linear(3, 4), nn.ModuleList(heads), into

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return torch.cat([head(self.into(at, z)) for at, head in enumerate(self.heads)], 1)


def headed(heads: Sequence[nn.Module], into: Callable[[int, Tensor], Tensor]) -> list[Finding]:
    tape = Tape()
    outs = []
    model = Heads(heads, into)
    names = {module: name for name, module in model.named_modules()}
    for call, head in enumerate(model.heads):
        iteration = sum(model.heads[i] is head for i in range(call))
        outs.append(tape.slot(names[head], (BATCH, 2), iteration=iteration))
    tape.documents["modules"] = [
        {"path": name, "node": name, "class": type(module).__name__, "parameters": {}}
        for module, name in names.items()
    ]
    torch.manual_seed(1)
    for _ in range(8):
        z = model.body(torch.randn(BATCH, 3))
        tape.record(
            {
                slot: head(into(at, z)).detach().numpy()
                for at, (slot, head) in enumerate(zip(outs, model.heads, strict=True))
            }
        )
    return tape.findings(SharedModule())


def same(_at: int, z: Tensor) -> Tensor:
    return z


def test_a_list_of_one_module_is_found() -> None:
    (found,) = headed([nn.Linear(4, 2)] * 3, same)
    assert found.place is not None
    assert (found.place.node, found.evidence["calls"]) == ("heads.0", 3)


def test_lists_of_several_modules_or_inputs_are_not() -> None:
    assert not headed([nn.Linear(4, 2) for _ in range(3)], same)
    assert not headed([nn.Linear(4, 2)] * 3, lambda at, z: z + at)  # layers shared on purpose
    assert not headed([nn.Linear(4, 2)], same)
    dropped = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))  # samples of one model
    assert not headed([dropped] * 3, same)


@pytest.mark.parametrize(("entries", "found"), [(1, False), (3, True)])
def test_micro_batches_are_no_entries_of_a_list(entries: int, found: bool) -> None:
    """Embeddings of positions return the same values in each micro-batch."""
    tape = Tape()
    calls = [tape.slot("parts.wpe", (4, 2), iteration=i) for i in range(2 * entries)]
    whole = [tape.slot("GPT", (BATCH, 2), iteration=i) for i in range(2)]
    tape.documents["modules"] = [
        {"path": path, "node": path or "GPT", "class": class_, "parameters": {}}
        for path, class_ in (("", "GPT"), ("parts", "ModuleDict"), ("parts.wpe", "Embedding"))
    ]
    rng = np.random.default_rng(0)
    for _ in range(8):
        table = rng.normal(size=(4, 2))
        tape.record({**dict.fromkeys(calls, table), **{s: rng.normal(size=(8, 2)) for s in whole}})
    assert bool(tape.findings(SharedModule())) is found


# -- maps ------------------------------------------------------------------------------------------

Maps = NDArray[np.float64]


def scenes(count: int, rng: np.random.Generator) -> Maps:
    """Off-centre discs, [count, 16, 16] of zeros and ones."""
    y, x = np.mgrid[:16, :16]
    centres = rng.uniform(2, 14, (count, 2))
    apart = np.where(np.abs(centres - 7.5) < 3, centres + 4, centres)
    return np.stack([((y - a) ** 2 + (x - b) ** 2 < 9).astype(float) for a, b in apart])


def paired(change: Callable[[Maps, Maps, np.random.Generator], tuple[Maps, Maps]]) -> list[Finding]:
    rng = np.random.default_rng(3)
    tape = Tape()
    image = tape.slot("input", (8, 3, 16, 16), role="input", kind="input")
    mask = tape.slot("target", (8, 16, 16), role="target", kind="target")
    for _ in range(12):
        maps = scenes(8, rng)
        noisy = maps[:, None] + 0.3 * rng.standard_normal((8, 3, 16, 16))
        x, y = change(noisy, maps, rng)
        tape.record({image: x, mask: y})
    return tape.findings(MisalignedPairs())


def half(rng: np.random.Generator) -> NDArray[np.bool_]:
    return np.asarray(rng.random(8) < 0.5)


def flip_one(x: Maps, y: Maps, rng: np.random.Generator) -> tuple[Maps, Maps]:
    chosen = half(rng)
    x[chosen] = x[chosen][..., ::-1]
    return x, y


def flip_down(x: Maps, y: Maps, rng: np.random.Generator) -> tuple[Maps, Maps]:
    chosen = half(rng)
    y[chosen] = y[chosen][:, ::-1]
    return x, y


def flip_both(x: Maps, y: Maps, rng: np.random.Generator) -> tuple[Maps, Maps]:
    chosen = half(rng)
    x[chosen], y[chosen] = x[chosen][..., ::-1], y[chosen][..., ::-1]
    return x, y


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (flip_one, "mirrored horizontally"),
        (flip_down, "mirrored vertically"),
        (lambda x, y, _: (x[[1, 2, 3, 4, 5, 6, 7, 0]], y), "another sample"),
    ],
    ids=["flipped", "upside down", "shuffled"],
)
def test_maps_that_fit_another_target_are_found(
    change: Callable[[Maps, Maps, np.random.Generator], tuple[Maps, Maps]], text: str
) -> None:
    (found,) = paired(change)
    assert text in found.message
    assert float(found.evidence["misfits"]) >= 15  # about half of 96, or all


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y, _: (x, y),
        flip_both,
        lambda x, y, rng: (rng.standard_normal(x.shape), y),  # not a map of the input
        lambda x, y, _: (x, np.ones_like(y)),
        lambda x, y, rng: (-2 * x + 1, y + 0.1 * rng.standard_normal(y.shape)),
    ],
    ids=["clean", "both flipped", "unrelated", "constant", "negative"],
)
def test_maps_that_fit_their_own_target_are_not(
    change: Callable[[Maps, Maps, np.random.Generator], tuple[Maps, Maps]],
) -> None:
    assert not paired(change)


# -- rates -----------------------------------------------------------------------------------------


def rated(rates: Sequence[float], initial: float) -> list[Finding]:
    tape = Tape()
    for step, rate in enumerate(rates):
        group = {"lr": rate, "initial_lr": initial, "parameters": 2}
        tape.record({}, step=step, facts={OPTIMIZERS: [{"class": "Adam", "groups": [group]}]})
    return tape.findings(SquaredRate())


def test_a_schedule_that_returns_a_learning_rate_is_found() -> None:
    warm = [1e-3 * min(1, (step + 1) / 10) for step in range(100)]
    (found,) = rated([1e-3 * factor for factor in warm], 1e-3)
    assert found.evidence == {"rate": pytest.approx(1e-6), "initial": 1e-3}
    decays = [3e-4 * 3e-4 * 0.99**step for step in range(80)]
    assert len(rated(decays, 3e-4)) == 1


@pytest.mark.parametrize(
    ("rates", "initial"),
    [
        ([1e-3] * 100, 1e-3),
        ([1e-3 * (step + 1) / 1000 for step in range(100)], 1e-3),  # a warm-up of 1000 steps
        ([1e-3 * 0.5**step for step in range(100)], 1e-3),
        ([1e-6] * 20, 1e-3),  # too short
        ([1.0] * 100, 1.0),
    ],
    ids=["constant", "warm-up", "decay", "short", "one"],
)
def test_other_schedules_are_not(rates: Sequence[float], initial: float) -> None:
    assert not rated(rates, initial)
