"""Changes of gradients give what tensor hooks of torch give, and only gradients show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import CallError, SpecError, UnknownNameError
from comgra_decl.records import INTERVENTION
from comgra_decl.spec import load_spec
from tests.probing.attention import HEADS, WIDTH, Classifier
from tests.probing.nets import train as train_net
from tests.probing.test_interventions import batches, initial, noise, part, recorded, without
from tests.support.recording import EVERYTHING, Recording, contents, recording

COUNT = 5
MLP, OUT = "blocks.1.mlp", "blocks.0.attn.out"
V = torch.arange(1.0, 9.0)
every = slice(None)

Change = Callable[[Tensor, Tensor], Tensor]
Grads = dict[str, list[np.ndarray[Any, Any]]]


class Labelled(nn.Sequential):
    """Takes labels, which only the loss of a probe uses."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        return cast(Tensor, super().forward(tokens))  # type: ignore[no-untyped-call]


def zero(g: Tensor, _: Tensor) -> Tensor:
    return torch.zeros_like(g)


CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "zero": ({"select": MLP, "do": "zero"}, zero),
    "scale": ({"select": MLP, "do": {"scale": -1.5}}, lambda g, _: g * -1.5),
    "clamp": ({"select": MLP, "do": {"clamp": [-1e-3, 1e-3]}}, lambda g, _: g.clamp(-1e-3, 1e-3)),
    "add": ({"select": MLP, "do": {"add": V.tolist(), "scale": 0.5}}, lambda g, _: g + 0.5 * V),
    "noise": ({"select": MLP, "do": {"noise": 0.5, "seed": 3}}, noise),
    "project": ({"select": MLP, "do": {"project_off": V.tolist()}}, lambda g, _: without(g, V)),
    "mean": ({"select": MLP, "do": "mean"}, lambda _, c: c.mean(0, keepdim=True).expand_as(c)),
    "other": ({"select": MLP, "do": {"patch": "other"}}, lambda _, c: c.roll(-1, 0)),
    "difference": (
        {"select": MLP, "do": {"add": {"difference": [2, 0]}}},
        lambda g, c: g + (c[[2]].mean(0) - c[[0, 3]].mean(0)),
    ),
    "head": (
        {"select": OUT, "role": "input", "parts": {"head": [1]}, "do": "zero"},
        lambda g, _: part(torch.zeros_like, every, every, [2, 3])(g),
    ),
    "input": ({"select": "blocks.1.norm", "role": "input", "do": "zero"}, zero),
    "second": ({"select": "twice", "iteration": 1, "do": "zero"}, zero),
    "tuple": ({"select": "lstm", "do": {"scale": 0.5}}, lambda g, _: g * 0.5),
}


def plain(
    path: str = "",
    role: str = "output",
    change: Callable[[Tensor], Tensor] | None = None,
    *,
    call: int | None = None,
    model: Classifier | None = None,
) -> tuple[Grads, dict[str, Tensor | None], list[Tensor]]:
    """Return the gradients of all outputs and parameters, and what one change has received."""
    model = initial() if model is None else model
    tokens, classes = batches(1)[0]
    outputs: Grads = {}
    received: list[Tensor] = []
    calls = iter(range(99))

    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        if call in (None, next(calls)):

            def hook(gradient: Tensor) -> Tensor | None:
                received.append(gradient)
                return None if change is None else change(gradient)

            tensor.register_hook(hook)
        return tensor.clone()  # the model may write to it, which hides a hook from torch

    for name, module in model.named_modules():

        def keep(_: nn.Module, __: Any, out: Any, name: str = name) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            if first.requires_grad:
                own = outputs.setdefault(name, [])
                at = len(own)
                own.append(np.zeros(0))
                first.register_hook(lambda g: own.__setitem__(at, g.clone().numpy()))
            if name != path or role != "output":
                return None
            return (changed(first), *out[1:]) if isinstance(out, tuple) else changed(first)

        module.register_forward_hook(keep)
    if role == "input":
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda _, args: (changed(args[0]), *args[1:]))
    F.cross_entropy(model(tokens[:COUNT]), classes[:COUNT]).backward()
    return outputs, {n: p.grad for n, p in model.named_parameters()}, received


