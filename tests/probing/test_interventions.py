"""Interventions give what plain torch hooks give, and say what they have changed."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comgra_decl.errors import SpecError
from comgra_decl.hooks.probing.copying import CleanCopy
from comgra_decl.hooks.probing.interventions import Interventions
from comgra_decl.hooks.probing.passes import Edit, tensors_of
from comgra_decl.hooks.probing.places import Modules, with_tensor
from comgra_decl.hooks.probing.samples import Samples
from comgra_decl.hooks.probing.seclusion import secluded
from comgra_decl.hooks.probing.subject import Subject
from comgra_decl.records import INTERVENTION, PROBE_MODE
from comgra_decl.spec import load_spec
from comgra_decl.spec.interventions import InterventionSpec
from tests.probing.attention import WIDTH, Classifier, hooked, outputs
from tests.probing.nets import train as train_net
from tests.support.recording import EVERYTHING, Recording, contents, recording

COUNT = 5


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(11, (9, 6)), torch.arange(9) % 3) for _ in range(steps)]


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def recorded(interventions: dict[str, Any], steps: int = 1, **probe: Any) -> Recording:
    eyes = {"samples": {"count": COUNT}, "schedule": {"every": 1}, **probe}
    declared = {name: {"of": "eyes", **each} for name, each in interventions.items()}
    torch.manual_seed(0)
    spec = {**EVERYTHING, "probes": {"eyes": eyes}, "interventions": declared}
    with recording(spec, samples={"count": COUNT}) as found:
        train(Classifier(), steps)
    assert found.faults == []
    return found


def doubled(x: Tensor, plus: float) -> Tensor:
    return 2 * x + plus


def part(change: Callable[[Tensor], Tensor], *where: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that changes only a part of a tensor."""

    def changed(x: Tensor) -> Tensor:
        new = x.clone()
        new[where] = change(x)[where]
        return new

    return changed


def noise(x: Tensor, clean: Tensor) -> Tensor:
    drawn = torch.randn(clean.shape, generator=torch.Generator().manual_seed(3))
    return x + 0.5 * clean.std(correction=0) * drawn


def without(x: Tensor, v: Tensor) -> Tensor:
    return x - (x * v).sum(-1, keepdim=True) / (v @ v) * v


MLP, ATTN = "blocks.1.mlp", "blocks.0.attn.out"
V = torch.arange(1.0, 9.0)
every = slice(None)

Cases = dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]]
CASES: Cases = {
    "zero": ({"select": MLP, "do": "zero"}, lambda x, _: torch.zeros_like(x)),
    "mean": ({"select": MLP, "do": "mean"}, lambda x, c: c.mean(0, keepdim=True).expand_as(x)),
    "noise": ({"select": MLP, "do": {"noise": 0.5, "seed": 3}}, noise),
    "scale": ({"select": MLP, "do": {"scale": -1.5}}, lambda x, _: x * -1.5),
    "clamp": ({"select": MLP, "do": {"clamp": [None, 0.1]}}, lambda x, _: x.clamp(max=0.1)),
    "add": ({"select": MLP, "do": {"add": V.tolist(), "scale": 2}}, lambda x, _: x + 2 * V),
    "difference": (
        {"select": MLP, "do": {"add": {"difference": [2, "0"]}}},
        lambda x, c: x + (c[[2]].mean(0) - c[[0, 3]].mean(0)),
    ),
    "other": ({"select": MLP, "do": {"patch": "other"}}, lambda _, c: c.roll(-1, 0)),
    "sample": ({"select": MLP, "do": {"patch": 2}}, lambda x, c: c[2:3].expand_as(x)),
    "samples": (
        {"select": MLP, "do": {"patch": [4, 3, 2, 1, 0]}},
        lambda _, c: c.flip(0),
    ),
    "project": (
        {"select": MLP, "do": {"project_off": V.tolist()}},
        lambda x, _: without(x, V),
    ),
    "project_difference": (
        {"select": MLP, "do": {"project_off": {"difference": [0, 1]}}},
        lambda x, c: without(x, (c[[0, 3]].mean(0) - c[[1, 4]].mean(0)).mean(0)),
    ),
    "function": (
        {"select": MLP, "do": {"_target_": f"{__name__}.doubled", "plus": 1.0}},
        lambda x, _: 2 * x + 1.0,
    ),
    "head": (
        {"select": ATTN, "role": "input", "parts": {"head": [1, -1]}, "do": "zero"},
        lambda x, _: part(torch.zeros_like, every, every, [2, 3, 6, 7])(x),
    ),
    "head_and_position": (
        {
            "select": ATTN,
            "role": "input",
            "parts": {"head": {"groups": 2, "only": [0]}, "position": [0, 3]},
            "do": {"scale": 3.0},
        },
        lambda x, _: part(lambda y: y * 3, every, torch.tensor([[0], [3]]), torch.arange(4)[None])(
            x
        ),
    ),
    "channel": (
        {"select": MLP, "parts": {"unit": {"dim": 2, "only": [5]}}, "do": {"patch": "other"}},
        lambda x, c: part(lambda _: c.roll(-1, 0), every, every, 5)(x),
    ),
    "tuple": ({"select": "lstm", "do": {"scale": 0.5}}, lambda x, _: x * 0.5),
}


