"""What comgra cannot record is recorded here (L01 to L14)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import comgra_decl as comgra
from tests.replaced.made import ALL, EVERYTHING, Made, losses_of, mlp
from tests.support.traced import traced, train


def test_l01_feature_maps_and_attention_maps_are_recorded_whole(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        maps = net.conv(x).flatten(2).transpose(1, 2)
        return net.attention(maps, maps, maps, average_attn_weights=False)[1]

    net = Made(
        forward,
        conv=nn.Conv2d(1, 4, 3),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
    )
    run = traced(tmp_path, ALL, lambda: train(net, torch.randn(2, 1, 5, 5)))
    assert run.value("conv", 0).shape == (2, 4, 3, 3)
    assert run.slot("attention", role="output[1]").value(0).shape == (2, 2, 9, 9)


def test_l02_frozen_layers_stay_frozen(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    plain = losses_of(copy.deepcopy(model))
    traced(tmp_path, EVERYTHING, lambda: losses_of(model))
    assert not any(parameter.requires_grad for parameter in model[0].parameters())
    for name, value in model[0].state_dict().items():
        assert torch.equal(value, before[name])
    assert losses_of(copy.deepcopy(model)) != plain  # it did train


def test_l03_a_traced_training_is_the_untraced_one_bit_by_bit(tmp_path: Path) -> None:
    plain, seen = mlp(), mlp()
    expected, losses = losses_of(plain), []
    traced(tmp_path, EVERYTHING, lambda: losses.extend(losses_of(seen)))
    assert losses == expected
    for parameter, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_l04_gradients_of_an_input_used_at_every_step_do_not_pile_up(tmp_path: Path) -> None:
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    seen: list[np.ndarray[Any, Any]] = []

    def training() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = x.clone().requires_grad_()
            seen.append(torch.autograd.grad(net(hidden).square().sum(), hidden)[0].numpy())
            copied = x.requires_grad_()
            net(copied).square().sum().backward()
            optimizer.step()

    capture = {"all": {"select": "**", "capture": ["input", "input_grad"], "values": True}}
    run = traced(tmp_path, capture, training)
    for step in range(3):
        # the second call in the step is the one that is trained
        gradient = run.slot("Linear", role="input", of="grad", iteration=1).value(step)
        np.testing.assert_allclose(gradient, seen[step], rtol=1e-5)


def test_l05_no_gradient_is_not_a_zero_gradient(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.unused(x)
        return net.zeroed(x) * 0 + net.used(x)

    net = Made(forward, unused=nn.Linear(3, 1), zeroed=nn.Linear(3, 1), used=nn.Linear(3, 1))
    run = traced(tmp_path, EVERYTHING, lambda: train(net, torch.randn(2, 3)))
    assert run.slot("zeroed", role="weight", of="grad").series("abs_max")[0] == 0
    slots = run.slots
    assert slots[(slots.node == "unused") & (slots["pass"] == "grad")].empty


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_l06_whole_numbers_and_masks_are_recorded(tmp_path: Path, dtype: torch.dtype) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        kept = net.keep(x)
        return net.embed(kept.long()).sum(1)

    net = Made(forward, keep=nn.Identity(), embed=nn.Embedding(2, 3))
    tokens = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    run = traced(tmp_path, ALL, lambda: train(net, tokens))
    np.testing.assert_array_equal(run.value("keep", 0), tokens.numpy())
    assert run.series("keep", "mean")[0] == 0.75
    assert ("keep", "embed") in run.edges()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_l07_evaluation_without_autograd_is_recorded(tmp_path: Path, mode: Any) -> None:
    model = mlp().eval()

    def evaluation() -> None:
        with mode():
            model(torch.ones(3, 4))

    run = traced(tmp_path, ALL, evaluation)
    np.testing.assert_array_equal(run.value("3", 0), model(torch.ones(3, 4)).detach().numpy())


def test_l08_complex_tensors_are_recorded(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.same(torch.fft.fft(net.linear(x))).abs()

    net = Made(forward, linear=nn.Linear(3, 4), same=nn.Identity())
    run = traced(tmp_path, ALL, lambda: train(net, torch.randn(2, 3)))
    value = run.value("same", 0)
    assert value.dtype == np.complex64
    assert run.series("same", "abs_max")[0] == pytest.approx(np.abs(value).max(1).mean(), rel=1e-5)


def test_l09_half_precision_is_recorded_and_so_are_its_singular_values(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).to(torch.bfloat16)
    weight = model.weight.detach().float().numpy().copy()
    run = traced(
        tmp_path,
        EVERYTHING,
        lambda: train(model, torch.ones(2, 4, dtype=torch.bfloat16)),
        stats=["mean", "singular_value"],
    )
    largest = run.slot("Linear", role="weight").series("singular_value")[0]
    assert largest == pytest.approx(np.linalg.norm(weight, 2), rel=1e-2)


def test_l09_autocast_is_recorded(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.linear(x)

    run = traced(
        tmp_path, ALL, lambda: train(Made(forward, linear=nn.Linear(3, 2)), torch.ones(2, 3))
    )
    assert str(run.value("linear", 0).dtype) == "bfloat16"


def test_l10_one_number_per_sample_is_recorded(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.score(net.linear(x).sum(1))

    net = Made(forward, linear=nn.Linear(3, 2), score=nn.Identity())
    run = traced(tmp_path, ALL, lambda: train(net, torch.randn(4, 3)))
    assert run.value("score", 0).shape == (4,)
    assert run.slot("score").samples("mean")[3][0] == run.value("score", 0)[3]


def test_l11_a_scalar_that_is_no_loss_is_recorded(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = net.linear(x)
        comgra.node(hidden.norm(), "size")
        return hidden

    run = traced(
        tmp_path, ALL, lambda: train(Made(forward, linear=nn.Linear(3, 2)), torch.ones(2, 3))
    )
    expected = np.linalg.norm(run.value("linear", 0))
    assert run.series("size")[0] == pytest.approx(expected, rel=1e-6)


def test_l12_merged_and_smaller_batches_are_recorded(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.linear(x.flatten(0, 1)).view(*x.shape[:2], -1)

    net = Made(forward, linear=nn.Linear(3, 2))

    def training() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in (4, 3):
            net(torch.randn(batch, 5, 3)).sum().backward()
            optimizer.step()

    run = traced(tmp_path, ALL, training, samples={"count": 32})
    assert [run.value("linear", step).size for step in (0, 1)] == [40, 30]
    assert [run.value("Made", step).shape for step in (0, 1)] == [(4, 5, 2), (3, 5, 2)]
    assert run.records.batch_size.tolist() == [4, 3]


def test_l13_a_module_called_again_is_an_iteration_and_checkpoints_are_none(
    tmp_path: Path,
) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(net.linear, net.linear(x), use_reentrant=False)

    net, x = Made(forward, linear=nn.Linear(3, 3)), torch.randn(2, 3)
    run = traced(tmp_path, ALL, lambda: train(net, x))
    slots = run.slots[(run.slots.node == "linear") & (run.slots["pass"] == "forward")]
    assert slots.iteration.tolist() == [0, 1]


def test_l14_a_batch_of_one_has_no_spread(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: train(nn.Linear(3, 2), torch.ones(1, 3)))
    assert run.series("Linear", "mean", over_batch="std")[0] == 0