def assert_are(found: Recording, type_: str, outputs: Grads, own: dict[str, Any]) -> None:
    """Compare all recorded gradients to the last bit."""
    (step,) = found.of(type_)
    compared = 0
    for key, info in found.slots.items():
        if key.pass_ != "grad" or info.id not in step.values:
            continue
        value, path = step.values[info.id], "" if key.node == "Classifier" else key.node
        if key.role in ("output", "output[0]"):
            wanted = outputs[path][key.iteration]
            compared += 1
        elif "output" in key.role:
            continue
        else:
            gradient = own[f"{path}.{key.role}"]
            assert gradient is not None
            wanted = gradient.numpy()
            compared += 1
        assert value.reshape(wanted.shape).tobytes() == wanted.tobytes(), key
    with_gradients = sum(len(g) > 0 for each in outputs.values() for g in each)
    assert compared == with_gradients + sum(g is not None for g in own.values())


@pytest.fixture(scope="module")
def found() -> Recording:
    return recorded({name: {**spec, "pass": "grad"} for name, (spec, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_all_gradients_are_to_the_last_bit_those_that_a_tensor_hook_gives(
    found: Recording, name: str
) -> None:
    spec, change = CASES[name]
    where = (spec["select"], spec.get("role", "output"))
    call = spec.get("iteration")
    (clean,) = plain(*where, call=call)[2]
    outputs, own, _ = plain(*where, lambda g: change(g, clean), call=call)
    assert_are(found, f"intervention:{name}", outputs, own)
    facts = found.of(f"intervention:{name}")[0].info.extra[INTERVENTION]
    new = change(clean, clean)
    (made,) = facts["changes"]
    assert made["changed"] == int((new != clean).sum())
    assert made["largest"] == float((new.double() - clean.double()).abs().max())
    assert "leaves the model's output as it is" in facts["unmeasured"]


def test_the_record_of_the_probe_has_the_gradients_without_a_change(found: Recording) -> None:
    outputs, own, _ = plain("twice", call=1)
    assert_are(found, "probe:eyes", outputs, own)


def test_a_zero_at_the_input_of_a_branch_is_what_a_full_backward_hook_gives(
    found: Recording,
) -> None:
    model = initial()
    model.get_submodule("blocks.1.norm").register_full_backward_hook(
        lambda _, given, __: (torch.zeros_like(given[0]),)
    )
    _, wanted, _ = plain(model=model)
    (step,) = found.of("intervention:input")
    for key, info in found.slots.items():
        if key.pass_ == "grad" and key.role == "weight":
            gradient = wanted[f"{key.node}.weight"]
            assert gradient is not None
            assert step.values[info.id].tobytes() == gradient.numpy().tobytes()


def test_only_the_changed_parts_of_the_gradient_of_a_parameter_differ() -> None:
    rows, weight = {"class_": {"dim": 0, "only": [1]}}, {"role": "weight", "pass": "grad"}
    found = recorded(
        {
            "rows": {**weight, "select": "head", "parts": rows, "do": "zero"},
            "all": {"select": "lstm", "role": "parameter", "do": {"scale": 0.5}, "pass": "grad"},
        }
    )
    outputs, own, _ = plain()
    gradient = own["head.weight"]
    assert gradient is not None
    gradient[1] = 0
    assert_are(found, "intervention:rows", outputs, own)
    outputs, own, _ = plain()
    for name, gradient in own.items():
        if name.startswith("lstm") and gradient is not None:
            gradient.mul_(0.5)
    assert_are(found, "intervention:all", outputs, own)


# -- measured -------------------------------------------------------------------------------------


def norms(gradient: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.linalg.norm(np.asarray(gradient).reshape(COUNT, -1), axis=1)
    return found


def traced(declared: dict[str, Any], root: Path) -> Any:
    eyes = {"samples": {"count": COUNT}}
    interventions = {name: {"of": "eyes", **each} for name, each in declared.items()}
    spec = {**EVERYTHING, "probes": {"eyes": eyes}, "interventions": interventions}
    torch.manual_seed(0)
    with comgra.trace(spec, root=root) as session:
        model = Classifier()
        tokens, classes = batches(1)[0]
        F.cross_entropy(model(tokens), classes).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert session.path is not None
    return comgra.open_run(session.path)


def test_sweeps_measure_the_norm_of_a_gradient(tmp_path: Path) -> None:
    weight = {"gradient": "embed", "role": "weight"}
    heads = {"select": "blocks.*.attn.out", "role": "input", "do": "zero", "pass": "grad"}
    first = [{"select": "lstm", "do": {"scale": 0.5}, "pass": "grad"}]
    run = traced(
        {
            "weight": {**heads, "sweep": ["node", "head"], "measure": weight},
            "output": {**heads, "sweep": ["node", "head"], "measure": {"gradient": "embed"}},
            "first": {**heads, "first": first, "sweep": "node", "measure": weight},
            "values": {"select": MLP, "do": "zero", "measure": {**weight, "role": "parameter"}},
        },
        tmp_path,
    )
    outputs, own, _ = plain()
    per = WIDTH // HEADS
    by_weight, by_output = run.effects("weight"), run.effects("output")
    for block in range(2):
        for head in range(HEADS):

            def zeroed(g: Tensor, head: int = head) -> Tensor:
                return part(torch.zeros_like, every, every, range(head * per, head * per + per))(g)

            path = f"blocks.{block}.attn.out"
            there, changed, _ = plain(path, "input", zeroed)
            row = by_weight.loc[(0, path, head)]
            assert changed["embed.weight"] is not None
            assert own["embed.weight"] is not None
            effect = changed["embed.weight"].norm() - own["embed.weight"].norm()
            assert row["mean"] == pytest.approx(float(effect), rel=1e-4, abs=1e-9)
            assert np.isnan(row["error"])  # a parameter has one gradient for all samples
            wanted = norms(there["embed"][0]) - norms(outputs["embed"][0])
            row = by_output.loc[(0, path, head)]
            np.testing.assert_allclose(row[[*range(COUNT)]], wanted, rtol=1e-3, atol=1e-8)
    facts = run.intervention_facts("first")
    half = plain("lstm", "output", lambda g: g * 0.5)[1]["embed.weight"]
    assert half is not None
    assert facts["baseline"] == [pytest.approx(float(half.norm()), rel=1e-6)]
    assert facts["clean"] != facts["baseline"]
    assert facts["measure"] == "norm of the gradient of loss at embed, weight"
    assert len(run.effects("values")) == 1


def test_a_change_of_values_is_measured_by_the_gradient_that_follows(tmp_path: Path) -> None:
    measure = {"gradient": "blocks.0", "of": {"difference": [0, 2]}}
    run = traced({"ablated": {"select": MLP, "do": "zero", "measure": measure}}, tmp_path)
    found = []
    for ablated in (False, True):
        model, tokens = initial(), batches(1)[0][0][:COUNT]
        if ablated:
            model.get_submodule("blocks.1.mlp").register_forward_hook(
                lambda _, __, out: torch.zeros_like(out)
            )
        kept: list[Tensor] = []
        model.blocks[0].register_forward_hook(
            lambda _, __, out, kept=kept: out.register_hook(kept.append) and None
        )
        logits = model(tokens)
        (logits[:, 0] - logits[:, 2]).mean().backward()
        found.append(norms(kept[0]))
    effects = run.effects("ablated")[[*range(COUNT)]].to_numpy()[0]
    np.testing.assert_allclose(effects, found[1] - found[0], rtol=1e-4, atol=1e-8)


def test_without_a_measure_of_gradients_there_are_records_but_no_effects(tmp_path: Path) -> None:
    run = traced({"cut": {"select": MLP, "do": "zero", "pass": "grad"}}, tmp_path)
    gradient = run.slot("embed").grad
    assert not np.array_equal(
        gradient.value(0, type="intervention:cut"), gradient.value(0, type="probe:eyes")
    )
    assert run.slot(MLP).value(0, type="intervention:cut").any()  # the values are as before
    assert not run.slot(MLP).grad.value(0, type="intervention:cut").any()
    with pytest.raises(UnknownNameError, match="leaves the model's output as it is"):
        run.effects("cut")


def test_the_gradients_of_another_run_can_be_patched(tmp_path: Path) -> None:
    cut = {"select": "lstm", "do": {"scale": 2.0}, "pass": "grad"}
    earlier = traced({"doubled": cut}, tmp_path / "a")
    source = {"run": str(earlier.path), "type": "intervention:doubled"}
    patched = {"select": "blocks.0", "do": {"patch": source}, "pass": "grad"}
    run = traced({"patched": patched}, tmp_path)
    for node in ("embed", "blocks.0"):
        kept = earlier.slot(node).grad.value(0, type="intervention:doubled")
        assert run.slot(node).grad.value(0, type="intervention:patched").tobytes() == kept.tobytes()


# -- said -----------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """The first layer and the input have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
        self.first.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.first(tokens))


def test_changes_that_no_gradient_shows_are_reported_as_having_done_nothing() -> None:
    torch.manual_seed(0)
    declared = {
        "same": {"of": "eyes", "select": "head", "do": {"scale": 1.0}, "pass": "grad"},
        "end": {"of": "eyes", "select": "first", "do": "zero", "pass": "grad"},
    }
    probes = {"eyes": {"samples": {"count": 4}}}
    model = Frozen()
    with recording(EVERYTHING, probes=probes, interventions=declared) as found:
        for _ in range(2):
            F.cross_entropy(model(torch.arange(8)), torch.arange(8) % 3).backward()
            torch.optim.SGD(model.head.parameters(), lr=0.1).step()
    assert found.faults == []
    same, end = found.report["warnings"]
    assert same == "intervention 'same' did nothing: every element kept its value"
    assert end.startswith("intervention 'end' did nothing: it changed 16 of 16 elements")
    assert end.endswith("and so are the gradients of all parameters and inputs")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"sweep": "node"}, "measure: a change of gradients leaves the model's output as it is"),
        ({"into": "y"}, "into: paths are those of values"),
        ({"sweep": "node", "estimate": "gradient"}, "estimate: is one of values"),
        ({"role": "attention"}, "pass: the gradient of an attention pattern"),
        ({"role": "output_grad"}, "add `pass: grad`"),
        ({"pass": "backward"}, "pass"),
        ({"measure": {"gradient": "x", "role": "weight.grad"}}, "measure: role: must be an output"),
        ({"role": "weight", "do": "mean"}, "mean needs samples"),
    ],
)
def test_what_gradients_do_not_have_is_refused_when_the_spec_is_loaded(
    spec: dict[str, Any], why: str
) -> None:
    declared = {"a": {"of": "eyes", "select": "x", "do": "zero", "pass": "grad", **spec}}
    with pytest.raises(SpecError) as error:
        load_spec({"probes": {"eyes": {}}, "interventions": declared})
    assert why in str(error.value)