@pytest.fixture(scope="module")
def found() -> Recording:
    return recorded({name: spec for name, (spec, _) in CASES.items()})


def initial() -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    model.eval()
    return model


def of(found: Recording, name: str) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Return the recorded values of each call of each module."""
    (step,) = found.of(name)
    values: dict[str, list[np.ndarray[Any, Any]]] = {}
    for key, info in sorted(found.slots.items()):
        role = "output[0]" if key.node == "lstm" else "output"
        if key.role == role and key.pass_ == "forward" and info.id in step.values:
            path = "" if key.node == "Classifier" else key.node
            values.setdefault(path, []).append(step.values[info.id])
    return values


def assert_same(
    values: dict[str, list[np.ndarray[Any, Any]]], wanted: dict[str, list[Tensor]]
) -> None:
    assert values.keys() == wanted.keys()
    for path, calls in wanted.items():
        assert [v.tobytes() for v in values[path]] == [w.numpy().tobytes() for w in calls], path


@pytest.mark.parametrize("name", CASES)
def test_all_tensors_are_to_the_last_bit_those_that_a_plain_hook_gives(
    found: Recording, name: str
) -> None:
    spec, change = CASES[name]
    model, tokens = initial(), batches(1)[0][0][:COUNT]
    path, role = spec["select"], spec.get("role", "output")
    clean = outputs(model, tokens)[path][0]
    with hooked(model, [(path, role, lambda x: change(x, clean))]):
        wanted = outputs(model, tokens)
    assert_same(of(found, f"intervention:{name}"), wanted)
    assert found.of(f"intervention:{name}")[0].info.mode == PROBE_MODE


def test_the_last_block_patched_from_another_sample_gives_the_output_of_that_sample() -> None:
    found = recorded({"last": {"select": "blocks.1", "do": {"patch": "other"}}})
    with torch.no_grad():
        logits = initial()(batches(1)[0][0][:COUNT])
    (patched,) = of(found, "intervention:last")[""]
    assert patched.tobytes() == logits.roll(-1, 0).numpy().tobytes()


def test_changes_are_made_in_the_order_in_which_they_are_listed(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", V.numpy())
    add = {"select": MLP, "do": {"add": str(tmp_path / "v.npy")}}
    scale = {"select": MLP, "do": {"scale": 3.0}}
    early = {"select": "embed", "do": "mean"}
    found = recorded(
        {"add_scale": {**scale, "first": [early, add]}, "scale_add": {**add, "first": [scale]}}
    )
    model, tokens = initial(), batches(1)[0][0][:COUNT]
    for name, change, before in (
        ("add_scale", lambda x: (x + V) * 3, True),
        ("scale_add", lambda x: x * 3 + V, False),
    ):
        mean = ("embed", "output", lambda x: x.mean(0, keepdim=True).expand_as(x))
        with hooked(model, [*([mean] if before else []), (MLP, "output", change)]):
            assert_same(of(found, f"intervention:{name}"), outputs(model, tokens))


def test_parameters_are_changed_and_restored_and_one_of_several_calls_can_be_chosen() -> None:
    found = recorded(
        {
            "rows": {
                "select": "head",
                "role": "weight",
                "parts": {"class_": {"dim": 0, "only": [1]}},
                "do": "zero",
            },
            "all": {"select": "lstm", "role": "parameter", "do": {"scale": 0.5}},
            "second": {"select": "twice", "iteration": 1, "do": "zero"},
            "last": {"select": "head", "do": {"scale": 1.0}},
        }
    )
    tokens = batches(1)[0][0][:COUNT]
    model = initial()
    model.head.weight.data[1] = 0
    assert_same(of(found, "intervention:rows"), outputs(model, tokens))
    model = initial()
    for parameter in model.lstm.parameters():
        parameter.data.mul_(0.5)
    assert_same(of(found, "intervention:all"), outputs(model, tokens))
    model = initial()
    with hooked(model, [("twice", "output", torch.zeros_like)], call=1):
        assert_same(of(found, "intervention:second"), outputs(model, tokens))
    assert_same(of(found, "intervention:last"), outputs(initial(), tokens))


# -- saying what has changed ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_patch_with_itself_is_to_the_last_bit_the_probe_and_says_that_it_did_nothing(
    mode: str,
) -> None:
    same = {"select": "blocks.*", "do": {"patch": "clean"}}
    found = recorded({"same": same}, steps=2, mode=mode)
    kinds = [step.info.type for step in found.steps]
    assert kinds == ["train", "probe:eyes", "intervention:same"] * 2
    for at in (1, 4):
        own = {k: v for k, v in contents(found, at + 1).items() if not k.pass_.startswith("effect")}
        assert own == contents(found, at)
    facts = found.steps[2].info.extra[INTERVENTION]
    elements = 2 * COUNT * 6 * WIDTH
    assert facts["changes"] == [{"tensors": 2, "elements": elements, "changed": 0, "largest": 0.0}]
    assert facts["same"]
    (warning,) = found.report["warnings"]
    assert warning == "intervention 'same' did nothing: every element kept its value"


def test_it_is_reported_how_much_was_changed_and_if_the_output_is_the_same() -> None:
    found = recorded(
        {
            "unused": {"select": "unused", "do": {"add": 2.0}},
            "one": {"select": MLP, "parts": {"position": [5], "feature": [0]}, "do": {"add": 0.5}},
            "half": {
                "first": [{"select": "head", "do": {"scale": 1.0}}],
                "select": "head",
                "do": {"add": 1.0},
            },
        },
        steps=2,
    )
    changes = {
        name: found.of(f"intervention:{name}")[0].info.extra[INTERVENTION]["changes"][-1]
        for name in ("unused", "one", "half")
    }
    assert [each["changed"] for each in changes.values()] == [COUNT * 12, COUNT, COUNT * 3]
    assert [each["elements"] for each in changes.values()] == [COUNT * 12, COUNT, COUNT * 3]
    assert changes["one"]["largest"] == pytest.approx(0.5, rel=1e-6)
    choices = found.report["choices"]
    assert choices["interventions.one"] == (
        "intervention 'one' changed 5 of 5 elements in 1 tensor by up to 0.5"
    )
    nothing, half = found.report["warnings"]
    assert nothing.startswith("intervention 'unused' did nothing: it changed 60 of 60 elements")
    assert nothing.endswith("but the model's output is the same")
    assert half == "change 1 of intervention 'half' did nothing: every element kept its value"


def test_effects_are_stored_if_the_output_can_be_measured() -> None:
    found = recorded(
        {
            "loss": {"select": MLP, "do": "zero"},
            "label": {"select": MLP, "do": "zero", "measure": "label"},
            "class": {"select": MLP, "do": "zero", "measure": 9},
        },
        steps=2,
    )
    model, (tokens, classes) = initial(), batches(1)[0]
    plain = model(tokens[:COUNT])
    with hooked(model, [(MLP, "output", torch.zeros_like)]), torch.no_grad():
        other = model(tokens[:COUNT])
    for name, measure in (
        ("loss", lambda out: F.cross_entropy(out, classes[:COUNT], reduction="none")),
        ("label", lambda out: out[range(COUNT), classes[:COUNT]]),
    ):
        (key,) = [k for k in found.slots if k.pass_ == f"effect:{name}"]
        step = found.of(f"intervention:{name}")[0]
        wanted = (measure(other) - measure(plain)).detach().numpy()
        assert step.values[found.slots[key].id].tobytes() == wanted.tobytes()
        assert (key.node, key.role) == ("Classifier", "effect")
    facts = found.of("intervention:class")[0].info.extra[INTERVENTION]
    assert facts["unmeasured"] == "class 9 does not exist; the model has 3 classes"
    (warning,) = found.report["warnings"]
    assert warning == f"intervention 'class' has no effects: {facts['unmeasured']}"


def test_an_intervention_that_fails_later_is_reported_and_the_others_go_on() -> None:
    wrong = {"select": MLP, "do": {"add": {"difference": [0, 7]}}}
    found = recorded({"wrong": wrong, "right": {"select": MLP, "do": "zero"}}, steps=2)
    types = [step.info.type for step in found.steps]
    assert types == ["train", "probe:eyes", "intervention:right"] * 2
    (warning,) = found.report["warnings"]
    assert "intervention 'wrong' is not made: blocks.1.mlp, output: no sample has the" in warning


# -- mistakes end the program ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"select": "block.*"}, ".a.select: 'block.*' matches no module; modules at the top: "),
        ({"select": {"class": "Linaer"}}, "did you mean 'Linear'"),
        ({"select": "head", "role": "weigth"}, "did you mean 'weight'"),
        ({"select": "lstm", "role": "output[7]"}, "it has output[0], output[1][0], output[1][1]"),
        ({"select": "blocks"}, ".a.select: none of the selected modules (blocks) is called"),
        ({"select": "head", "iteration": 1}, "no selected module is called 2 times"),
        ({"select": MLP, "parts": {"position": [6]}}, "position: 6 does not exist; there are 6"),
        ({"select": MLP, "parts": {"head": [0]}}, "the number of heads is unknown"),
        ({"select": "blocks.0.attn", "parts": {"head": {"groups": 3}}}, "into 3 equal groups"),
        (
            {"select": MLP, "do": {"add": [1.0, 2.0]}},
            "shape [2] cannot be broadcast to a tensor of shape [5, 6, 8], whose last dimension",
        ),
        ({"select": MLP, "do": {"patch": "none.npy"}}, "none.npy cannot be read"),
        ({"select": MLP, "do": {"patch": [1, 0]}}, "lists 2 samples, but the probe has 5"),
        ({"first": [{"select": "no", "do": "mean"}], "select": MLP}, ".a.first[0].select: 'no'"),
        ({"select": "**", "exclude": "**"}, ".a.exclude: excludes every selected module"),
    ],
)
def test_what_does_not_exist_ends_the_program_before_its_first_forward_pass(
    spec: dict[str, Any], why: str
) -> None:
    declared = {"a": {"of": "eyes", "do": "zero", **spec}}
    probes = {"eyes": {"samples": {"count": COUNT}}}
    model = initial()
    model.train()
    ran: list[bool] = []
    model.embed.register_forward_hook(lambda *_: ran.append(True))
    with (
        recording(EVERYTHING, probes=probes, interventions=declared) as found,
        pytest.raises(SystemExit) as ended,
    ):
        train(model)
    assert str(ended.value).startswith("comgra: the spec has 1 problem:\n  comgra.interventions.a")
    assert why in str(ended.value)
    assert (ran, found.steps, found.faults) == ([], [], [])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"of": "eys"}, "there is no probe 'eys' (eyes); did you mean 'eyes'"),
        ({"do": "zeros"}, "unknown change; choose zero, mean"),
        ({"do": {"patch": "clear"}}, "did you mean 'clean'"),
        ({"do": {"clamp": [1, 0]}}, "the smallest value, 1.0, must not exceed"),
        ({"do": {"project_off": 1.0}}, "a number is not a direction"),
        ({"parts": {"unit": [1]}}, "'unit' needs a `dim`"),
        ({"parts": {"u": {"dim": 0}}}, "dimension 0 is that of the samples"),
        ({"sweep": "nodes"}, "'nodes' is not one of node, head"),
        ({"role": "weight", "do": "mean"}, "mean needs samples"),
        ({"estimate": "gradient"}, "needs `sweep`"),
        ({"select": {"function": "torch.softmax"}}, "calls of functions cannot be changed"),
        ({"frozen": "x"}, "frozen: needs `into`"),
        ({"sweep": "into"}, "'into' is not one of node, head"),
        ({"into": "y", "sweep": "into.haed"}, "did you mean 'into.head'"),
        (
            {"into": {"select": "y", "role": "weight"}},
            "must be an input or output of a receiver, such as input, got 'weight'",
        ),
        ({"into": "y", "role": "weight"}, "into: a path begins at an input or output"),
        ({"into": {"select": "y", "do": "zero"}}, "a.into: unknown key 'do'"),
    ],
)
def test_mistakes_in_the_spec_are_found_when_it_is_loaded(spec: dict[str, Any], why: str) -> None:
    declared = {"a": {"of": "eyes", "select": "x", "do": "zero", **spec}}
    with pytest.raises(SpecError) as error:
        load_spec({"probes": {"eyes": {}}, "interventions": declared})
    assert why in str(error.value)


class Renamed(nn.Module):
    """Modules with several names, and weights that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.alias = self.shared
        self.layers = nn.ModuleList([self.shared, nn.Linear(4, 4)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older form, which programs still use
            self.older = nn.utils.weight_norm(nn.Linear(4, 4))
        self.newer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.alias, *self.layers, self.older, self.newer):
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"select": "alias"}, "; 'alias' is another name of 'shared', so select 'shared'"),
        ({"select": "layers.0"}, "; 'layers.0' is another name of 'shared', so select 'shared'"),
        (
            {"select": "newer", "role": "weight"},
            (
                "(bias); weight is computed and is the output of 'newer.parametrizations.weight', "
                "so select that, with the role output or one of original0, original1"
            ),
        ),
        (
            {"select": "older", "role": "weight"},
            (
                "(bias, weight_g, weight_v); weight is computed from these parameters, so change "
                "one of them"
            ),
        ),
    ],
)
def test_other_names_of_modules_and_computed_parameters_are_explained(
    change: dict[str, Any], why: str
) -> None:
    declared = InterventionSpec.model_validate({"of": "eyes", "do": "zero", **change})
    (problem,) = Modules(CleanCopy(Renamed(), {})).problems(declared, "a")
    assert problem.endswith(why)


