"""Rules about time on hosts and devices: what they report, and what they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comgra_decl.hooks.graph import telling
from comgra_decl.records import PROGRAM, TELLING
from comgra_decl.rules import Rule
from comgra_decl.rules.resources.devices import (
    HostDeviceCopies,
    IdleDevice,
    SmallKernels,
    SynchronisingCall,
)
from comgra_decl.rules.resources.step_time import StepTimeJump
from tests.rules.programs import findings, train, train_around
from tests.rules.tape import Tape

TO_HOST = "Memcpy DtoH (Device -> Pageable)"
TO_DEVICE = "Memcpy HtoD (Pageable -> Device)"
READ = "aten::_local_scalar_dense"
STEPS = 4


def count(name: str, per_step: int, node: str = PROGRAM) -> dict[str, Any]:
    return {"node": node, "pass": "forward", "name": name, "count": per_step * STEPS}


def profile(
    *counts: dict[str, Any], busy: float = 0.9, kernels: int = 500, median: float = 40.0
) -> dict[str, Any]:
    step = {"data": 10.0, "forward": 50.0, "backward": 20.0, "optimizer": 15.0, "other": 5.0,
            "total": 100.0, "busy": 100.0 * busy}  # fmt: skip
    return {
        "rows": [],
        "steps": [{"step": 10 + i, "time": 0.0, **step} for i in range(STEPS)],
        "device": "a device",
        "copies": [each for each in counts if each["name"].startswith("Memcpy")],
        "waits": [each for each in counts if not each["name"].startswith("Memcpy")],
        "kernels": {"count": STEPS * kernels, "median": median, "total": 1.0},
    }


def messages(rule: Rule, content: dict[str, Any]) -> list[str]:
    found = Tape(documents={"profile": content}).findings(rule)
    assert all(finding.first_step == 10 for finding in found)
    return [finding.message for finding in found]


DEVICE_RULES = (HostDeviceCopies, IdleDevice, SmallKernels, SynchronisingCall)
HEALTHY = {
    "one batch and one loss per step": profile(
        count(TO_DEVICE, 2), count(TO_HOST, 1), count(READ, 1), count("cudaStreamSynchronize", 3)
    ),
    "few small kernels": profile(kernels=50, median=3.0),
    "many small kernels that keep the device busy": profile(kernels=900, median=3.0, busy=0.8),
    "no device": profile(count(READ, 20, "net"), kernels=0, busy=0.0),
}


@pytest.mark.parametrize("rule", DEVICE_RULES)
@pytest.mark.parametrize("content", HEALTHY.values(), ids=[*HEALTHY])
def test_a_healthy_profile_gives_no_finding(rule: type[Rule], content: dict[str, Any]) -> None:
    assert messages(rule(), content) == []


@pytest.mark.parametrize(
    ("rule", "content", "expected"),
    [
        (HostDeviceCopies, profile(count(TO_DEVICE, 2, "net.mask"), count(TO_HOST, 1)),
         "3 times, most often in `net.mask` (2 times)"),
        (HostDeviceCopies, profile(count(TO_DEVICE, 40)), "outside of modules (40 times)"),
        (SynchronisingCall, profile(count(READ, 3, "net"), count("aten::nonzero", 1, "net.a")),
         "4 times, most often in `net` (3 times)"),
        (SynchronisingCall, profile(count(READ, 8)), "outside of modules (8 times)"),
        (SmallKernels, profile(kernels=900, median=2.5, busy=0.2),
         "900 kernels with a median duration of 2.5 us, and the device works for only 20%"),
        (IdleDevice, profile(busy=0.1),
         "The host spends most of a step (50%) in the phase `forward`"),
    ],
)  # fmt: skip
def test_an_unhealthy_profile_is_reported(
    rule: type[Rule], content: dict[str, Any], expected: str
) -> None:
    (message,) = messages(rule(), content)
    assert expected in message


@pytest.mark.parametrize("rule", DEVICE_RULES)
def test_without_a_profile_the_reason_is_given(rule: type[Rule]) -> None:
    tape = Tape()
    assert [entry.reason for entry in tape.play(rule()).unchecked()] == [
        "the run has no profile; name steps in the spec: `profile: {steps: [10, 13]}`"
    ]


# -- calls that wait ---------------------------------------------------------------------------


def branching(x: torch.Tensor) -> torch.Tensor:
    """Reads two numbers of a tensor."""
    scale = x.mean().item()
    if x.sum() > 1e9:
        x = -x
    return x * (1.0 if scale < 1e9 else 2.0)


def test_calls_that_wait_for_a_device_are_named_with_their_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host stands in for a device."""
    monkeypatch.setattr(telling, "_HOSTS", ())
    (found,) = findings(SynchronisingCall(), lambda: train_around(branching, 4))
    assert found.place is not None
    assert found.place.node.startswith("branching (test_resources.py:")
    # the first step calls the model twice
    assert "makes the host wait for the device 2 times in each step" in found.message
    assert found.also == 1  # the comparison in the `if`


