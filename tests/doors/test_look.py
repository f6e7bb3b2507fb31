"""One call of a model, recorded without training: `comgra.look`."""

from __future__ import annotations

import copy
import gc
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import comgra_decl as comgra
from comgra_decl.errors import CallError, SpecError, UnknownNameError
from comgra_decl.hooks.patches import in_place
from tests.probing.nets import CLASSES, MODELS, Conv, Counting, Trained, images
from tests.support.programs import python

EVERYTHING = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "input", "parameter", "parameter_grad", "buffer"],
        }
    },
    "histogram": None,
}


def made(name: str = "conv", *, training: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    make, inputs = MODELS[name]
    model = make().train(training)
    if isinstance(model, Conv):
        model.frozen.eval()
    return model, inputs()


LABELS = torch.arange(12) % CLASSES


def entropy(output: Tensor) -> Tensor:
    return F.cross_entropy(output, LABELS)


def as_pytorch_says(
    model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], nn.Module]:
    """Return all outputs and their gradients, from plain hooks on the model, and the model."""
    outputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}

    def see(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and name not in outputs:
                outputs[name] = output.detach().clone()
                if output.requires_grad:
                    output.register_hook(lambda g: gradients.__setitem__(name, g.clone()))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(see(name))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        output = model(x.clone())
        if loss is not None:
            loss(output).backward()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
    return outputs, gradients, model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_bitwise_those_of_plain_hooks(name: str, training: bool) -> None:
    model, x = made(name, training=training)
    loss = entropy if name != "tied" else (lambda output: output.logsumexp(1).mean())
    outputs, gradients, twin = as_pytorch_says(made(name, training=training)[0], x, loss)
    found = comgra.look(model, x, spec=EVERYTHING, loss=loss)
    assert found.types == ["train"]
    label = type(model).__name__
    for path, output in outputs.items():
        slot = found.slot(path or label)
        # what has no batch dim, such as the result of a parametrization, counts as one sample
        value = slot.value(0).reshape(output.shape)
        assert np.array_equal(value, output.numpy()), path
        if path in gradients:
            gradient = slot.grad.value(0).reshape(output.shape)
            assert np.array_equal(gradient, gradients[path].numpy()), path
    assert len(gradients) >= 2
    compared = 0
    for path, parameter in twin.named_parameters():
        node, _, role = path.rpartition(".")
        if "parametrizations" in node or role.endswith(("_g", "_v", "_orig")):
            continue  # these have names of their own
        slot = found.slot(node or label, role=role)
        assert np.array_equal(slot.value(0)[0], model.get_parameter(path).detach().numpy())
        if parameter.grad is not None:
            grad = found.slot(node or label, role=role, of="grad").value(0)[0]
            assert np.array_equal(grad, parameter.grad.numpy()), path
            compared += 1
    assert compared > 0
    loss_now = found.kpis().set_index("name")["value"]["loss"]
    assert loss_now == pytest.approx(float(loss(outputs[""])), rel=1e-6)


@pytest.mark.parametrize("how", ["gradients", "no_grad", "inference_mode", "frozen"])
def test_without_a_loss_it_is_an_evaluation_with_values_and_the_graph(how: str) -> None:
    model, x = made(training=False)
    outputs, _, _ = as_pytorch_says(made(training=False)[0], x, None)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    if how == "frozen":
        model.requires_grad_(False)
    with modes.get(how, torch.enable_grad)():
        found = comgra.look(model, x, spec=EVERYTHING)
    assert found.types == ["eval"]
    assert {*found.slots["pass"]} == {"forward"}
    for path, output in outputs.items():
        assert np.array_equal(found.slot(path or "Conv").value(0), output.numpy())
    assert ("input", "conv1") in found.edges()
    assert ("conv2", "head") in found.edges()
    assert ("head", "Conv") in found.edges()
    mean = outputs["conv2"].double().mean((1, 2, 3)).numpy()
    assert found.slot("conv2").row(0)["mean"].to_numpy() == pytest.approx(mean, abs=1e-6)


def world(model: Conv, x: Tensor, result: Trained) -> dict[str, Any]:
    """Return everything that a call must leave as it is, to the last bit."""
    result.drawn = []
    tables = [v for k, v in vars(torch_module).items() if k.startswith("_global_")]
    of_numpy: Any = np.random.get_state()
    state = torch.get_rng_state(), random.getstate(), of_numpy
    return {
        **result.state(),
        "generators": (state[0].tolist(), state[1], state[2][1].tolist()),
        "own generator": model.generator.get_state().tolist(),
        "input": (x.tolist(), None if x.grad is None else x.grad.tolist(), x.requires_grad),
        "hooks everywhere": [[*t] if isinstance(t, dict) else t for t in tables],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "patches": (nn.Module.__call__, nn.Module.train, torch.autograd.backward, torch.compile),
        "in place": len(in_place),
        "memory": id(model.conv1.weight),
    }


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class BrokenError(RuntimeError):
    """Raised in the middle of a call."""


@pytest.fixture
def busy() -> Iterator[tuple[Conv, Tensor, Trained]]:
    """Yield a model in the middle of training, with everything that a program may attach to it."""
    model, x = made()
    assert isinstance(model, Conv)
    result = Trained(model)

    def counted(*_: Any) -> None:
        result.hooked += 1

    def everywhere(*_: Any) -> None:
        result.everywhere += 1

    handles = [
        torch_module.register_module_forward_pre_hook(everywhere),
        torch_module.register_module_forward_hook(everywhere),
    ]
    model.register_forward_hook(counted)
    model.drop.register_full_backward_hook(counted)
    x.requires_grad_()
    with Counting(result):
        entropy(model(x)).backward()
        yield model, x, result
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("fails", ["never", "in the middle", "in the loss"])
def test_the_model_and_the_program_stay_exactly_as_they_were(
    busy: tuple[Conv, Tensor, Trained], fails: str, folders: Path
) -> None:
    model, x, result = busy
    class_of_head = type(model.head)

    def loss(output: Tensor) -> Tensor:
        if fails == "in the loss":
            raise BrokenError
        return entropy(output) + 0 * weight.sum()

    weight = torch.ones(2, requires_grad=True)
    comgra.look(model, x, loss=entropy)  # torch imports more in the first call
    if fails == "in the middle":
        model.head.__class__ = type(
            "Head", (nn.Linear,), {"forward": lambda *_: _raise(BrokenError())}
        )
    gc.collect()
    before = world(model, x, result)
    seen = result.seen
    if fails == "never":
        found = comgra.look(model, x, loss=loss)
        assert found.slot("input", role="input", of="grad").value(0).shape == (12, 1, 8, 8)
        del found
    else:
        with pytest.raises(BrokenError):
            comgra.look(model, x, loss=loss)
    assert result.seen == seen
    assert weight.grad is None
    gc.collect()
    assert world(model, x, result) == before
    assert [*folders.iterdir()] == []
    model.head.__class__ = class_of_head


def _raise(error: Exception) -> None:
    raise error


def test_a_look_between_two_steps_changes_nothing_in_a_training() -> None:
    def train(*, looks: bool) -> list[Any]:
        model, x = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = entropy(model(x))
            loss.backward()
            if looks:
                comgra.look(model, x, loss=entropy, spec="light")
            optimizer.step()
            losses.append(loss.item())
        return [losses, *(t.tolist() for t in model.state_dict().values()), torch.rand(1).item()]

    assert train(looks=True) == train(looks=False)


@pytest.mark.slow
def test_the_record_is_gone_with_the_object_unless_it_is_saved(
    folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, x = made(training=False)
    found = comgra.look(model, x, spec=EVERYTHING, loss=entropy)
    slot, head = found.slot("head"), found.slot("head").value(0)
    kept = tmp_path_factory.mktemp("kept") / "look"
    assert found.save(kept) == kept
    assert len([*folders.iterdir()]) == 1
    del found
    gc.collect()
    assert np.array_equal(slot.value(0), head)  # a slot keeps the record
    del slot
    gc.collect()
    assert [*folders.iterdir()] == []
    np.save(kept.parent / "head.npy", head)
    code = f"""
import sys, numpy as np, comgra_decl as comgra
run = comgra.open_run({str(kept)!r})
assert run.state == "finished" and run.damage == [], run.state
assert np.array_equal(run.slot("head").value(0), np.load({str(kept.parent / "head.npy")!r}))
assert ("conv2", "head") in run.edges() and "torch" not in sys.modules
"""
    done = python(kept.parent, "-c", code)
    assert done.returncode == 0, done.stderr


def test_weights_replace_those_of_the_copy() -> None:
    model, x = made(training=False)
    other = Conv().eval()
    assert isinstance(model, Conv)
    assert other.bn.running_mean is not None
    other.bn.running_mean += 1
    before = {name: t.clone() for name, t in model.state_dict().items()}
    # the noise in `forward` comes from a generator of the model's own, which is no weight
    model.generator.set_state(other.generator.get_state())
    outputs, _, _ = as_pytorch_says(other, x, None)
    arrays = {name: t.numpy() for name, t in other.state_dict().items()}
    for weights in (other.state_dict(), arrays):
        found = comgra.look(model, x, weights=weights)
        assert np.array_equal(found.slot("head").value(0), outputs["head"].numpy())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, dtype=torch.bfloat16)

    def forward(self, given: dict[str, list[Tensor]], *, scale: float = 1.0) -> dict[str, Tensor]:
        x = given["x"][0]
        return {"logits": self.first(x) * scale}


@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_may_have_the_names_of_a_wrapper(wrapped: bool) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    wrapper = nn.DataParallel(compiled(other))
    assert [*wrapper.state_dict()] == ["module._orig_mod.weight", "module._orig_mod.bias"]
    found = comgra.look(wrapper if wrapped else model, X, weights=wrapper.state_dict())
    assert np.array_equal(found.slot("Linear").value(0), other(X).detach().numpy())


def test_names_that_look_like_those_of_a_wrapper_are_taken_as_they_are() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    model, other = Outer(), Outer()
    found = comgra.look(model, X, weights=other.state_dict())
    assert np.array_equal(found.slot("module").value(0), other(X).detach().numpy())
    with pytest.raises(CallError, match=r"'module.bias' is missing"):
        comgra.look(model, X, weights={"module.weight": other.module.weight})


def test_a_loss_may_use_the_parameters_of_the_copy() -> None:
    model = nn.Linear(3, 2)

    def loss(output: Tensor, model: nn.Module) -> Tensor:
        return output.sum() + 100 * sum(p.square().sum() for p in model.parameters())

    found = comgra.look(model, X, loss=loss)
    assert model.weight.grad is None
    value = loss(model(X), model)
    value.backward()
    assert found.kpis()["value"].tolist() == [value.item()]
    for name, parameter in model.named_parameters():
        gradient = found.slot("Linear", role=name, of="grad").value(0)
        assert gradient.shape == (1, *parameter.shape), "a parameter is a batch of one"
        assert parameter.grad is not None
        np.testing.assert_allclose(gradient[0], parameter.grad.numpy(), rtol=1e-6)
    with pytest.raises(UnknownNameError, match=r"values of losses are not kept; `run.kpis\(\)`"):
        found.slot("loss").value(0)


@pytest.mark.parametrize(
    "model", [nn.Identity(), nn.Sequential(nn.Flatten(), nn.Softmax(1)), nn.ReLU()]
)
@pytest.mark.parametrize("trained", [False, True])
def test_a_model_needs_no_parameters(model: nn.Module, trained: bool) -> None:
    x = torch.randn(4, 3, requires_grad=trained)
    outputs, gradients, _ = as_pytorch_says(copy.deepcopy(model), x, torch.sum if trained else None)
    found = comgra.look(model, x, loss=torch.sum if trained else None)
    assert found.types == ["train" if trained else "eval"]
    for path, output in outputs.items():
        slot = found.slot(path or type(model).__name__)
        assert np.array_equal(slot.value(0), output.numpy())
        if path in gradients:
            assert np.array_equal(slot.grad.value(0), gradients[path].numpy())
    assert ("input", "0" if "0" in outputs else type(model).__name__) in found.edges()


@pytest.mark.parametrize("count", [3, 8])
def test_samples_keep_the_order_of_the_batch(count: int) -> None:
    labels = torch.tensor([0, 0, 2, 0, 1, 1, 2])
    model, x = nn.Linear(2, 3), torch.randn(7, 2)
    spec = {**EVERYTHING, "samples": {"count": count, "by": "target"}}
    found = comgra.look(model, x, spec=spec, loss=lambda y: F.cross_entropy(y, labels))
    assert np.array_equal(found.slot("Linear").value(0), model(x).detach().numpy())
    assert found.samples(0)["label"].tolist() == [str(label) for label in labels.tolist()]
    wanted = model(x).detach().double().mean(1)
    np.testing.assert_allclose(found.slot("Linear").row(0)["mean"], wanted, rtol=1e-5, atol=1e-7)


def test_nested_arguments_outputs_and_bfloat16() -> None:
    model = Nested()
    x = torch.randn(5, 3, dtype=torch.bfloat16)
    expected = model.first(x) * 2
    found = comgra.look(model, {"x": [x]}, scale=2.0, loss=lambda output: output["logits"].sum())
    value = found.slot("Nested", role="output.logits").value(0)
    assert value.dtype.name == "bfloat16"
    assert np.array_equal(value.view(np.int16), expected.detach().view(torch.int16).numpy())


def compiled(model: nn.Module) -> nn.Module:
    wrapper: Any = torch.compile(model, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel])
