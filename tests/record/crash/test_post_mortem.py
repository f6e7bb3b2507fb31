"""After an error: what the run reports, what the program keeps, and what remains unchanged."""

from __future__ import annotations

import asyncio
import gc
import inspect as another
import statistics
import sys
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.hooks.frames import variables
from comgra_decl.hooks.place import ProgramPlace
from comgra_decl.query import Run
from comgra_decl.record.crash.post_mortem import post_mortem
from comgra_decl.record.crash.tensors import describe
from comgra_decl.store.documents import check_document
from tests.ranks.launching import run_ranks

SPEC = {
    "nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}},
    "schedule": {"first": 2, "every": 1_000_000},
    "graph": False,
}


class Block(nn.Module):
    """Fails from the given call on."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4)
        self.calls, self.fails_at = 0, fails_at

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.relu(self.wide(x))
        if self.calls > self.fails_at:
            hidden = hidden[:, :6]
        return self.narrow(hidden)


class Net(nn.Module):
    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Block(fails_at)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(net: nn.Module, steps: int = 20, *, seen: Callable[[Tensor], Any] = id) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(0)
    for _ in range(steps):
        batch = torch.randn(5, 4)
        seen(batch)
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def failed(root: Path, program: Callable[[], Any], **spec: Any) -> tuple[Run, BaseException]:
    """Return the run of a program that raises, and the exception that reached the caller."""
    caught: list[BaseException] = []
    with pytest.raises(BaseException) as raised:  # noqa: PT011, SIM117  (any)
        with comgra.trace({**SPEC, **spec}, root=root, group="g", name="n"):
            program()
    caught.append(raised.value)
    return comgra.open_run(root / "g" / "n"), caught[0]


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Tensor]]:
    """A run that failed in a step that is not recorded, and the batches of its program."""
    batches: list[Tensor] = []
    torch.manual_seed(1)
    net = Net(fails_at=12)
    run, _ = failed(tmp_path_factory.mktemp("runs"), lambda: train(net, seen=batches.append))
    return run, batches


def test_the_run_names_step_module_and_place(unrecorded: tuple[Run, list[Tensor]]) -> None:
    run, _ = unrecorded
    assert run.state == "failed"
    found = run.document("post_mortem")
    assert found["error"]["type"] == "RuntimeError"
    assert (found["step"], found["recorded"], found["phase"]) == (12, False, "forward")
    assert found["module"] == "blocks.1.narrow"
    nodes = [(call["node"], call["class"], call["method"]) for call in found["calls"]]
    assert nodes == [
        ("Net", "Net", "forward"),
        ("blocks.1", "Block", "forward"),
        ("blocks.1.narrow", "Linear", "forward"),
    ]
    assert found["place"]["text"] == "return self.narrow(hidden)"
    assert found["place"]["function"] == "Block.forward"
    assert found["lesson"]["name"] == "matmul_shapes"
    assert [frame["function"] for frame in found["stack"]][-2:] == [
        "Block.forward",
        "Linear.forward",
    ]


def test_the_tensors_of_the_last_calls_are_described(
    unrecorded: tuple[Run, list[Tensor]],
) -> None:
    run, batches = unrecorded
    found = run.document("post_mortem")
    (given,) = found["calls"][0]["inputs"]
    last = batches[12].numpy().astype(np.float64)
    assert given["shape"] == [5, 4]
    assert (given["dtype"], given["device"], given["requires_grad"]) == ("float32", "cpu", False)
    expected = last.min(), last.max(), last.mean(), last.std(), 0
    names = ("min", "max", "mean", "std", "nonfinite")
    assert [given[name] for name in names] == pytest.approx(expected)
    assert found["calls"][2]["inputs"][0]["shape"] == [5, 6]
    assert [fact["name"] for fact in found["variables"]] == ["hidden", "x"]
    assert "batch" in [fact["name"] for fact in found["batch"]]
    assert [fact["name"] for fact in found["parameters"]] == [
        "blocks.1.narrow.weight",
        "blocks.1.narrow.bias",
    ]
    assert found["memory"]["host"] > 1 << 20


def test_the_calls_that_had_ended_are_named_with_their_outputs(
    unrecorded: tuple[Run, list[Tensor]],
) -> None:
    run, _ = unrecorded
    told = [
        (each["operation"].removesuffix("Backward0"), each["node"], each["after"])
        for each in run.document("post_mortem")["ended"]
    ]
    assert told == [
        ("Slice", None, "blocks.1.wide"),
        ("Relu", None, "blocks.1.wide"),
        ("Addmm", "blocks.1.wide", None),
        ("Addmm", "blocks.0", None),
    ]
    # the same training without tracing and without the failure
    torch.manual_seed(1)
    net: Any = Net(fails_at=100)
    outputs: list[list[Tensor]] = []
    net.blocks[0].register_forward_hook(lambda _m, _i, output: outputs.append([output]))
    net.blocks[1].narrow.register_forward_hook(lambda _m, i, _o: outputs[-1].append(i[0]))
    train(net, steps=13)
    first, hidden = (tensor.detach().numpy() for tensor in outputs[12])
    found = [each["output"] for each in run.document("post_mortem")["ended"]]
    assert found[2] is None  # the output of a linear layer before a ReLU is not kept
    for fact, expected in ((found[0], hidden[:, :6]), (found[1], hidden), (found[3], first)):
        assert fact["shape"] == [*expected.shape]
        numbers = expected.min(), expected.max(), expected.mean(), expected.std()
        assert [fact[name] for name in ("min", "max", "mean", "std")] == pytest.approx(numbers)
    assert run.ending is not None
    lines = dict(run.ending.parts)["Operations that had ended, the last ones first"]
    assert lines[0].startswith("Slice after blocks.1.wide, output: float32 [5, 6] on cpu")
    assert lines[2] == "Addmm of blocks.1.wide, output not kept"


def test_without_gradients_no_ended_operations_are_known(tmp_path: Path) -> None:
    net = Net(fails_at=-1)

    def program() -> None:
        with torch.no_grad():
            net(torch.ones(5, 4))

    run, _ = failed(tmp_path, program)
    assert run.document("post_mortem")["ended"] == []


def test_operations_before_a_failing_loss_are_named(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)

    def program() -> None:
        output = net(torch.ones(5, 4))
        torch.nn.functional.mse_loss(output.relu(), torch.ones(7, 3))

    run, _ = failed(tmp_path, program)
    last, first = run.document("post_mortem")["ended"]
    assert (last["operation"], last["after"]) == ("ReluBackward0", "Linear")
    assert (first["operation"], first["node"]) == ("AddmmBackward0", "Linear")
    assert last["output"]["shape"] == first["output"]["shape"] == [5, 3]


def test_the_reading_api_tells_it_in_words(unrecorded: tuple[Run, list[Tensor]]) -> None:
    run, _ = unrecorded
    ending = run.ending
    assert ending is not None
    assert ending.headline == (
        "the program failed at step 12, in the forward pass of blocks.1.narrow: RuntimeError: "
        "mat1 and mat2 shapes cannot be multiplied (5x6 and 8x4)"
    )
    parts = dict(ending.parts)
    assert parts["Recorded before it"] == [
        "steps 0, 1; the failing step was not due to be recorded"
    ]
    titles = [title for title, _ in ending.parts]
    assert titles.index("Inputs of the last calls") < titles.index("The batch")
    assert ending.content == run.document("post_mortem")


def test_a_message_of_several_lines_is_shown_whole(tmp_path: Path) -> None:
    def fail() -> None:
        train(Net(99), 2)
        raise RuntimeError(
            "Caught KeyError in a worker.\nOriginal Traceback:\nKeyError: 'patient_17'"
        )

    run, _ = failed(tmp_path, fail)
    assert run.ending is not None
    lines = dict(run.ending.parts)["The whole message"]
    assert "KeyError: 'patient_17'" in " ".join(lines)
    assert "patient_17" not in run.ending.headline


def test_a_program_that_ends_by_itself_or_exits_has_no_post_mortem(tmp_path: Path) -> None:
    with comgra.trace(SPEC, root=tmp_path, group="g", name="whole"):
        train(Net(99), 3)
    assert comgra.open_run(tmp_path / "g" / "whole").ending is None

    def leave() -> None:
        train(Net(99), 3)
        sys.exit(4)

    run, error = failed(tmp_path, leave)
    assert isinstance(error, SystemExit)
    assert run.document("post_mortem") is None


def test_an_interruption_names_where_the_program_was_and_reads_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on a device that does not respond could not be read."""

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("comgra_decl.record.crash.tensors.described", pytest.fail)
    run, _ = failed(tmp_path, lambda: train(Net(99), seen=interrupt))
    assert run.ending is not None
    assert run.ending.headline == "the program was interrupted at step 0, outside the model"
    assert not run.ending.failed
    content = run.document("post_mortem")
    assert content["place"]["function"].endswith(".interrupt")
    assert content["place"]["text"] == "raise KeyboardInterrupt"
    assert content["stack"]
    assert content["lesson"] is None
    assert run.damage == []


