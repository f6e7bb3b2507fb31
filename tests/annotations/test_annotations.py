"""Outside a session, annotations do nothing and do not disturb tools that process programs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.annotations import Mark, hub
from comgra_decl.errors import AnnotationError, ComgraError
from tests.annotations.programs import Net, Whole, double


class Heard:
    """A listener that stores what it receives."""

    def __init__(self) -> None:
        self.words: list[tuple[Any, ...]] = []

    def node(self, value: Any, name: str, role: str | None, kind: str | None) -> None:
        self.words.append(("node", value, name, role, kind))

    def connect(self, source: Any, sink: Any) -> None:
        self.words.append(("connect", source, sink))

    def tag(self, *names: str) -> None:
        self.words.append(("tag", *names))

    def note(self, text: str) -> None:
        self.words.append(("note", text))

    def kpi(self, name: str, value: Any) -> None:
        self.words.append(("kpi", name, value))

    def show(self, name: str, kind: str, value: Any) -> None:
        self.words.append(("show", name, kind, value))

    def step(self) -> None:
        self.words.append(("step",))


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    hub.listen(listener)
    yield listener
    hub.unlisten(listener)


@pytest.fixture
def recording(heard: Heard) -> Heard:
    hub.set_recording(heard, True)
    return heard


def test_outside_a_session_nothing_happens() -> None:
    x = torch.ones(2)
    assert comgra.node(x, "x") is x
    structure = {"a": [x, (x, None)]}
    assert comgra.node(structure, "all", role="here", kind="input") is structure
    assert double(x).tolist() == [2, 2]
    assert Net()(torch.ones(1, 3)).shape == (1, 3)
    comgra.connect(x, structure)
    comgra.tag("long", "wide")
    comgra.note("hello")
    comgra.kpi("number", 1.5)
    comgra.kpi("tensor", x.sum())
    comgra.image(torch.ones(2, 2), "white")
    comgra.text("hello", "greeting")
    comgra.step()


def test_importing_the_words_imports_nothing_else() -> None:
    code = (
        "import sys, comgra_decl as comgra\n"
        "comgra.node([1], 'x'); comgra.kpi('k', 1); comgra.note('n'); comgra.tag('t')\n"
        "print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_recorded_step_hears_of_every_named_value(recording: Heard) -> None:
    x = torch.ones(1, 3)
    net = Net()
    result = net(x)
    names = [(word[2], word[3]) for word in recording.words]
    assert names == [("hidden", None), ("doubled", None), ("squashed", "tanh")]
    assert recording.words[-1][1] is result
    assert comgra.node(x, "x", role="r", kind="target") is x
    assert recording.words[-1][1:] == (x, "x", "r", "target")


def test_names_are_heard_only_while_recording(heard: Heard) -> None:
    comgra.node(torch.ones(1), "x")
    comgra.connect(1, 2)
    assert heard.words == []
    comgra.tag("a", "b")
    comgra.note("text")
    comgra.kpi("k", 0.5)
    comgra.step()
    assert heard.words == [("tag", "a", "b"), ("note", "text"), ("kpi", "k", 0.5), ("step",)]


def test_the_last_listener_is_the_one(heard: Heard) -> None:
    other = Heard()
    hub.listen(other)
    hub.set_recording(heard, True)
    assert not hub.recording, "one who listens no more has no say"
    hub.unlisten(heard)
    comgra.note("for the other")
    hub.unlisten(other)
    comgra.note("for nobody")
    assert (heard.words, other.words) == ([], [("note", "for the other")])


def test_a_forward_is_only_marked() -> None:
    assert Net.forward.__comgra_node__ == Mark("net", None, "computed")  # type: ignore[attr-defined]
    assert Whole.forward.__comgra_node__ == Mark("whole", None, None)  # type: ignore[attr-defined]
    assert Net.forward.__qualname__ == "Net.forward"
    assert not hasattr(Net.forward, "__wrapped__")


def test_a_function_keeps_its_name_and_words() -> None:
    assert (double.__name__, double.__doc__) == ("double", "Doubles its input.")
    assert double.__module__ == "tests.annotations.programs"


def test_static_and_class_methods_can_be_named(recording: Heard) -> None:
    class Kit:
        @comgra.node("one")
        @staticmethod
        def one(x: int) -> int:
            return x

        @comgra.node("two")
        @classmethod
        def two(cls, x: int) -> int:
            return x

    assert (Kit.one(1), Kit().two(2)) == (1, 2)
    assert [word[2] for word in recording.words] == ["one", "two"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: comgra.node(torch.ones(1)), "needs a name"),  # type: ignore[call-overload]
        (lambda: comgra.node(torch.ones(1), ""), "non-empty string"),
        (lambda: comgra.node(""), "non-empty string"),
        (lambda: comgra.node("memory", torch.ones(2)), "the value comes first"),  # type: ignore[call-overload]
        (lambda: comgra.node(lambda x: x), "needs a name"),  # type: ignore[call-overload]
        (lambda: comgra.node(torch.ones(1), "x", kind="parametr"), "did you mean 'parameter'"),
        (lambda: comgra.node("x", kind="nonsense"), "input, parameter, buffer"),
        (lambda: comgra.node("x")(3), "not callable"),  # type: ignore[type-var]
        (lambda: comgra.node("x")(type("Sub", (Net,), {})), "does not define `forward`"),
        (lambda: comgra.tag("a", ""), "a tag must be a non-empty string"),
        (lambda: comgra.note(""), "a note must be a non-empty string"),
        (lambda: comgra.kpi("", 1), "a KPI's name"),
        (lambda: comgra.kpi("x", "1"), "must be a number"),
        (lambda: comgra.kpi("x", torch.ones(2)), "must be a number"),
        (lambda: comgra.kpi("x", 1j), "must be a number"),
    ],
)
def test_wrong_words_are_refused_whether_or_not_anybody_listens(
    wrong: Callable[[], Any], message: str
) -> None:
    with pytest.raises(AnnotationError, match=message) as caught:
        wrong()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, ComgraError)


def test_what_a_quiet_step_takes_a_recorded_one_takes(recording: Heard) -> None:
    assert comgra.node(1, 5) == 1  # type: ignore[call-overload]
    assert comgra.node(1, " ") == 1
    assert [word[2] for word in recording.words] == ["5", " "]


# -- what handles programs


def test_annotated_programs_can_be_pickled_and_copied() -> None:
    net, x = Net(), torch.ones(1, 3)
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert torch.equal(twin(x), net(x))
    assert pickle.loads(pickle.dumps(double)) is double
    assert copy.deepcopy(double) is double


def test_compiled_as_one_graph() -> None:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(1)
        return module.forward

    net, x = Net(), torch.ones(1, 3)
    for what in (net, double):
        compiled = torch.compile(what, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), what(x))
    assert len(graphs) == 2


@pytest.mark.usefixtures("heard")
def test_compiled_as_one_graph_while_somebody_listens() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        comgra.connect(x, x)
        return comgra.node(x * 2, "x", kind="computed")

    compiled = torch.compile(program, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).item() == 2


def test_transformed_exported_and_traced() -> None:
    net, x = Net(), torch.ones(4, 3)
    expected = net(x)
    assert torch.allclose(torch.vmap(net)(x), expected)
    gradient = torch.func.grad(lambda y: net(y).sum())(x)
    assert gradient.shape == x.shape
    assert torch.allclose(torch.export.export(net, (x,)).module()(x), expected)
    assert torch.allclose(torch.fx.symbolic_trace(net)(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_by_torchscript() -> None:
    net, x = Net(), torch.ones(4, 3)
    assert torch.allclose(torch.jit.trace(net, (x,))(x), net(x))
    scripted = torch.jit.script(Whole())
    assert torch.equal(scripted(x), x + 1)


def test_a_forked_child_hears_nothing(recording: Heard) -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_report, args=(queue,))
    child.start()
    child.join(30)
    assert queue.get() == (None, False)
    assert hub.listener is recording


def _report(queue: Any) -> None:
    queue.put((hub.listener, hub.recording))


def test_threads_may_listen_and_speak_at_once() -> None:
    failures: list[BaseException] = []

    def speak() -> None:
        try:
            for number in range(2000):
                comgra.node(number, "n")
                comgra.kpi("n", number)
                comgra.connect(number, number)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=speak) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        listener = Heard()
        hub.listen(listener)
        hub.set_recording(listener, True)
        hub.unlisten(listener)
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_module_inherits_its_mark() -> None:
    class Deep(Net):
        pass

    assert Deep.forward is Net.forward
    assert isinstance(Deep(), nn.Module)
