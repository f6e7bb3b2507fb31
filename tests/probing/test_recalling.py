"""Interventions with values of other runs: patches and steering vectors, as plain hooks do them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl
from comgra_decl.errors import RunNotFoundError
from comgra_decl.hooks.probing.passes import Call
from comgra_decl.query import Run
from comgra_decl.record.recalling import Recalling
from comgra_decl.spec.interventions import RecordedSpec
from tests.probing.attention import CLASSES, TOKENS, Classifier, hooked, outputs

COUNT = 4


def trained(root: Path, name: str, interventions: dict[str, Any], *, seed: int) -> Run:
    """Trace two steps of a classifier, with the same probe in each run."""
    torch.manual_seed(seed)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    spec = {
        "run": {"group": "g", "name": name},
        "nodes": {"all": {"select": "**", "capture": ["output", "input"]}},
        "probes": {"eyes": {"samples": {"count": COUNT}, "values": True, "schedule": {"every": 1}}},
        "interventions": {k: {"of": "eyes", **v} for k, v in interventions.items()},
    }
    torch.manual_seed(5)
    with comgra_decl.trace(spec, root=root) as session:
        for _ in range(2):
            tokens = torch.randint(TOKENS, (6, 5))
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), torch.arange(6) % CLASSES).backward()
            optimizer.step()
    assert session.path is not None
    return comgra_decl.open_run(session.path)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("runs"), "earlier", {}, seed=0)


@pytest.fixture(scope="module")
def later(earlier: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    source = {"run": str(earlier.path)}
    first = {**source, "step": 0}
    here = {"select": "blocks.0"}
    declared: dict[str, Any] = {
        "own": {**here, "do": {"patch": first}},
        "newest": {**here, "do": {"patch": source}},
        "one": {**here, "do": {"patch": {**first, "sample": 2}}},
        "listed": {**here, "do": {"patch": {**first, "sample": [3, 3, 0, 1]}}},
        "given": {"select": "head", "role": "input", "do": {"patch": first}},
        "elsewhere": {**here, "do": {"patch": {**first, "node": "blocks.1"}}},
        "second_call": {"select": "twice", "iteration": 1, "do": {"patch": first}},
        "mean": {**here, "do": {"add": first, "scale": 2.0}},
        "steered": {**here, "do": {"add": {**first, "difference": [0, 1]}, "scale": 0.5}},
        "off": {"select": "twice", "iteration": 0,
                "do": {"project_off": {**first, "difference": [0, 1]}}},
        "swept": {"select": "blocks.*", "do": {"patch": first}, "sweep": ["node", "position"]},
        "guess": {"select": "blocks.*", "do": {"patch": first}, "sweep": ["node", "position"],
                  "estimate": "gradient"},
    }  # fmt: skip
    return trained(tmp_path_factory.mktemp("runs"), "later", declared, seed=1)


def value(run: Run, node: str, step: int = 0, *, iteration: int = 0, role: str = "output") -> Any:
    return run.slot(node, role=role, iteration=iteration).value(step, type="probe:eyes")


def changed(later: Run, name: str, node: str, step: int = 0, *, iteration: int = 0) -> Any:
    return later.slot(node, iteration=iteration).value(step, type=f"intervention:{name}")


@pytest.mark.slow
def test_a_patch_of_another_run_is_what_that_run_recorded(earlier: Run, later: Run) -> None:
    whole = value(earlier, "blocks.0")
    rows = {"own": [0, 1, 2, 3], "one": [2] * 4, "listed": [3, 3, 0, 1]}
    for step in (0, 1):  # also as the model trains on
        for name, chosen in rows.items():
            np.testing.assert_array_equal(changed(later, name, "blocks.0", step), whole[chosen])
        newest = value(earlier, "blocks.0", 1)
        np.testing.assert_array_equal(changed(later, "newest", "blocks.0", step), newest)
        np.testing.assert_array_equal(
            changed(later, "elsewhere", "blocks.0", step), value(earlier, "blocks.1")
        )
        np.testing.assert_array_equal(
            changed(later, "second_call", "twice", step, iteration=1),
            value(earlier, "twice", iteration=1),
        )
    assert not np.array_equal(value(earlier, "blocks.0"), value(later, "blocks.0"))


@pytest.mark.slow
def test_what_follows_is_that_of_plain_hooks(earlier: Run, later: Run) -> None:
    torch.manual_seed(1)
    model = Classifier().eval()  # with the weights of step 0
    tokens = torch.from_numpy(later.slot("embed", role="input").value(0, type="probe:eyes"))
    source = torch.from_numpy(value(earlier, "blocks.0"))
    mean = source.mean(0)
    labels = later.samples(0, type="probe:eyes")["label"].tolist()
    zeros, ones = ([i for i, label in enumerate(labels) if label == c] for c in "01")
    difference = source[zeros].mean(0) - source[ones].mean(0)

    def run(role: str, path: str, change: Any) -> Tensor:
        with hooked(model, [(path, role, change)]):
            return outputs(model, tokens)["head"][0]

    given = torch.from_numpy(value(earlier, "head", role="input"))
    expected = {
        "own": run("output", "blocks.0", lambda _: source),
        "given": run("input", "head", lambda _: given),
        "mean": run("output", "blocks.0", lambda x: x + 2.0 * mean),
        "steered": run("output", "blocks.0", lambda x: x + 0.5 * difference),
    }
    for name, output in expected.items():
        np.testing.assert_array_equal(changed(later, name, "head"), output.numpy())


@pytest.mark.slow
def test_a_direction_of_another_run_is_projected_off(earlier: Run, later: Run) -> None:
    labels = earlier.samples(0, type="probe:eyes")["label"].tolist()
    source = value(earlier, "twice").astype(np.float64)
    zeros, ones = ([i for i, label in enumerate(labels) if label == c] for c in "01")
    direction = (source[zeros].mean(0) - source[ones].mean(0)).mean(0)
    found = changed(later, "off", "twice").astype(np.float64)
    before = value(later, "twice").astype(np.float64)
    along = (before @ direction)[..., None] * direction / (direction @ direction)
    np.testing.assert_allclose(found, before - along, atol=1e-5)


def test_a_sweep_patches_one_place_at_a_time(earlier: Run, later: Run) -> None:
    torch.manual_seed(1)
    model = Classifier().eval()
    tokens = torch.from_numpy(later.slot("embed", role="input").value(0, type="probe:eyes"))
    classes = torch.tensor([int(c) for c in later.samples(0, type="probe:eyes")["label"]])
    source = torch.from_numpy(value(earlier, "blocks.1"))
    base = F.cross_entropy(outputs(model, tokens)["head"][0], classes, reduction="none")
    effects = later.effects("swept", 0)

    def at_2(x: Tensor) -> Tensor:
        return torch.cat([x[:, :2], source[:, 2:3], x[:, 3:]], 1)

    with hooked(model, [("blocks.1", "output", at_2)]):
        output = outputs(model, tokens)["head"][0]
    expected = F.cross_entropy(output, classes, reduction="none") - base
    (found,) = effects.loc[[(0, "blocks.1", 2)], [*range(COUNT)]].to_numpy()
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    guessed = later.effects("guess", 0)["mean"]
    assert np.corrcoef(guessed, effects["mean"])[0, 1] > 0.5


@pytest.mark.parametrize(
    ("do", "why"),
    [
        ({"patch": {"run": "{missing}"}}, "missing"),
        ({"patch": {"run": "{earlier}", "step": 7}}, "step 7"),
        ({"patch": {"run": "{earlier}", "type": "evil"}}, "has no records of type 'evil'; it has"),
        ({"patch": {"run": "{earlier}", "node": "blocks.7"}}, "blocks"),
        ({"patch": {"run": "{earlier}", "node": "head"}}, r"\[3\] for each sample.*\[5, 8\]"),
        ({"patch": {"run": "{earlier}", "sample": 9}}, "has no sample 9; it has 4"),
        ({"patch": {"run": "{earlier}", "sample": [0]}}, "lists 1 samples, but the probe has 4"),
        ({"add": {"run": "{earlier}", "node": "head"}},
         r"values of shape \[3\] cannot be broadcast to a tensor of shape \[4, 5, 8\], whose last"),
        ({"add": {"run": "{earlier}", "difference": ["0", "x"]}}, "has the label 'x'"),
        ({"add": [float("nan")] * 8}, "the vector contains NaN or infinite values.*8 of 8"),
        ({"project_off": [float("inf")] * 8}, "the vector contains NaN or infinite values"),
        ({"add": [1.0, 2.0, 3.0]}, r"values of shape \[3\] cannot be broadcast to a tensor of"),
    ],
)  # fmt: skip
def test_what_a_run_does_not_have_ends_the_program_before_training(
    do: dict[str, Any], why: str, earlier: Run, tmp_path: Path
) -> None:
    places = {"{earlier}": str(earlier.path), "{missing}": str(tmp_path / "missing")}
    change = {
        key: {**v, "run": places[v["run"]]} if isinstance(v, dict) else v for key, v in do.items()
    }
    with pytest.raises(SystemExit, match=rf"(?s)interventions\.wrong: blocks\.0, output: .*{why}"):
        trained(tmp_path, "wrong", {"wrong": {"select": "blocks.0", "do": change}}, seed=1)


def test_a_group_means_its_newest_run_that_is_not_being_recorded(
    earlier: Run, tmp_path: Path
) -> None:
    group = str(earlier.path.parent)
    call = Call("blocks.0", "output", 0)
    source = RecordedSpec(run=group)
    own = trained(Path(str(earlier.path)).parents[1], "own", {}, seed=1)
    newest = Recalling()("probe:eyes", source, call)
    assert np.array_equal(newest.values.numpy(), value(own, "blocks.0", 1))
    found = Recalling(own.path)("probe:eyes", source, call)
    assert np.array_equal(found.values.numpy(), value(earlier, "blocks.0", 1))
    alone = trained(tmp_path, "alone", {}, seed=1)
    with pytest.raises(RunNotFoundError, match="no other run than the one that is being recorded"):
        Recalling(alone.path)("probe:eyes", RecordedSpec(run=str(alone.path.parent)), call)


def test_members_of_a_container_are_named(tmp_path: Path) -> None:
    wrong = {"select": "blocks", "do": "zero"}
    advice = (
        r"\(blocks\) is called; blocks is a ModuleList, so select its members, as in 'blocks\.\*'"
    )
    with pytest.raises(SystemExit, match=advice):
        trained(tmp_path, "wrong", {"wrong": wrong}, seed=1)


def test_parameters_receive_no_samples_of_a_run(tmp_path: Path) -> None:
    wrong = {"select": "head", "role": "weight", "do": {"patch": {"run": "runs/a"}}}
    with pytest.raises(Exception, match="patch needs samples, which the role 'weight' does not"):
        trained(tmp_path, "wrong", {"wrong": wrong}, seed=1)


def test_an_edit_of_weights_refuses_values_of_a_run() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    change = {"select": "0", "do": {"add": {"run": "runs/a"}}}
    with pytest.raises(Exception, match=r"save them to a \.npy file"):
        comgra_decl.edit(model, torch.ones(2, 3), [change])
