"""What cannot be recorded is reported, with a workaround, in the log and in the run's report."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.cli.main import main
from comgra_decl.query.report import remarks
from comgra_decl.records import RawStep
from comgra_decl.viewer.model.about import about
from comgra_decl.viewer.model.runview import RunView
from tests.support.recording import EVERYTHING, Recording, recording


class Direct(nn.Module):
    """Uses its layers without calling all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(3, 3)
        self.direct = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.direct.forward(self.called(x))


def test_a_forward_that_is_called_directly_is_told_from_a_module_that_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Direct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    said = run.report["warnings"]
    (direct,) = [sentence for sentence in said if "have gradients" in sentence]
    assert ": direct (1 in all)" in direct
    assert "call module(x) to record" in direct
    (unused,) = [sentence for sentence in said if "its weights are used directly" in sentence]
    assert ": unused (1 in all)" in unused
    assert direct in caplog.text
    assert run.report["never_called"] == ["direct", "unused"]


def test_a_layer_of_torch_whose_forward_is_called_is_recorded_from_the_second_record_on() -> None:
    model = Direct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for _ in range(4):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    assert [run.has("direct", pass_="grad", step=k) for k in range(4)] == [False, True, True, True]
    assert not any(key.iteration for key in run.slots)
    assert run.report["never_called"] == ["unused"]


def test_backward_without_a_step_names_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).sum().backward()
    assert "comgra.step()" in caplog.text
    assert any("comgra.step()" in sentence for sentence in run.report["warnings"])


class Scripted(nn.Module):
    """Has a scripted part, of which only the outermost module is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(x)
        return result


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_silence_of_scripted_modules_is_explained() -> None:
    model = Scripted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.has("outer")
    (said,) = [sentence for sentence in run.report["warnings"] if "TorchScript" in sentence]
    assert "outer.0, outer.1 (2 in all)" in said
    assert "train the module without scripting it" in said


def test_the_command_line_and_the_viewer_say_each_sentence_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = {"select": "**", "capture": ["output", "parameter"]}
    spec = {"nodes": {"all": everything, "typo": {"select": "callde"}}, "schedule": {"first": 9}}
    model = Direct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace(spec, root=tmp_path, group="g") as session:
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    said = remarks(run.report)
    for part in ("call module(x) to record", "its weights are used directly", "callde"):
        assert sum(part in sentence for sentence in said) == 1, said
    assert about(RunView(run)).remarks == said
    with pytest.raises(SystemExit) as done:
        main(["show", str(session.path)])
    assert not done.value.code
    shown = " ".join(capsys.readouterr().out.split())
    for sentence in said:
        assert shown.count(" ".join(sentence.split())[:60]) == 1


def test_a_cuda_graph_is_not_read_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step stands for the capture: the messages are those for CUDA."""
    model = Direct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for step in range(3):
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            monkeypatch.setattr(
                torch.cuda, "is_current_stream_capturing", lambda step=step: step == 1
            )
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    assert [step.info.step for step in run.steps if "called" in names(run, step)] == [0, 2]
    (said,) = [sentence for sentence in run.report["warnings"] if "CUDA graph" in sentence]
    assert "train without the graph" in said


class Eager(torch.cuda.graph):
    """Imitates a CUDA graph capture without CUDA: it computes immediately, and only then."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `torch.cuda.make_graphed_callables` work on the host: replays compute nothing."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph", Eager)
    fake = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: fake)


@pytest.mark.usefixtures("no_cuda")
def test_a_module_that_was_made_a_cuda_graph_is_said_to_show_nothing_of_its_inside() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    model = nn.Sequential(net, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        torch.cuda.make_graphed_callables(net, (torch.randn(4, 3),))
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.faults == []
    said = run.report["warnings"]
    (graphed,) = [
        sentence for sentence in said if "made by torch.cuda.make_graphed_callables" in sentence
    ]
    assert "0.0, 0.1 (2 in all)" in graphed
    assert "train without the graph" in graphed
    assert any("a CUDA graph is being captured" in sentence for sentence in said)
    assert run.has("0"), "what it returns is recorded"


def test_a_graph_that_is_captured_between_recorded_steps_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.graph, "__enter__", lambda _: None)
    before = vars(torch.cuda.graph)["__enter__"]
    model = Direct()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {**EVERYTHING, "schedule": {"first": 1, "every": 100}}
    with caplog.at_level(logging.WARNING, "comgra_decl"), recording(spec) as run:
        for step in range(4):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            if step == 2:
                torch.cuda.graph.__enter__(Eager())
    assert [step.info.step for step in run.steps] == [0]
    assert "a CUDA graph is being captured" in caplog.text
    assert vars(torch.cuda.graph)["__enter__"] is before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "cudagraphs"}, True),
        ({}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"backend": "eager"}, False),
    ],
)
def test_compiling_to_cuda_graphs_is_said(arguments: dict[str, Any], said: bool) -> None:
    torch.compiler.reset()
    model = Direct()
    compiled = torch.compile(model, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        compiled(torch.randn(4, 3)).sum().backward()  # recorded, so nothing is compiled
        optimizer.step()
    torch.compiler.reset()
    assert any("without CUDA graphs" in text for text in run.report["warnings"]) == said
    assert run.has("called")


def names(run: Recording, step: RawStep) -> set[str]:
    """Returns the nodes of one record."""
    return run.nodes(run.steps.index(step))