def test_an_interruption_in_a_module_names_the_module(tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(4, 4), Interrupted())
    run, _ = failed(tmp_path, lambda: model(torch.ones(2, 4)))
    assert run.ending is not None
    assert run.ending.headline == "the program was interrupted at step 0, in the forward pass of 1"
    assert [call["node"] for call in run.document("post_mortem")["calls"]] == ["Sequential", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", str(run.path)])
    assert ended.value.code == 0


# -- neutrality --------------------------------------------------------------------------------


def test_the_exception_passes_on_unchanged_and_keeps_nothing_alive(tmp_path: Path) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def program() -> None:
        train(Net(fails_at=4), seen=lambda batch: kept.append(weakref.ref(batch)))

    def plainly() -> BaseException:
        try:
            program()
        except RuntimeError as error:
            return error
        raise AssertionError

    def stack(error: BaseException) -> list[str]:
        frames = traceback.extract_tb(error.__traceback__)
        return [f.name for f in frames if f.filename == __file__]

    plain = plainly()
    own = stack(plain)
    _, error = failed(tmp_path, program)
    assert type(error) is type(plain)
    assert error.args == plain.args
    assert (error.__cause__, error.__context__, error.__notes__ if hasattr(error, "__notes__") else
            None) == (None, None, None)  # fmt: skip
    assert stack(error)[-3:] == own[-3:]

    gc.collect()
    assert kept[-1]() is not None  # held by the traceback, as without tracing
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    assert kept[-1]() is None  # nothing else holds it


def test_a_dict_of_variables_that_the_program_holds_is_unchanged(tmp_path: Path) -> None:
    held: dict[str, Any] = {}

    def program() -> None:
        net = Net(fails_at=0)
        held["locals"] = locals()
        held["copy"] = dict(held["locals"])
        batch = torch.ones(5, 4)
        net(batch)

    run, _ = failed(tmp_path, program)
    assert held["locals"] == held["copy"]
    assert run.document("post_mortem")["module"] == "blocks.1.narrow"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="each `exec` has a dict of its own")