def test_a_computed_weight_is_changed_where_it_is_computed() -> None:
    torch.manual_seed(0)
    model, x = Renamed(), torch.randn(COUNT, 4)
    with torch.no_grad():
        wanted = torch.relu(model.newer.bias).expand(COUNT, 4).tolist()
    changes = {
        "weight": {"select": "newer.parametrizations.weight", "do": "zero"},
        "length": {"select": "newer.parametrizations.weight", "role": "original0", "do": "zero"},
    }
    declared = {name: {"of": "eyes", **each} for name, each in changes.items()}
    probes = {"eyes": {"samples": {"count": COUNT}}}
    with recording(
        EVERYTHING, samples={"count": COUNT}, probes=probes, interventions=declared
    ) as f:
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    output = next(i for k, i in f.slots.items() if (k.node, k.role) == ("Renamed", "output"))
    for name in declared:
        assert f.of(f"intervention:{name}")[0].values[output.id].tolist() == wanted


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["head", "clamp", "project", "other", "scale", "channel"])
def test_gradients_through_a_change_are_those_of_a_plain_hook(name: str) -> None:
    spec, change = CASES[name]
    model, (tokens, _) = initial(), batches(1)[0]
    tokens = tokens[:COUNT]
    path, role = spec["select"], spec.get("role", "output")
    clean = outputs(model, tokens)[path][0]
    plain = copy.deepcopy(model)
    with hooked(plain, [(path, role, lambda x: change(x, clean))]):
        plain(tokens).square().sum().backward()

    declared = InterventionSpec.model_validate({"of": "eyes", **spec})
    made = Interventions({"a": declared}, warn=pytest.fail, tell=lambda *_: None)
    with secluded(torch.device("cpu")):
        subject = Subject(CleanCopy(model, {}), Samples((tokens,), {}, [*range(COUNT)], [], None))
        study = made.study(subject, labels=[])
        study.observe()
        edit = Edit(declared, declared.parts, study.modules.selected(declared))
        with torch.enable_grad(), study.changed([edit]) as output:
            output.square().sum().backward()
    ours = {n: p.grad for n, p in subject.copy.module.named_parameters()}
    for parameter, wanted in plain.named_parameters():
        given = ours[parameter]
        if given is None or wanted.grad is None:
            assert given is wanted.grad, parameter
        else:
            assert torch.equal(given, wanted.grad), parameter