def test_on_the_host_nobody_waits() -> None:
    assert findings(SynchronisingCall(), lambda: train_around(branching, 4)) == []


def test_losses_that_are_read_after_the_backward_pass_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telling, "_HOSTS", ())
    model = nn.Linear(3, 1)
    assert (
        findings(SynchronisingCall(), lambda: train(model, lambda net: net(torch.ones(6, 3)).sum()))
        == []
    )


def test_the_line_that_waits_most_often_is_reported() -> None:
    tape = Tape()
    facts = [
        {"kind": "waits", "function": name, "device": "cuda", "where": where, "count": times}
        for name, where, times in (("item", "a (x.py:1)", 2), ("nonzero", "b (x.py:9)", 5))
    ]
    tape.record({}, facts={TELLING: facts})
    (found,) = tape.findings(SynchronisingCall())
    assert found.message == (
        "`nonzero` in b (x.py:9) makes the host wait for the device 5 times in each step."
    )


# -- the time of steps -------------------------------------------------------------------------


def timed(seconds: Any, **phases: Any) -> list[Any]:
    """Return the findings about steps that take this long."""
    tape = Tape()
    for name, values in {"step": seconds, **phases}.items():
        tape.numbers += [
            (f"auto:time/{name}", "train", 10 * step, float(v)) for step, v in enumerate(values)
        ]
    return tape.findings(StepTimeJump())


def test_a_jump_is_reported_with_its_step_and_its_phase() -> None:
    random = np.random.default_rng(0)
    level = np.where(np.arange(60) < 25, 0.010, 0.030)
    noise = random.uniform(0.9, 1.1, 60)
    data = np.where(np.arange(60) < 25, 0.001, 0.021)
    (found,) = timed(level * noise, data=data * noise, forward=np.full(60, 0.004))
    assert found.first_step == 250
    assert found.message.startswith("From step 250 on, a step takes ")
    assert found.message.endswith("Most of the increase is in preparing data.")
    assert found.evidence["to_ms"] == pytest.approx(30, rel=0.1)


@pytest.mark.parametrize(
    "seconds",
    [
        np.full(60, 0.01),
        np.where(np.arange(60) % 20 == 0, 0.2, 0.01),  # single slow steps, such as checkpoints
        np.where((np.arange(60) >= 30) & (np.arange(60) < 34), 0.05, 0.01),  # for a short time
        np.linspace(0.01, 0.03, 60),  # a slow increase
        np.where(np.arange(60) < 3, 0.2, 0.01),  # the first steps
        np.where(np.arange(60) < 30, 0.0001, 0.001),  # too small to matter
        np.random.default_rng(1).lognormal(-4, 0.6, 200),  # a noisy machine
    ],
    ids=["constant", "single", "short", "slope", "start", "tiny", "noise"],
)  # fmt: skip
def test_times_that_do_not_stay_higher_are_left_alone(seconds: Any) -> None:
    assert timed(seconds) == []