def test_a_variable_made_by_exec_stays() -> None:
    """Before Python 3.13, only the dict of the frame's variables contains it."""

    def look() -> None:
        variables(sys._getframe(1), sorted)

    def function() -> object:
        exec("made = 3")
        look()
        return eval("made")

    assert function() == 3


class Evaluated:
    def eval(self) -> Evaluated:
        return self


def _frame_of(function: Callable[[], object]) -> Any:
    with pytest.raises(ZeroDivisionError) as raised:
        function()
    assert raised.tb.tb_next is not None
    return raised.tb.tb_next.tb_frame


def test_a_method_that_is_called_eval_hides_no_variables() -> None:
    def function() -> None:
        number, model = 3, Evaluated()
        model.eval()
        number //= 0

    assert variables(_frame_of(function), sorted) == ["model", "number"]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="reading them changes nothing")
def test_functions_that_give_access_to_the_variables_hide_them() -> None:
    import builtins

    def by_name() -> None:
        eval("1")
        1 / 0  # noqa: B018

    def by_module() -> None:
        builtins.locals()
        1 / 0  # noqa: B018

    look = locals

    def by_name_of_a_free_variable() -> None:
        look()
        1 / 0  # noqa: B018

    def by_frame() -> None:
        sys._getframe()
        1 / 0  # noqa: B018

    assert [variables(_frame_of(f), sorted) for f in (by_name, by_module, by_frame)] == [None] * 3
    assert variables(_frame_of(by_name_of_a_free_variable), sorted) == ["look"]  # as before