def test_a_probe_has_the_gradients_of_one_measure() -> None:
    cut = {"of": "eyes", "select": "x", "do": "zero", "pass": "grad"}
    declared = {"a": cut, "b": {**cut, "measure": "label"}}
    with pytest.raises(SpecError, match=r"interventions\.b\.measure: its gradients are of some"):
        load_spec({"probes": {"eyes": {}}, "interventions": declared})
    elsewhere = {**declared, "b": {**declared["b"], "of": "mouth"}}
    load_spec({"probes": {"eyes": {}, "mouth": {}}, "interventions": elsewhere})


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"select": "unused"}, "no gradient reaches 'output' of a selected module (unused)"),
        ({"select": "head", "iteration": 1}, "no selected module is called 2 times"),
        ({"select": "lstm", "role": "output[7]"}, "it has output[0]"),
        ({"select": MLP, "parts": {"position": [6]}}, "position: 6 does not exist"),
        ({"select": MLP, "do": {"add": [1.0, 2.0]}}, f"{MLP}, gradient of output: values of shape"),
        ({"select": MLP, "measure": {"gradient": "haed"}}, "there is no module 'haed'"),
        (
            {"select": MLP, "measure": {"gradient": "head", "role": "wieght"}},
            "head has no parameter 'wieght'; it has weight, bias",
        ),
        ({"select": MLP, "measure": {"gradient": "unused"}}, "no gradient reaches unused, output"),
    ],
)
def test_what_does_not_exist_ends_the_program_before_training(
    spec: dict[str, Any], why: str
) -> None:
    declared = {"a": {"of": "eyes", "do": "zero", "pass": "grad", **spec}}
    probes = {"eyes": {"samples": {"count": COUNT}}}
    model, (tokens, _) = initial(), batches(1)[0]
    with (
        recording(EVERYTHING, probes=probes, interventions=declared),
        pytest.raises(SystemExit) as ended,
    ):
        model(tokens)
    assert str(ended.value).startswith("comgra: the spec has 1 problem:\n  comgra.interventions.a")
    assert why in str(ended.value)