def test_a_wrapper_is_removed(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(4, 3)
    found = comgra.look(wrap(model), x)
    assert np.array_equal(found.slot("1").value(0), model(x).detach().numpy())
    assert {"0", "1", "Sequential"} <= {*found.nodes}


def test_annotations_in_a_forward_are_recorded() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(comgra.node(x * 2, "twice"))

    found = comgra.look(Named(3, 2), X, spec={"nodes": EVERYTHING["nodes"]})
    assert found.slot("twice").row(0)["mean"].tolist() == [2.0] * 4


LINEAR = nn.Linear(3, 2)
X = torch.ones(4, 3)


def looked(*inputs: Any, model: Any = LINEAR, **options: Any) -> object:
    return comgra.look(model, *(inputs or (X,)), **options)


def weights(**changed: Tensor | None) -> dict[str, Tensor]:
    state = {**LINEAR.state_dict(), **changed}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no module": (lambda: looked(model=F.relu), "model must be a torch.nn.Module, got <"),
    "no function": (lambda: looked(loss=3), "a function of the model's output, got 3"),
    "a vector": (lambda: looked(loss=lambda y: y), r"one element, got the shape \(4, 2\)"),
    "a number": (lambda: looked(loss=lambda _: 1.0), "one element, got 1.0"),
    "detached": (lambda: looked(loss=lambda y: y.detach().sum()), "has no gradients"),
    "lazy": (lambda: looked(model=nn.LazyLinear(2)), "copy of LazyLinear, but weight is not init"),
    "a list": (lambda: looked(weights=[1]), r"map names to tensors.* got \[1\]"),
    "a number as weight": (lambda: looked(weights={"weight": 3}), r"weights\['weight'\] must be a"),
    "missing": (lambda: looked(weights=weights(bias=None)), "not fit the model: 'bias' is missing"),
    "shape": (lambda: looked(weights=weights(weight=X)), r"'weight' has the shape \(4, 3\), but"),
    "unknown": (lambda: looked(weights=weights(more=X)), "the model has no 'more'"),
    "nothing": (lambda: looked(3, model=nn.Identity()), "nothing was recorded: .* no tensors"),
    "meta": (lambda: looked(model=nn.Linear(3, 2, device="meta")), "Linear is on the meta device"),
    "penalty": (
        lambda: looked(loss=lambda y: y.sum() + LINEAR.weight.square().sum()),
        "uses 'weight' of the model itself, but .* loss=lambda output, model: ",
    ),
    "an argument": (lambda: looked(Lock()), "an argument of the model cannot be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_recorded_is_said(case: str, folders: Path) -> None:
    call, message = WRONG[case]
    with pytest.raises(CallError, match=f"(?s){message}"):
        call()
    assert [*folders.iterdir()] == []
    assert len(in_place) == 0


def test_a_wrong_spec_is_said() -> None:
    with pytest.raises(SpecError, match="is not"):
        comgra.look(LINEAR, X, spec={"nodes": {"all": {"select": "**", "capture": ["outputs"]}}})
    with pytest.raises(SpecError, match="enabled"):
        comgra.look(LINEAR, X, spec="off")


def test_a_look_within_a_recording_is_refused(tmp_path: Path) -> None:
    with comgra.trace("light", root=tmp_path), pytest.raises(CallError, match="declare a probe"):
        comgra.look(LINEAR, X)
    assert comgra.look(LINEAR, X).slot("Linear").value(0).shape == (4, 2)


def test_a_model_may_fail_with_an_error_of_its_own() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        comgra.look(made()[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        comgra.look(LINEAR, images())


def test_what_a_spec_says_about_a_training_run_is_ignored() -> None:
    spec = {
        **EVERYTHING,
        "probes": {"eyes": {"samples": {"count": 2}}},
        "interventions": {"off": {"of": "eyes", "select": "*", "do": "zero"}},
        "checkpoints": {"every": 1},
        "keep": {"ring": 3, "when": ["nonfinite"]},
        "on_finding": {"stop": "error"},
        "sinks": ["tensorboard"],
    }
    found = comgra.look(LINEAR, X, spec=spec)
    assert found.types == ["eval"]
    assert len(found.checkpoints) == 0


def test_a_look_that_cannot_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_settings: object) -> None:
        raise RuntimeError("the hooks cannot be made")

    monkeypatch.setattr("comgra_decl.hooks.manager.HookManager.__init__", broken)
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="cannot be made"):
        comgra.look(LINEAR, X)
    assert {thread.name for thread in threading.enumerate()} == before
    assert len(in_place) == 0


class Checkpointed(nn.Module):
    """Recomputes a part in backward, in the way of torch that accepts no list of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(checkpoint(self.one, x, use_reentrant=True).relu())
        return out


def test_a_reentrant_checkpoint_has_the_gradients_that_pytorch_computes() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(4, 3, requires_grad=True)
    outside = torch.randn(4, 2, requires_grad=True)

    def loss(output: Tensor) -> Tensor:
        return (output * outside).square().mean()

    found = comgra.look(model, x, loss=loss, spec=EVERYTHING)
    assert (x.grad, outside.grad, model.one.weight.grad) == (None, None, None)
    loss(model(x)).backward()
    for name in ("one", "two"):
        gradient = found.slot(name, role="weight", of="grad").value(0)
        np.testing.assert_array_equal(gradient[0], model.get_submodule(name).weight.grad)


def test_weights_of_an_averaged_model_fit_the_model() -> None:
    model = nn.Linear(3, 2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(nn.Linear(3, 2))
    found = comgra.look(model, X, weights=averaged.state_dict())
    np.testing.assert_array_equal(found.slot("Linear").value(0), averaged(X).detach())
