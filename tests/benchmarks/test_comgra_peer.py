"""The comparison is fair only if comgra records what we claim; its own files show this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.nets import Training, build_mlp, build_transformer
from benchmarks.tools.comgra_peer import COMGRA, SAMPLES, read_records

if not peers.make_importable():
    pytest.skip("comgra is not installed (python -m benchmarks does)", allow_module_level=True)

KPIS, NEURON = COMGRA
NODE = "node__layers.0.output"


@pytest.fixture
def training() -> Training:
    return build_mlp()


@pytest.fixture
def recorded(training: Training, tmp_path: Path) -> dict[tuple[Any, ...], float]:
    with KPIS.attach(training, tmp_path) as step:
        step()
    return read_records(tmp_path)


def first_layer(training: Training) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first layer's output and output gradient in the first step, using plain torch."""
    training.reset()
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        del module, args
        output.retain_grad()
        seen.append(output)

    with training.model.layers[0].register_forward_hook(keep):  # type: ignore[union-attr, index]
        training.step()
    assert seen[0].grad is not None
    return seen[0].detach().numpy(), seen[0].grad.numpy()


@pytest.mark.parametrize(("pass_", "which"), [("forward", 0), ("gradients", 1)])
def test_outputs_and_their_gradients_are_recorded(
    training: Training, recorded: dict[tuple[Any, ...], float], pass_: str, which: int
) -> None:
    x = first_layer(training)[which].astype(np.float64)
    per_sample = {"mean": x.mean(1), "abs_mean": abs(x).mean(1), "abs_max": abs(x).max(1)}
    per_sample["std"] = x.std(1, ddof=1)
    for item, values in per_sample.items():
        key = (pass_, 0, NODE, NODE.removeprefix("node__"))
        assert recorded[(*key, "batch_mean", item, None)] == pytest.approx(values.mean(), rel=1e-4)
        for i in range(SAMPLES):
            assert recorded[(*key, f"Sample {i}", item, None)] == pytest.approx(values[i], rel=1e-4)


def test_parameter_gradients_are_recorded(
    training: Training, recorded: dict[tuple[Any, ...], float]
) -> None:
    training.reset()
    training.step()
    for name, parameter in training.model.named_parameters():
        assert parameter.grad is not None
        key = ("gradients", -1, f"node__Mlp.{name}", f"Mlp.{name}", "has_no_batch_dimension")
        expected = float(parameter.grad.abs().max())
        assert recorded[(*key, "abs_max", None)] == pytest.approx(expected, rel=1e-5)


def test_every_named_output_and_parameter_is_counted(training: Training, tmp_path: Path) -> None:
    with KPIS.attach(training, tmp_path) as step:
        step()
    outputs, parameters, loss = 9, 8, 1
    assert KPIS.series(tmp_path) == 2 * (outputs + parameters + loss)


def test_the_neuron_type_adds_every_value_of_every_sample(
    training: Training, tmp_path: Path
) -> None:
    with NEURON.attach(training, tmp_path) as step:
        step()
    keys = read_records(tmp_path)
    of_node = [key for key in keys if key[2] == NODE and key[5] == "neuron"]
    width, aggregates = 64, 3
    assert len(of_node) == 2 * width * (SAMPLES + aggregates)


def test_what_would_take_minutes_per_step_is_refused() -> None:
    transformer = build_transformer()
    assert KPIS.refuses(transformer) is None
    assert "million values" in (NEURON.refuses(transformer) or "")


def test_comgra_itself_does_not_disturb_the_training(training: Training, tmp_path: Path) -> None:
    plain = [training.step().item() for _ in range(3)]
    training.reset()
    with KPIS.attach(training, tmp_path) as step:
        assert [step().item() for _ in range(3)] == plain
