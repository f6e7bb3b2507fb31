"""Opt-in statistics of a traced training run, from the spec to the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import SpecError
from comgra_decl.query import Run

CAPTURE = ["output", "output_grad", "parameter", "parameter_grad", "update"]


def spread(x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    """Returns the difference between the largest and smallest value; overwrites its argument."""
    answer = (x.flatten(1).amax(1) - x.flatten(1).amin(1)) * times
    x.zero_()
    torch.rand(3)
    return answer


def least_unit(x: torch.Tensor) -> torch.Tensor:
    """Returns the smallest of the units' means over the batch."""
    return x.mean(0).amin()


def picky(x: torch.Tensor) -> torch.Tensor:
    """Fails for anything that is not a matrix."""
    if x.dim() != 3:
        raise ValueError("not a matrix")
    return x.sum((1, 2))


def large(step: Any, above: float) -> bool:
    """Keeps a step in which two opt-in statistics have the expected values."""
    value = step.lookup("first", "singular_value", role="weight")
    rest = step.lookup("first", "singular_value", role="bias")
    return bool(value > above and np.isnan(rest))


class Net(nn.Module):
    """Maps tokens [4, 3, 6] to one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


Kept = list[dict[str, NDArray[Any]]]


def train(seen: Kept | None = None) -> list[torch.Tensor]:
    """Trains for four steps; returns parameters and losses, and adds tensors to `seen`."""
    torch.manual_seed(7)
    model, result = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first: list[torch.Tensor] = []
    for _ in range(4):
        handle = model.first.register_forward_hook(lambda _m, _a, y: first.append(y))
        before = model.first.weight.detach().clone()
        loss = model(torch.randn(4, 3, 6)).square().mean()
        handle.remove()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(loss.detach())
        if seen is not None:
            update = model.first.weight.detach().double() - before.double()
            seen.append({"output": first[-1].detach().double().numpy()})
            seen[-1] |= {"weight": before.double().numpy(), "update": update.numpy()}
    return [*result, *model.parameters(), torch.get_rng_state()]


def traced(stats: Sequence[Any], root: Path, seen: Kept | None = None) -> Run:
    spec = {
        "nodes": {"all": {"select": "**", "capture": CAPTURE}},
        "stats": list(stats),
        "schedule": {"first": 100},
        "samples": {"count": 3},
    }
    with comgra.trace(spec, root=root) as session:
        train(seen)
    assert session.path is not None
    return comgra.open_run(session.path)


OWN = "tests.stats.test_opt_in"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Kept]:
    seen: Kept = []
    stats = [
        *("mean", "l2", "rms", "snr", "negative_fraction", "kurtosis", "q05", "q50"),
        *({"name": n, "on": ["parameter", "output"]} for n in ("singular_value", "stable_rank")),
        "effective_rank",
        {"name": "low", "_target_": f"{OWN}.least_unit", "per": "batch", "on": "output"},
        {"name": "q999", "quantile": 0.999, "on": "output", "nodes": ["first"]},
        {
            "name": "wide",
            "_target_": f"{OWN}.spread",
            "times": 2.0,
            "on": ["output", "output_grad"],
        },
    ]
    return traced(stats, tmp_path_factory.mktemp("runs"), seen), seen


def singular(matrices: NDArray[Any]) -> NDArray[Any]:
    return np.linalg.svd(matrices, compute_uv=False)


def kurtosis(rows: NDArray[Any]) -> NDArray[Any]:
    centred = rows - rows.mean(1, keepdims=True)
    return np.asarray((centred**4).mean(1) / (centred**2).mean(1) ** 2)


def entropy_rank(matrices: NDArray[Any]) -> NDArray[Any]:
    p = singular(matrices)
    p = p / p.sum(1, keepdims=True)
    return np.asarray(np.exp(-(p * np.log(p)).sum(1)))


TRUTH: dict[str, Any] = {
    "rms": lambda x, _: np.sqrt((x**2).mean(1)),
    "snr": lambda x, _: np.abs(x.mean(1)) / x.std(1),
    "negative_fraction": lambda x, _: (x < 0).mean(1),
    "kurtosis": lambda x, _: kurtosis(x),
    "q05": lambda x, _: np.quantile(x, 0.05, axis=1),
    "q50": lambda x, _: np.quantile(x, 0.5, axis=1),
    "singular_value": lambda _, m: singular(m)[:, 0],
    "stable_rank": lambda _, m: (singular(m) ** 2).sum(1) / singular(m)[:, 0] ** 2,
}


@pytest.mark.parametrize("statistic", TRUTH)
@pytest.mark.parametrize("role", ["output", "weight"])
def test_the_run_shows_what_numpy_says(
    recorded: tuple[Run, Kept], statistic: str, role: str
) -> None:
    run, seen = recorded
    matrices = [step[role] if role == "output" else step[role][None] for step in seen]
    truth = [TRUTH[statistic](m.reshape(len(m), -1), m) for m in matrices]
    mean = run.slot("first", role=role).series(statistic)
    np.testing.assert_allclose(mean, [t.mean() for t in truth], rtol=1e-4)
    spread = run.slot("first", role=role).series(statistic, over_batch="std")
    np.testing.assert_allclose(spread, [t.std() for t in truth], rtol=1e-3, atol=1e-6)
    for sample in range(min(3, len(matrices[0]))):
        of_one = run.slot("first", role=role).samples(statistic)[sample]
        np.testing.assert_allclose(of_one, [t[sample] for t in truth], rtol=1e-4)


def test_only_where_it_was_asked_for_and_missing_elsewhere(recorded: tuple[Run, Kept]) -> None:
    run, seen = recorded
    most = [np.quantile(step["output"].reshape(4, -1), 0.999, axis=1).mean() for step in seen]
    np.testing.assert_allclose(run.series("first", "q999"), most, rtol=1e-5)
    assert run.series("last", "q999").isna().all()
    assert run.slot("first", of="grad").series("q999").isna().all()
    rank = [entropy_rank(step["weight"][None])[0] for step in seen]
    np.testing.assert_allclose(
        run.slot("first", role="weight").series("effective_rank"), rank, 1e-5
    )
    assert run.series("first", "effective_rank").isna().all()
    assert run.slot("first", role="bias").series("singular_value").isna().all()


def test_the_update_ratio_is_made_of_both_norms(recorded: tuple[Run, Kept]) -> None:
    run, seen = recorded
    ratios = [np.linalg.norm(s["update"]) / np.linalg.norm(s["weight"]) for s in seen]
    for pass_ in ("forward", "update"):
        found = run.slot("first", role="weight", of=pass_).series("update_ratio")
        np.testing.assert_allclose(found, ratios, rtol=1e-4)
        heat = run.heat("update_ratio", of=pass_)
        slot = ("first", "weight", 0, pass_)
        np.testing.assert_allclose(heat[slot], ratios, rtol=1e-4)
        assert run.row(2)["update_ratio"][slot] == pytest.approx(ratios[2], rel=1e-4)
    of_one = [run.slot("first", role="weight").samples("update_ratio")[n] for n in (0, 1)]
    np.testing.assert_allclose(of_one[0], ratios, rtol=1e-4)
    assert of_one[1].isna().all()
    table = run.slot("first", role="weight").row(2)
    assert table["update_ratio"][0] == pytest.approx(ratios[2], rel=1e-4)
    assert run.series("first", "update_ratio").isna().all()
    over = run.slot("first", role="weight").series("update_ratio", over_batch="std")
    np.testing.assert_array_equal(over, [0.0] * 4)


@pytest.mark.parametrize(
    ("stats", "capture"), [(["mean"], CAPTURE), (["l2"], ["output", "parameter"])]
)
def test_no_update_ratio_without_what_it_takes(
    stats: list[str], capture: list[str], tmp_path: Path
) -> None:
    spec = {"nodes": {"all": {"select": "**", "capture": capture}}, "stats": stats}
    with comgra.trace(spec, root=tmp_path) as session:
        train()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert "update_ratio" not in run.statistics
    with pytest.raises(KeyError, match="it requires the 'l2' statistic and the captures"):
        run.slot("first", role="weight").series("update_ratio")


def test_a_function_of_one_s_own(recorded: tuple[Run, Kept]) -> None:
    run, seen = recorded
    rows = [step["output"].reshape(4, -1) for step in seen]
    wide = [2 * (r.max(1) - r.min(1)).mean() for r in rows]
    np.testing.assert_allclose(run.series("first", "wide"), wide, rtol=1e-5)
    assert run.slot("first", of="grad").series("wide").gt(0).all()
    assert run.slot("first", role="weight").series("wide").isna().all()


def test_a_function_of_the_whole_batch(recorded: tuple[Run, Kept]) -> None:
    run, seen = recorded
    low = [step["output"].mean(0).min() for step in seen]
    np.testing.assert_allclose(run.series("first", "low"), low, rtol=1e-5)
    np.testing.assert_allclose(run.series("first", "low", over_batch="std"), [0.0] * 4, atol=1e-9)
    np.testing.assert_allclose(run.slot("first").samples("low")[1], low, rtol=1e-5)


def test_all_are_listed_and_in_the_tables(recorded: tuple[Run, Kept]) -> None:
    run, _ = recorded
    assert [*run.row(3).columns] == run.statistics
    assert {"rms", "q999", "wide", "effective_rank"} <= {*run.statistics}
    assert [*run.slot("first").row(3).columns] == run.statistics
    assert run.heat("kurtosis").notna().any(axis=None)
    assert run.report["refused"] == {}


def test_the_training_does_not_notice(recorded: tuple[Run, Kept], tmp_path: Path) -> None:
    stats = [*recorded[0].spec.model_dump(mode="json")["stats"]]
    bare = train()
    with comgra.trace(
        {"nodes": {"all": {"select": "**", "capture": CAPTURE}}, "stats": stats}, root=tmp_path
    ):
        watched = train()
    for a, b in zip(bare, watched, strict=True):
        assert torch.equal(a, b)


def test_a_step_can_be_kept_for_an_opt_in_statistic(tmp_path: Path) -> None:
    spec = {
        "nodes": {"all": {"select": "**", "capture": CAPTURE}},
        "stats": ["mean", "l2", "singular_value"],
        "schedule": {"first": 1, "every": 1000},
        "keep": {"ring": 0, "when": [{"_target_": f"{OWN}.large", "above": 0.0}]},
    }
    with comgra.trace(spec, root=tmp_path) as session:
        train()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert [*run.steps] == [0, 1, 2, 3]
    assert run.slot("first", role="weight").series("singular_value").gt(0).all()


def test_a_function_that_fails_is_told_once_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = [
        "mean",
        {"name": "picky", "_target_": f"{OWN}.picky"},
    ]
    seen: Kept = []
    run = traced(stats, tmp_path, seen)
    told = [r.getMessage() for r in caplog.records if "statistic" in r.getMessage()]
    (line,) = told
    assert "'picky' of" in line
    assert "ValueError: not a matrix" in line
    sums = [step["weight"].sum() for step in seen]
    np.testing.assert_allclose(run.slot("first", role="weight").series("picky"), sums, rtol=1e-4)
    assert run.slot("first", role="bias").series("picky").isna().all()
    assert run.series("first", "mean").notna().all()
    assert len(run.report["refused"]) == 1


def test_a_function_that_is_not_there_ends_the_program_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"stats\[1\]._target_: .*nowhere' does not exist"):
        traced(["mean", {"name": "gone", "_target_": f"{OWN}.nowhere"}], tmp_path)


def test_what_applies_to_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = [{"name": "singular_value", "on": "buffer"}, {"name": "kurtosis", "nodes": "middle"}]
    run = traced(stats, tmp_path)
    assert [*run.report["refused"]] == [
        "the statistic 'singular_value'",
        "the statistic 'kurtosis'",
    ]
    assert "it needs buffer in nodes **" in caplog.text
    assert "it needs anything in nodes middle" in caplog.text


def test_nobody_pays_who_does_not_ask() -> None:
    from comgra_decl.hooks import HookManager
    from comgra_decl.spec import load_spec

    records: list[Any] = []
    spec = load_spec({"nodes": {"all": {"select": "**"}}, "stats": ["mean", "rms", "snr"]})
    manager = HookManager(spec, records.append, on_fault=_fail)
    manager.attach()
    train()
    manager.detach()
    assert manager._train.measured is None
    assert all(record.extra is None for record in records)


def _fail(error: BaseException) -> None:
    raise error
