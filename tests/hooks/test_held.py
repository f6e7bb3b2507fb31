"""What modules and optimizers hold: parameters, updates, states, buffers, raw gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.recording import Recording, recording


def spec(*capture: str) -> dict[str, object]:
    nodes = {"all": {"select": "**", "capture": list(capture), "values": True}}
    return {"nodes": nodes, "schedule": {"first": 1_000_000}}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def weight(model: nn.Sequential, layer: int = 0) -> torch.Tensor:
    return model.get_parameter(f"{layer}.weight")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def held(run: Recording, name: str, step: int, pass_: str = "forward") -> np.ndarray:
    """Returns the recorded value of a parameter, given torch's name for it."""
    node, _, role = name.partition(".")
    return run.value(node, role, pass_=pass_, step=step)[0]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=False),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_what_the_optimizer_did(kind: str) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](model)
    expected = []
    with recording(spec("update")) as run:
        for _ in range(3):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append({n: p.detach() - before[n] for n, p in model.named_parameters()})
    assert run.faults == []
    for step, updates in enumerate(expected):
        for name, update in updates.items():
            np.testing.assert_array_equal(held(run, name, step, "update"), update.numpy())


def test_updates_by_a_closure_are_those_of_the_whole_step() -> None:
    model, x = network(), torch.randn(5, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with recording(spec("update")) as run:
        for step in range(2):  # the first one discovers the model within the optimizer's step
            before = weight(model).detach().clone()
            optimizer.step(closure)
            change = (weight(model).detach() - before).numpy()
            np.testing.assert_array_equal(held(run, "0.weight", step, "update"), change)
    assert run.faults == []


def test_each_of_several_optimizers_updates_its_own_parameters() -> None:
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.5)
    with recording(spec("update")) as run:
        model(torch.randn(5, 3)).square().mean().backward()
        first.step()
        second.step()
    for layer, lr in (("0", 0.1), ("2", 0.5)):
        expected = -lr * gradients(model)[f"{layer}.weight"]
        np.testing.assert_allclose(held(run, f"{layer}.weight", 0, "update"), expected, rtol=1e-4)


def test_an_update_smaller_than_half_precision_shows_is_exact() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = weight(model).detach().float()
    with recording(spec("update")) as run:
        model(torch.randn(4, 3).bfloat16()).float().square().mean().backward()
        optimizer.step()
    expected = weight(model).detach().float() - before
    np.testing.assert_array_equal(held(run, "0.weight", 0, "update"), expected.numpy())


def test_a_parameter_that_is_not_updated_has_no_update() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with recording(spec("update")) as run:
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    assert run.nodes() - {"input", "loss", "target"} == {"2"}


def test_optimizer_states_are_as_the_optimizer_left_them() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    expected = []
    with recording(spec("optimizer_state")) as run:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            state = optimizer.state[weight(model)]
            expected.append({k: state[k].clone() for k in ("exp_avg", "exp_avg_sq")})
    for step, states in enumerate(expected):
        for name, value in states.items():
            np.testing.assert_array_equal(
                held(run, f"0.weight.{name}", step), value.numpy(), err_msg=name
            )
    assert {info.kind for key, info in run.slots.items() if "exp_avg" in key.role} == {"buffer"}
    assert not any(key.role == "weight.step" for key in run.slots)


def test_the_momentum_of_sgd_is_a_state() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording(spec("optimizer_state")) as run:
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        buffer = optimizer.state[model.get_parameter("0.bias")]["momentum_buffer"].numpy().copy()
    np.testing.assert_array_equal(held(run, "0.bias.momentum_buffer", 0), buffer)


def test_buffers_are_as_the_forward_pass_found_them() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with recording(spec("buffer")) as run:
        for _ in range(3):
            expected.append(model.get_buffer("1.running_mean").clone())
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
    for step, mean in enumerate(expected):
        np.testing.assert_array_equal(held(run, "1.running_mean", step), mean.numpy())
    kinds = {key.role: info.kind for key, info in run.slots.items() if key.node == "1"}
    assert kinds == dict.fromkeys(["running_mean", "running_var", "num_batches_tracked"], "buffer")


def test_raw_gradients_are_those_before_clipping() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(spec("parameter_grad", "parameter_grad_raw")) as run:
        for _ in range(2):  # accumulated
            (100 * model(torch.randn(4, 3)).square().mean()).backward()
        left = gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        used = gradients(model)
        optimizer.step()
    for name in left:
        np.testing.assert_array_equal(held(run, name, 0, "grad:raw"), left[name].numpy())
        np.testing.assert_array_equal(held(run, name, 0, "grad"), used[name].numpy())
    assert {key.pass_ for key in run.slots if key.role == "weight"} == {"grad", "grad:raw"}


def test_a_raw_gradient_is_the_scaled_one_under_mixed_precision() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recording(spec("parameter_grad", "parameter_grad_raw")) as run:
        scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    raw, used = held(run, "0.weight", 0, "grad:raw"), held(run, "0.weight", 0, "grad")
    np.testing.assert_array_equal(raw, used * 1024)


def test_a_gradient_that_no_optimizer_used_is_recorded_as_left() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with recording(spec("parameter_grad", "parameter_grad_raw")) as run:
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    left = gradients(model)["0.weight"]
    np.testing.assert_array_equal(held(run, "0.weight", 0, "grad:raw"), left.numpy())
    assert not run.has("0", "weight", pass_="grad")


def test_nothing_stays_on_the_parameters() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    capture = ("parameter_grad_raw", "update", "optimizer_state", "input", "input_grad")
    with recording(spec(*capture)) as run:
        for _ in range(2):
            model(torch.randn(4, 3, requires_grad=True)).sum().backward()
            optimizer.step()
    assert run.faults == []
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_an_optimizer_that_steps_within_backward_is_followed() -> None:
    model = network()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    changes = []
    with recording(spec("update"), schedule={"first": 3}) as run:
        for _ in range(5):
            before = weight(model).detach().clone()
            nn.functional.mse_loss(model(torch.randn(5, 3)), torch.randn(5, 2)).backward()
            changes.append(weight(model).detach() - before)
        model.eval()
        assert torch._C._len_torch_function_stack() == 0
    assert run.faults == []
    for step in range(3):
        np.testing.assert_array_equal(held(run, "0.weight", step, "update"), changes[step].numpy())
    for handle in handles:
        handle.remove()


def test_two_models_of_one_class_are_reported() -> None:
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    with recording(spec("output", "parameter", "parameter_grad")) as run:
        models[1](models[0](torch.randn(4, 3))).sum().backward()
        optimizer.step()
    assert run.faults == []
    assert run.report["entries"]["all"]["fired"] == 2
