"""Events of the profiler are attributed to the module call or autograd node that was running."""

from __future__ import annotations

import pytest

from comgra_decl.hooks.measuring.attribution import (
    BACKWARD,
    CALL,
    END,
    OPTIMIZER,
    STEP,
    STILL,
    Attribution,
    Event,
    attribute,
)
from comgra_decl.records import PROGRAM

NAMES = ["net", "net.a", "net.b"]
ENGINE = "autograd::engine::evaluate_function: "
DEVICE_THREAD = 7


def step(*inside: Event, start: float = 0.0, end: float = 100.0) -> list[Event]:
    return [Event(STEP, start, start), *inside, Event(END, end, end)]


def forward(thread: int = 1) -> list[Event]:
    """Calls of a model and its two parts; b's operation calls another and creates a node."""
    return [
        Event(f"{CALL}0", 10, 50, thread),
        Event(f"{CALL}1", 12, 20, thread),
        Event("aten::mm", 13, 19, thread, sequence=5, kernels=(("gemm", 30.0),), bytes=64),
        Event(f"{CALL}2", 25, 45, thread),
        Event("aten::linear", 26, 40, thread, sequence=6),
        Event("aten::addmm", 28, 39, thread, sequence=6, kernels=(("gemm", 8.0), ("add", 2.0))),
        Event("aten::mean", 52, 55, thread, sequence=7),
    ]


def usage(found: Attribution, node: str, pass_: str, *names: str) -> list[float]:
    return [getattr(found.usage[node, pass_], name) for name in names]


@pytest.fixture(scope="module")
def found() -> Attribution:
    """A step whose backward pass runs in another thread, as on a device."""
    engine = [
        Event(f"{ENGINE}MeanBackward0", 61, 64, DEVICE_THREAD, 7, 1),
        Event(f"{ENGINE}AddmmBackward0", 65, 71, DEVICE_THREAD, 6, 1),
        Event("AddmmBackward0", 65, 70, DEVICE_THREAD, 6, 1),
        Event("aten::mm", 66, 70, DEVICE_THREAD, kernels=(("gemm", 4.0),), bytes=-8),
        Event(f"{ENGINE}torch::autograd::AccumulateGrad", 72, 75, DEVICE_THREAD),
        Event(f"{ENGINE}MmBackward0", 76, 79, DEVICE_THREAD, 5, 1),
    ]
    host = [
        *forward(),
        Event(BACKWARD, 60, 80, 1),
        Event(OPTIMIZER, 85, 85, 1),
        Event("Optimizer.step#SGD.step", 84, 92, 1),
        Event("aten::add_", 86, 90, 1, kernels=(("Memcpy DtoH (Device -> Pageable)", 1.0),)),
        Event("aten::_local_scalar_dense", 94, 96, 1, kernels=(("Memcpy DtoH", 0.5),)),
        Event("aten::_local_scalar_dense", 96, 97, 1),  # of a tensor on the CPU
    ]
    device = [
        Event("gemm", 20, 50, on_device=True),
        Event("gemm", 40, 60, on_device=True),  # overlaps the previous one
        Event("Optimizer.step#SGD.step", 0, 100, on_device=True),  # a range, not work
        Event("the program's range", 0, 100, on_device=True, is_range=True),
    ]
    events = step(*host, *engine, *device)
    for event in events:
        if event.name in (STEP, END):
            event.thread = 1
    return attribute(reversed(events), NAMES)


def test_host_time_belongs_to_the_innermost_call(found: Attribution) -> None:
    times = "host", "host_self"
    assert usage(found, "net", "forward", *times) == [40.0, 40.0 - 8.0 - 20.0]
    assert usage(found, "net.a", "forward", *times) == [8.0, 8.0]
    assert usage(found, "net.b", "forward", *times) == [20.0, 20.0]


def test_a_backward_node_belongs_to_the_module_that_created_it(found: Attribution) -> None:
    assert usage(found, "net.a", "backward", "host_self") == [3.0]
    # with the gradient that the engine accumulates next
    assert usage(found, "net.b", "backward", "host_self") == [6.0 + 3.0]
    assert usage(found, "net", "backward", "host", "host_self") == [12.0, 0.0]
    assert usage(found, PROGRAM, "backward", "host_self") == [3.0]  # the mean, and no waiting