def test_a_single_call_changes_gradients_as_an_intervention_but_not_as_one_of_its_changes() -> None:
    model, tokens = initial(), batches(1)[0][0][:COUNT]
    cut = {"select": MLP, "do": "zero", "pass": "grad", "measure": "top"}
    cache = comgra.look(model, tokens, spec=EVERYTHING, interventions={"cut": cut})
    assert not cache.slot(MLP).grad.value(0, type="intervention:cut").any()
    logits = model(tokens)
    weight = model.embed.weight
    (wanted,) = torch.autograd.grad(logits.amax(1).mean(), weight)
    found = cache.slot("embed", role="weight").grad.value(0, type="probe:look")
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted.numpy())
    with pytest.raises((CallError, SpecError), match=r"changes\[0\]\.pass: gradients are changed"):
        comgra.look(model, tokens, changes={"select": MLP, "do": "zero", "pass": "grad"})


# -- neutral --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "mode"), [("conv", "train"), ("recurrent", "eval")])
def test_training_and_its_records_are_the_same_to_the_last_bit(name: str, mode: str) -> None:
    bare = train_net(name)
    probes = {"eyes": {"samples": {"count": 4}, "mode": mode, "schedule": {"every": 2}}}
    declared = {
        "half": {"of": "eyes", "select": "*", "do": {"scale": 0.5}, "pass": "grad"},
        "own": {"of": "eyes", "select": "*", "role": "parameter", "do": "zero", "pass": "grad"},
        "sweep": {
            "of": "eyes",
            "select": "*",
            "do": {"scale": 0.5},
            "pass": "grad",
            "sweep": "node",
            "measure": {"gradient": "head", "role": "weight"},
        },
    }
    with recording(EVERYTHING) as without_probes:
        train_net(name)
    with recording(EVERYTHING, probes=probes, interventions=declared) as found:
        result = train_net(name)
    assert found.faults == []
    assert result.state() == bare.state()
    assert {s.info.type for s in found.steps} > {f"intervention:{each}" for each in declared}
    own = [i for i, s in enumerate(found.steps) if ":" not in s.info.type]
    for at, place in enumerate(own):
        assert contents(found, place) == contents(without_probes, at)


def test_a_change_that_lets_no_gradient_through_leaves_a_norm_of_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    first = model[0](x).detach().requires_grad_()
    model[2](model[1](first))[:, 1].mean().backward()
    assert first.grad is not None
    measure = {"gradient": "0", "of": 1}
    stopped = {"select": "1", "do": "zero", "measure": measure}
    record = comgra.look(model, x, interventions={"stopped": stopped})
    found = record.effects("stopped").loc[0, [0, 1, 2, 3]].to_numpy(float)
    np.testing.assert_allclose(found, -first.grad.norm(dim=1).numpy(), rtol=1e-5)


def test_a_sample_without_a_label_has_no_effect_on_a_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9))
    tokens = torch.randint(9, (3, 5))
    labels = tokens.clone()
    labels[1] = -100
    cut = {"select": "1", "do": {"scale": 0.5}, "measure": {"gradient": "0"}}
    record = comgra.look(Labelled(*model), tokens, labels=labels, interventions={"cut": cut})
    found = record.effects("cut").loc[0]
    assert np.isnan(found[1])
    assert found["mean"] == pytest.approx((found[0] + found[2]) / 2)