def test_only_the_stack_of_inspect_hides_variables() -> None:
    import inspect

    def of_torch() -> None:
        rows = torch.stack([torch.ones(2)])
        rows + 1 / 0

    def of_an_object() -> None:
        both = SimpleNamespace(stack=[])
        both.stack.append(1 / 0)

    def of_inspect() -> None:
        inspect.stack()
        1 / 0  # noqa: B018

    def under_another_name() -> None:
        another.stack()
        1 / 0  # noqa: B018

    assert variables(_frame_of(of_torch), sorted) == ["rows"]
    assert variables(_frame_of(of_an_object), sorted) == ["both"]
    for function in (of_inspect, under_another_name):
        assert variables(_frame_of(function), sorted) is None


def test_reading_variables_leaves_no_copies_in_a_frame() -> None:
    references: list[weakref.ref[Tensor]] = []

    def function() -> None:
        tensor = torch.ones(3)
        references.append(weakref.ref(tensor))
        raise ValueError

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        function()
    frame = raised.tb.tb_next.tb_frame if raised.tb.tb_next is not None else None
    assert frame is not None
    assert variables(frame, sorted) == ["references", "tensor"]
    frame.clear()
    assert references[0]() is None


def test_random_numbers_and_modes_are_untouched(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(3)
        Net(fails_at=0)(torch.ones(5, 4))

    with pytest.raises(RuntimeError):
        program()
    before = torch.get_rng_state()
    failed(tmp_path, program)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


# -- phases ------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        out = self.second(hidden)
        hidden += 1
        return out


def test_an_overwritten_tensor_names_the_modules_that_needed_it(tmp_path: Path) -> None:
    def program() -> None:
        model = InPlace()
        model(torch.ones(3, 4)).sum().backward()

    run, _ = failed(tmp_path, program)
    found = run.document("post_mortem")
    assert found["phase"] == "backward"
    assert found["lesson"]["name"] == "overwritten_before_backward"
    needs = {(n["operation"], n["value"], n["module"], n["after"]) for n in found["needs"]}
    assert needs == {
        ("AddmmBackward0", "mat1", "second", None),
        ("SigmoidBackward0", "result", None, "first"),
    }
    assert found["module"] == "second"
    assert [fact["name"] for fact in found["parameters"]] == ["second.bias", "second.weight"]


def test_unpacking_hooks_of_the_program_are_not_called(tmp_path: Path) -> None:
    calls: list[str] = []

    def unpack(tensor: Tensor) -> Tensor:
        calls.append("unpacked")
        return tensor

    def program() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            out = InPlace()(torch.ones(3, 4))
        (out.sum() * torch.ones(2)).backward()  # not a scalar

    with pytest.raises(RuntimeError):
        program()
    before = [*calls]
    run, _ = failed(tmp_path, program)
    assert calls == before * 2
    assert run.document("post_mortem")["lesson"]["name"] == "loss_not_scalar"


def test_an_optimizer_whose_states_no_longer_fit_names_the_parameter(tmp_path: Path) -> None:
    inner = nn.Linear(4, 4), nn.Linear(4, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(*inner))
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    def program() -> None:
        step()
        inner[0].weight.data, inner[0].bias.data = torch.ones(6, 4), torch.zeros(6)
        inner[1].weight.data = torch.ones(1, 6)
        step()

    run, _ = failed(tmp_path, program)
    found = run.document("post_mortem")
    assert (found["phase"], found["module"]) == ("optimizer", "1.0")
    shapes = {each["name"]: each["shape"] for each in found["parameters"]}
    assert shapes["1.0.weight"] == [6, 4]
    assert shapes["1.0.weight (exp_avg)"] == [4, 4]
    assert "1.0.weight (gradient)" not in shapes, "it has the new shape"
    assert not any(name.startswith("0.") for name in shapes)


def test_an_error_whose_message_cannot_be_read_has_a_post_mortem(tmp_path: Path) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SilentError

    run, _ = failed(tmp_path, lambda: Failing()(torch.ones(2)))
    found = run.document("post_mortem")["error"]
    assert found["type"] == "SilentError"
    assert found["message"] == "(its message cannot be read: ValueError in __str__)"
    assert run.ending is not None
    assert run.ending.failed


def test_an_error_in_pythons_own_modules_is_placed_where_the_program_called_them(
    tmp_path: Path,
) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nothing: list[float] = []
            return x * statistics.mean(nothing)

    run, _ = failed(tmp_path, lambda: Failing()(torch.ones(2)))
    place = run.document("post_mortem")["place"]
    assert place["text"] == "return x * statistics.mean(nothing)"
    assert place["file"].endswith("test_post_mortem.py")


def test_what_is_missing_of_a_long_message_is_counted(tmp_path: Path) -> None:
    def program() -> None:
        nn.Linear(2, 1)(torch.ones(3, 2))
        raise ValueError("x" * 3999 + "\n" + "line\n" * 1000)

    run, _ = failed(tmp_path, program)
    message = run.document("post_mortem")["error"]["message"]
    assert message.endswith("... 5,000 more characters, 1,000 lines ...")


def test_errors_in_losses_optimizers_and_data_are_told_apart(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)

    def loss() -> None:
        nn.functional.cross_entropy(net(torch.ones(2, 4)), torch.tensor([0, 3]))

    def step() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.param_groups[0]["lr"] = "fast"
        optimizer.step()

    uneven: Any = [torch.ones(2), torch.ones(3)]

    def data() -> None:
        next(iter(torch.utils.data.DataLoader(uneven, batch_size=2)))

    phases: dict[str, str] = {}
    for number, program in enumerate((loss, step, data)):
        run, _ = failed(tmp_path / str(number), program)
        phases[program.__name__] = run.document("post_mortem")["phase"]
    assert phases == {"loss": "loss", "step": "optimizer", "data": "data"}


def test_an_error_in_a_hook_of_the_program_is_placed_in_its_module(tmp_path: Path) -> None:
    def program() -> None:
        net = Net(99)
        net.blocks[0].register_forward_hook(lambda *_: {"a": 1}["missing"])
        train(net)

    run, _ = failed(tmp_path, program)
    found = run.document("post_mortem")
    assert (found["error"]["type"], found["module"]) == ("KeyError", "blocks.0")
    assert found["lesson"] is None


class Rephrasing(nn.Sequential):
    """Raises another error from that of a part, or tries a second part."""

    def __init__(self, *parts: nn.Module, then: Callable[[Tensor], Any] | None) -> None:
        super().__init__(*parts)
        self.then = then

    def forward(self, x: Tensor) -> Any:
        try:
            return super().forward(x)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self.then is not None:
                return self.then(x)
            raise ValueError("the stack failed") from error


def test_an_error_raised_from_another_one_leads_to_the_module_that_failed(tmp_path: Path) -> None:
    inner = Rephrasing(nn.Tanh(), nn.Sequential(nn.Linear(12, 5)), then=None)

    def program() -> None:
        nn.Sequential(nn.Flatten(), inner)(torch.ones(4, 3, 5))

    run, error = failed(tmp_path, program)
    found = run.document("post_mortem")
    assert found["error"] == {"type": "ValueError", "message": "the stack failed"}
    assert [call["node"] for call in found["calls"]] == ["Sequential", "1", "1.1", "1.1.0"]
    assert found["module"] == "1.1.0"
    assert found["place"]["text"].startswith("return super().forward(x)")
    assert [fact["name"] for fact in found["parameters"]] == ["1.1.0.weight", "1.1.0.bias"]
    assert run.ending is not None
    assert "in the forward pass of 1.1.0: ValueError: the stack failed" in run.ending.headline
    del error


def test_an_error_while_handling_another_one_stays_where_it_was_raised(tmp_path: Path) -> None:
    second = nn.Linear(9, 1)
    model = Rephrasing(nn.Linear(12, 5), then=second)
    run, _ = failed(tmp_path, lambda: model(torch.ones(4, 15)))
    found = run.document("post_mortem")
    assert [call["class"] for call in found["calls"]] == ["Rephrasing", "Linear"]
    assert found["module"] == "then"


class Shaky(nn.Module):
    """Fails if its input has another number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def parse(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise KeyError("no number")  # noqa: B904


def grouped(model: nn.Module) -> None:
    """Raise a group that contains a group, a failed module, causes and notes."""
    errors: list[Exception] = []
    for attempt in (lambda: parse("seven"), lambda: model(torch.ones(3, 5))):
        try:
            attempt()
        except Exception as error:  # noqa: BLE001
            error.add_note(f"attempt {len(errors)}")
            errors.append(error)
    inner = ExceptionGroup("two attempts", errors)
    outer = ExceptionGroup("all", [TypeError("first"), inner])
    outer.add_note("shard 3\nof 8")
    raise outer


def test_the_errors_in_a_group_are_listed_and_lead_to_the_module_that_failed(
    tmp_path: Path,
) -> None:
    run, _ = failed(tmp_path, lambda: grouped(nn.Sequential(nn.Tanh(), Shaky())))
    found = run.document("post_mortem")
    assert [(each["number"], each["type"]) for each in found["members"]] == [
        ("1", "TypeError"),
        ("2", "ExceptionGroup"),
        ("2.1", "KeyError"),
        ("2.2", "RuntimeError"),
    ]
    assert found["module"] == "1.layer"
    assert found["lesson"]["name"] == "matmul_shapes"
    assert run.ending is not None
    assert run.ending.headline.endswith("ExceptionGroup: all (2 sub-exceptions)")
    parts = dict(run.ending.parts)
    assert parts["Notes"] == ["shard 3", "of 8"]
    lines = parts["Errors in the group"]
    assert lines[:2] == [
        "1. TypeError: first",
        "2. ExceptionGroup: two attempts (2 sub-exceptions)",
    ]
    assert lines[2].startswith("2.1. KeyError: 'no number', ")
    assert lines[2].endswith(" in parse")
    assert lines[3:5] == [
        "   while handling ValueError: invalid literal for int() with base 10: 'seven'",
        "   note: attempt 0",
    ]
    assert lines[5].startswith("2.2. RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert lines[5].endswith(" in Shaky.forward")
    assert lines[6:] == ["   note: attempt 1"]


def test_a_failed_task_of_a_task_group_is_explained(tmp_path: Path) -> None:
    async def step(model: nn.Module) -> None:
        await asyncio.sleep(0)
        model(torch.ones(3, 5))

    async def train(model: nn.Module) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(step(model))

    def program() -> None:  # in a thread, because Playwright's loop may run in this one
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: asyncio.run(train(Shaky()))).result()

    run, _ = failed(tmp_path, program)
    found = run.document("post_mortem")
    assert found["module"] == "layer"
    assert [each["type"] for each in found["members"]] == ["RuntimeError"]
    assert found["place"]["text"] == "return self.layer(x)"


def test_causes_contexts_and_their_notes_are_told_apart(tmp_path: Path) -> None:
    def program() -> None:
        nn.Linear(2, 1)(torch.ones(3, 2))
        try:
            try:
                parse("seven")
            except KeyError as error:
                error.add_note("in line 4")
                raise OSError("unreadable") from error
        except OSError:
            raise ValueError("no data")  # noqa: B904

    run, _ = failed(tmp_path, program)
    assert run.ending is not None
    assert dict(run.ending.parts)["Where"][2:] == [
        "while handling OSError: unreadable",
        "caused by KeyError: 'no number'",
        "  note: in line 4",
        "while handling ValueError: invalid literal for int() with base 10: 'seven'",
    ]


def test_of_many_errors_in_a_group_the_first_are_listed(tmp_path: Path) -> None:
    def program() -> None:
        nn.Linear(2, 1)(torch.ones(3, 2))
        raise ExceptionGroup("many", [ValueError(number) for number in range(100)])

    run, _ = failed(tmp_path, program)
    assert run.ending is not None
    lines = dict(run.ending.parts)["Errors in the group"]
    assert lines[-2:] == ["24. ValueError: 23", "and more"]
    assert len(lines) == 25


# -- the ring ----------------------------------------------------------------------------------


def test_the_ring_is_kept_when_the_program_fails(tmp_path: Path) -> None:
    keep = {"ring": 5, "when": ["nonfinite"]}
    schedule = {"first": 1, "every": 1_000_000}
    run, _ = failed(tmp_path, lambda: train(Net(fails_at=12)), keep=keep, schedule=schedule)
    assert list(run.steps) == [0, 7, 8, 9, 10, 11]
    reasons = run.records.set_index("step")["kept"]
    assert reasons[11] == "before the end: the program failed"


# -- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4),
        torch.ones(3, 4, dtype=torch.bfloat16),
        torch.tensor([1.0, float("nan"), float("inf"), -3.0]),
        torch.randn(50, 40).t()[::2],
        torch.tensor([True, False, True]),
        torch.tensor([3 + 4j, 0j]),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_statistics_equal_those_of_numpy(tensor: Tensor) -> None:
    fact = describe("x", tensor)
    values = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.to(torch.float64)
    array = values.numpy()
    finite = array[np.isfinite(array)]
    assert fact["shape"] == list(tensor.shape)
    assert fact["nonfinite"] == array.size - finite.size
    expected = finite.min(), finite.max(), finite.mean(), finite.std()
    assert [fact[n] for n in ("min", "max", "mean", "std")] == pytest.approx(expected)
    assert "read" not in fact


def test_of_a_large_tensor_a_sample_is_read_and_said_so() -> None:
    tensor = torch.arange(3_000_000, dtype=torch.float32)
    fact = describe("x", tensor)
    assert fact["read"] == len(range(0, 3_000_000, 3))
    assert fact["max"] == 2_999_997


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.empty(0, 4),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["meta", "sparse", "empty", "nested"],
)
def test_a_tensor_that_cannot_be_read_has_no_statistics(tensor: Tensor) -> None:
    fact = describe("x", tensor)
    assert fact["dtype"] == "float32"
    assert "mean" not in fact


def test_parameters_that_ddp_lists_by_number_are_named(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            used: Tensor = self.used(x)
            return used

    distributed = torch.distributed
    meeting = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Branches())
        model(torch.ones(3, 4)).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            model(torch.ones(3, 4))
    finally:
        distributed.destroy_process_group()
    found = post_mortem(raised.value, ProgramPlace(1, False, lambda _: None, list))
    assert found["lesson"]["name"] == "unused_parameters"
    assert found["unused"] == ["unused.weight", "unused.bias"]


BRANCHES = """
import torch
from torch import distributed, nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)