def test_kernels_belong_to_what_launched_them(found: Attribution) -> None:
    device = "device", "device_self", "kernels"
    assert usage(found, "net.a", "forward", *device) == [30.0, 30.0, 1]
    assert usage(found, "net.b", "forward", *device) == [10.0, 10.0, 2]
    assert usage(found, "net", "forward", *device) == [40.0, 0.0, 3]
    assert usage(found, "net.b", "backward", *device) == [4.0, 4.0, 1]


def test_only_outermost_operations_and_all_bytes_are_counted(found: Attribution) -> None:
    counts = "operations", "bytes", "calls"
    assert usage(found, "net.b", "forward", *counts) == [1, 0, 1]
    assert usage(found, "net", "forward", *counts) == [2, 64, 1]
    assert usage(found, "net.b", "backward", *counts) == [1, -8, 0]


def test_the_phases_of_a_step_add_up(found: Attribution) -> None:
    (phases,) = found.steps
    assert phases == {
        "data": 10.0,
        "forward": 40.0 + 10.0,  # with the loss
        "backward": 20.0,
        "optimizer": 92.0 - 85.0,
        "other": 5.0 + 8.0,  # before the optimizer step, and after it
        "total": 100.0,
        "busy": 40.0,
    }


def test_copies_and_waits_are_counted_where_they_are_made(found: Attribution) -> None:
    name = "Memcpy DtoH (Device -> Pageable)"
    assert found.copies == {
        (PROGRAM, "optimizer", name): 1,
        (PROGRAM, "other", "Memcpy DtoH"): 1,
    }
    assert found.waits == {(PROGRAM, "other", "aten::_local_scalar_dense"): 1}
    assert found.kernel_times == [30.0, 20.0]


def test_a_range_of_the_program_is_no_operation_and_hides_none() -> None:
    events = step(
        Event(f"{CALL}1", 10, 40),
        Event("my::range", 12, 30, is_range=True),
        Event("aten::mm", 13, 19),
        Event("aten::relu", 20, 29),
    )
    found = attribute(events, NAMES)
    assert usage(found, "net.a", "forward", "operations") == [2]
    assert [span.event.name for span in found.spans] == [f"{CALL}1", "aten::mm", "aten::relu"]


def test_a_step_that_did_not_end_is_left_out() -> None:
    events = [*step(*forward(0)), Event(STEP, 200, 200), Event(f"{CALL}1", 210, 220)]
    found = attribute(events, NAMES)
    assert len(found.steps) == 1
    assert usage(found, "net.a", "forward", "calls") == [1]
    assert attribute([Event(STEP, 0, 0)], NAMES).steps == []


def test_calls_without_gradients_and_recomputations_have_their_own_passes() -> None:
    events = step(
        Event(f"{STILL}1", 10, 20),
        Event(f"{CALL}0", 30, 40),
        Event("CheckpointFunction", 31, 39, sequence=3),
        Event(BACKWARD, 50, 90),
        Event(f"{ENGINE}CheckpointFunctionBackward", 52, 88, 0, 3, 0),
        Event(f"{CALL}2", 55, 60),
    )
    found = attribute(events, NAMES)
    assert usage(found, "net.a", "no_grad", "host") == [10.0]
    assert usage(found, "net.b", "backward", "host", "calls") == [5.0, 1]
    assert ("net.b", "forward") not in found.usage


def test_the_same_operation_number_goes_to_the_last_operation_that_began() -> None:
    """Operations that create no node have the number of the next one that does."""
    events = step(
        Event(f"{CALL}1", 10, 20),
        Event("aten::empty", 12, 13, sequence=3),
        Event(f"{CALL}2", 30, 40),
        Event("aten::relu", 31, 39, sequence=3),
        Event(BACKWARD, 50, 60),
        Event(f"{ENGINE}ReluBackward0", 52, 58, 0, 3, 0),
    )
    found = attribute(events, NAMES)
    assert usage(found, "net.b", "backward", "host") == [6.0]
    assert ("net.a", "backward") not in found.usage


def test_data_of_a_second_forward_pass_and_an_unfinished_optimizer_range() -> None:
    events = step(
        Event(f"{CALL}0", 10, 20),
        Event(BACKWARD, 20, 30),
        Event(f"{CALL}0", 45, 50),  # after another batch was loaded
        Event(BACKWARD, 50, 60),
        Event(OPTIMIZER, 60, 60),
    )
    (phases,) = attribute(events, NAMES).steps
    assert phases["data"] == 10 + 15
    assert phases["forward"] == 15
    assert phases["backward"] == 20
    assert phases["optimizer"] == 40
    assert phases["other"] == 0