# -- neutral --------------------------------------------------------------------------------------

EYES = {"samples": {"count": 4}, "schedule": {"first": 2, "every": 2}}
ANYWHERE = {
    "zero": {"of": "eyes", "select": "*", "do": {"scale": 0.5}},
    "noise": {"of": "eyes", "select": "*", "role": "input", "do": {"scale": 1.5}, "sweep": "node"},
    "weights": {"of": "eyes", "select": "*", "role": "parameter", "do": {"noise": 0.1}},
    "path": {"of": "eyes", "select": "*", "do": {"scale": 0.5}, "into": "head"},
    "paths": {
        "of": "eyes",
        "select": "*",
        "do": {"scale": 0.5},
        "into": "head",
        "sweep": ["node", "into"],
        "estimate": "gradient",
    },
}


@pytest.mark.parametrize(
    ("name", "mode"), [("conv", "train"), ("recurrent", "eval"), ("tied", "as_is")]
)
def test_training_and_all_other_records_are_the_same_to_the_last_bit(name: str, mode: str) -> None:
    plain = train_net(name)
    probes = {"eyes": {**EYES, "mode": mode}}
    chosen = {k: v for k, v in ANYWHERE.items() if name != "tied" or k != "noise"}
    if name in ("recurrent", "tied"):  # whose first module receives tokens
        chosen = {**chosen, "noise": {**ANYWHERE["noise"], "select": "head"}}
    with recording(EVERYTHING, probes=probes) as bare:
        train_net(name)
    with recording(EVERYTHING, probes=probes, interventions=chosen) as found:
        result = train_net(name)
    assert found.faults == []
    assert result.state() == plain.state()
    assert {s.info.type for s in found.steps} > {f"intervention:{each}" for each in chosen}
    others = [i for i, s in enumerate(found.steps) if not s.info.type.startswith("intervention:")]
    assert [found.steps[i].info.type for i in others] == [s.info.type for s in bare.steps]
    for at, place in enumerate(others):
        assert contents(found, place) == contents(bare, at)
        assert found.steps[place].info.structure == bare.steps[at].info.structure