torch.set_num_threads(1)
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Branches())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_each_rank_names_the_parameters_that_got_no_gradient(tmp_path: Path) -> None:
    script = tmp_path / "branches.py"
    script.write_text(BRANCHES)
    command = "-m", "comgra_decl", "--spec", "debug", "run.root=runs", str(script)
    for code, text in run_ranks(*command, cwd=tmp_path):
        assert code == 1
        assert "Expected to have finished reduction in the prior iteration" in text
    run = comgra.open_run(tmp_path / "runs")
    assert run.ending is not None
    assert "the program failed at step 1" in run.ending.headline
    for rank in (0, 1):
        found = run.rank(rank).document("post_mortem")
        assert found["lesson"]["name"] == "unused_parameters"
        assert found["unused"] == ["unused.weight", "unused.bias"]


@pytest.mark.parametrize(
    "change",
    [{"step": "3"}, {"calls": [{"node": "x"}]}, {"lesson": {"name": "x"}}, {"stack": [3]},
     {"parameters": [{"name": "w", "shape": ["4"]}]}, {"members": [{"number": 1}]},
     {"memory": {"host": "much"}}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_forged_post_mortem_is_rejected(
    unrecorded: tuple[Run, list[Tensor]], change: dict[str, Any]
) -> None:
    content = unrecorded[0].document("post_mortem")
    assert check_document("post_mortem", content) == content
    with pytest.raises(ValueError, match="post_mortem"):
        check_document("post_mortem", content | change)