def test_without_interventions_none_of_their_code_is_called() -> None:
    files = (
        "interventions.py",
        "passes.py",
        "backward_passes.py",
        "places.py",
        "changes.py",
        "effects.py",
    )
    counts = []
    for declared in ({}, {"zero": ANYWHERE["zero"]}):
        count = 0

        def see(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count
            name = frame.f_code.co_filename
            if event == "call" and "/hooks/probing/" in name:
                count += name.endswith(files)

        with recording(EVERYTHING, probes={"eyes": EYES}, interventions=declared):
            sys.setprofile(see)
            try:
                train_net("recurrent")
            finally:
                sys.setprofile(None)
        counts.append(count)
    assert counts[0] == 0
    assert counts[1] > 100


def test_an_intervention_is_made_at_every_nth_record_of_its_probe() -> None:
    found = recorded({"rare": {"select": MLP, "do": "zero", "every": 2, "values": False}}, steps=4)
    steps = found.of("intervention:rare")
    assert [step.info.step for step in steps] == [0, 2]
    own = {info.id for key, info in found.slots.items() if key.pass_ == "effect:rare"}
    assert {*steps[0].values} == own  # `values: false`


# -- containers -----------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    rest: list[Any]


@dataclass(frozen=True)
class Held:
    inner: Any


class Fields(OrderedDict[str, Any]):
    """As the outputs of transformers: entries are attributes, too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


def test_a_tensor_is_replaced_in_any_container_without_touching_the_original() -> None:
    old, other, new = torch.zeros(2), torch.ones(2), torch.full((2,), 5.0)
    fields = Fields(a=other, b=(old, None))
    for value, roles in (
        (old, ["output"]),
        ((other, [old]), ["output[0]", "output[1][0]"]),
        (Pair(other, [{"x": old}, 3]), ["output.first", "output.rest[0].x"]),
        (Held(Pair(old, [])), ["output.inner.first"]),
        (fields, ["output.a", "output.b[0]"]),
    ):
        found = with_tensor(value, old, new)
        assert type(found) is type(value)
        named = tensors_of("output", found)
        assert [each.role for each in named] == roles
        assert sum(each.tensor is new for each in named) == 1
        assert not any(each.tensor is old for each in named)
        assert any(each.tensor is old for each in tensors_of("output", value))
    assert found["b"][0] is new
    assert fields["b"][0] is old
