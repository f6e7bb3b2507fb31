"""Which of other code's functions have stand-ins, and that there are no others."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import comgra_decl
from benchmarks.neutrality.surroundings import functions
from comgra_decl.experiments.overfit_one_batch import Seen, held
from comgra_decl.hooks import patches
from comgra_decl.hooks.patches import Patch
from tests import house
from tests.hooks.tiny import net, step
from tests.support.freezing import frozen
from tests.support.recording import EVERYTHING, recording


def attend(x: torch.Tensor) -> torch.Tensor:
    """A function of the program, which a spec may select."""
    return F.relu(x) * 3.0


CALLS = {
    "nodes": {
        **EVERYTHING["nodes"],  # type: ignore[dict-item]
        "calls": {"select": {"function": f"{__name__}.attend"}, "capture": ["output"]},
        "torch": {"select": {"function": "torch.softmax"}, "capture": ["output"]},
    },
    "schedule": {"first": 1_000_000},
}


class Attending(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(attend(super().forward(x)), -1)


# -- what a stand-in is ---------------------------------------------------------------------------


class Owner:
    def method(self, x: int, *, y: int = 1) -> int:
        """Adds."""
        return x + y

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    @staticmethod
    def static(x: int) -> int:
        return x


def noting(seen: list[Any]) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((args[1:], kwargs))
        return original(*args, **kwargs)

    return around


def test_a_stand_in_has_the_name_the_signature_and_the_source_of_the_original() -> None:
    original, patch = Owner.method, Patch(Owner, "method", noting([]))
    expected = inspect.getfullargspec(original), inspect.getsource(original)
    patch.apply()
    try:
        assert Owner.method is not original
        assert Owner.method.__name__ == "method"
        assert Owner.method.__qualname__ == "Owner.method"
        assert Owner.method.__doc__ == "Adds."
        assert Owner.method.__module__ == __name__
        assert (inspect.getfullargspec(Owner.method), inspect.getsource(Owner.method)) == expected
    finally:
        patch.restore()
    assert Owner.method is original


def test_what_was_kept_of_it_is_the_original_afterwards() -> None:
    seen: list[Any] = []
    patch = Patch(Owner, "method", noting(seen))
    patch.apply()
    kept, bound, later = Owner.method, Owner().method, functools.partial(Owner.method, y=5)
    assert bound(1) == 2
    patch.restore()
    assert [kept(Owner(), 1, y=2), bound(3), later(Owner(), 1)] == [3, 4, 6]
    assert seen == [((1,), {"y": 1})]


def every_form(a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **more: int) -> object:
    return a, b, rest, c, d, more


def test_a_stand_in_has_the_parameters_of_the_original_in_its_code() -> None:
    patch = Patch(sys.modules[__name__], "every_form", noting([]))
    original, expected = every_form, every_form(1, 5, 6, c=7, e=8)
    patch.apply()
    try:
        stand_in = every_form
        assert stand_in is not original
        names = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags")
        for name in names[:3]:
            assert getattr(stand_in.__code__, name) == getattr(original.__code__, name)
        count = 6
        assert stand_in.__code__.co_varnames[:count] == original.__code__.co_varnames[:count]
        assert stand_in(1, 5, 6, c=7, e=8) == expected
        assert stand_in(1, c=3) == (1, 2, (), 3, 4, {})
        with pytest.raises(TypeError, match="c"):
            stand_in(1)  # type: ignore[call-arg]
    finally:
        patch.restore()


def test_class_methods_and_static_ones_stay_what_they_are() -> None:
    seen: list[Any] = []
    for name, arguments in (("of_class", (7,)), ("static", (7,))):
        stored, patch = vars(Owner)[name], Patch(Owner, name, noting(seen))
        expected = getattr(Owner(), name)(*arguments)
        patch.apply()
        assert type(vars(Owner)[name]) is type(stored)
        assert getattr(Owner(), name)(*arguments) == getattr(Owner, name)(*arguments) == expected
        patch.restore()
        assert vars(Owner)[name] is stored
    assert len(seen) == 4


def test_an_inherited_attribute_is_inherited_again() -> None:
    class Child(Owner):
        pass

    patch = Patch(Child, "method", noting([]))
    patch.apply()
    assert "method" in vars(Child)
    patch.restore()
    assert "method" not in vars(Child)


def test_what_others_put_on_top_stays_and_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    patch = Patch(Owner, "method", noting(seen))
    patch.apply()
    inner = Owner.method

    def theirs(self: Owner, x: int, *, y: int = 1) -> int:
        return 10 * inner(self, x, y=y)

    monkeypatch.setattr(Owner, "method", theirs)
    patch.restore()
    assert Owner.method is theirs
    assert Owner().method(1) == 20
    assert seen == []
    patch.apply()  # on top of theirs, which holds the first stand-in
    assert Owner().method(1) == 20
    assert seen == [((1,), {"y": 1})]
    patch.restore()
    assert Owner.method is theirs


def test_a_stand_in_that_is_back_in_place_is_the_same_one() -> None:
    patch = Patch(Owner, "method", noting([]))
    found = []
    for _ in range(2):
        patch.apply()
        found.append(Owner.method)
        patch.restore()
    assert found[0] is found[1]


def test_a_stand_in_may_be_left_where_it_is() -> None:
    seen: list[Any] = []
    original, patch = Owner.method, Patch(Owner, "method", noting(seen))
    patch.apply()
    kept = Owner.method
    patch.leave()
    assert Owner.method is kept
    assert Owner().method(1) == 2
    assert seen == []
    patch.apply()
    assert Owner.method is kept
    assert Owner().method(1) == 2
    assert seen == [((1,), {"y": 1})]
    patch.restore()
    assert Owner.method is original


# -- what is replaced while something is recorded -------------------------------------------------


def test_all_that_is_replaced_in_a_recorded_step_looks_like_the_original() -> None:
    found: dict[str, tuple[Any, Any]] = {}

    class Looking(Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for patch in patches.in_place:
                name = f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}"
                stored = inspect.getattr_static(patch.owner, patch.name)
                found[name] = stored, patch._original
            return super().forward(x)

    model = Looking(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(CALLS) as run:
        step(model, optimizer)
    assert run.faults == []
    assert len(found) > 10
    for name, (stand_in, original) in found.items():
        assert stand_in is not original, name
        function = getattr(stand_in, "__func__", stand_in)
        model_ = getattr(original, "__func__", original)
        for what in ("__name__", "__qualname__", "__doc__", "__module__"):
            assert getattr(function, what, None) == getattr(model_, what, None), (name, what)
        assert _signature(stand_in) == _signature(original), name


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def test_nothing_is_replaced_but_by_a_patch() -> None:
    """In the middle of a recorded step with every option enabled."""
    replaced: list[str] = []
    before: dict[str, int] = {}

    class Looking(Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now, ours = functions(), {id(p._stand_in) for p in patches.in_place}
            replaced.extend(n for n, f in before.items() if now.get(n, f) not in {f, *ours})
            return super().forward(x)

    model = Looking(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    before.update(functions())
    with recording(CALLS) as run:
        for _ in range(2):
            step(model, optimizer)
    assert run.faults == []
    assert replaced == []
    assert functions() == before


def test_a_program_keeps_working_with_whatever_it_kept_of_torch() -> None:
    def kept() -> dict[str, Any]:
        return {
            "compile": torch.compile,
            "freeze": gc.freeze,
            "backward": torch.autograd.backward,
            "call": nn.Module.__call__,
            "train": nn.Module.train,
            "scale": torch.amp.GradScaler.scale,
            "skip": torch.amp.GradScaler.step,
            "step": torch.optim.SGD.step,
            "attend": attend,
        }

    plain, model = kept(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside: dict[str, Any] = {}
    with recording(CALLS) as run:
        model.register_forward_hook(lambda *_: inside.update(kept()))
        step(model, optimizer)
    assert run.faults == []
    assert kept() == plain
    recorded = len(run.steps)
    for _ in range(3):
        inside["train"](model, False)
        inside["train"](model, True)
        loss = inside["attend"](inside["call"](model, torch.randn(4, 3))).sum()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        inside["backward"](inside["scale"](scaler, loss))
        inside["skip"](scaler, optimizer)
    with mock.patch.object(gc, "get_freeze_count", frozen):
        before = gc.get_freeze_count()
        inside["freeze"]()
        assert gc.get_freeze_count() > before
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    inside["compile"](net(), backend=backend)(torch.randn(4, 3))
    assert len(graphs) == 1
    assert inside["compile"] is plain["compile"]
    assert len(run.steps) == recorded


def test_a_program_keeps_working_with_what_it_kept_of_a_data_loader() -> None:
    """Only the experiment that holds one batch fixed replaces anything in data loaders."""
    plain = DataLoader.__iter__
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    expected = [batch.tolist() for (batch,) in loader]
    with held(Seen([], []), 100, KeyboardInterrupt):
        kept, bound = DataLoader.__iter__, loader.__iter__
        assert kept is not plain
        assert [batch.tolist() for (batch,) in kept(loader)] == expected[:1] * 3
    assert DataLoader.__iter__ is plain
    for iterator in (kept(loader), bound(), iter(loader)):
        assert [batch.tolist() for (batch,) in iterator] == expected


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_is_replaced_can_be_scripted() -> None:
    """TorchScript reads a function's source, and resolves its names where it was defined."""
    scripted: list[Any] = []

    class Scripting(Attending):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scripted.append(torch.jit.script(attend))
            return super().forward(x)

    model = Scripting(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(CALLS) as run:
        step(model, optimizer)
    assert run.faults == []
    assert torch.equal(scripted[0](torch.ones(2)), torch.full((2,), 3.0))


# -- no other way ---------------------------------------------------------------------------------

PACKAGE = Path(comgra_decl.__file__).parent
OF_ERRORS = "hooks/frames.py"  # of the traceback of an error, after it has ended the program
FRAMES = "hooks/call_context.py"
"""The only file that reads the variables of a frame."""


DEBUGGER = "record/debugger.py"
"""Traces the program's frames once a person has stopped it with `on_finding.break`, like pdb."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yields the files that run in a training, which the viewer does not."""
    return (found for found in house.sources() if not found[0].startswith("viewer/"))


def test_no_frame_of_a_program_is_asked_for_its_variables() -> None:
    """Before Python 3.13, reading them overwrites the dict that `locals()` returned."""
    words = {"f_locals", "locals", "settrace", "setprofile", "getargvalues", "getinnerframes"}
    found = [
        (file, node.lineno)
        for file, tree in sources()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in words)
        or (isinstance(node, ast.Name) and node.id in words)
    ]
    assert [file for file, _ in found] == [FRAMES, FRAMES, *[OF_ERRORS] * 2, DEBUGGER], found
    of_torch, guarded = (PACKAGE / FRAMES).read_text().split("def variables_in_use")
    assert of_torch.count("f_locals") == guarded.count("f_locals") == 1
    assert "f_locals.get(name)" in of_torch
    assert "if sys.version_info >= (3, 13) else ()" in guarded
    of_errors = (PACKAGE / OF_ERRORS).read_text()
    assert "if _is_reflective(frame.f_code):\n        return None" in of_errors


def test_frames_of_other_threads_are_looked_at_in_one_place() -> None:
    """It keeps the interpreter from crashing; from Python 3.13 on, `calling` does."""
    found = {
        file
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("_current_frames", "_current_exceptions")
    }
    # a stalled program is looked at while its threads wait
    assert found == {FRAMES, "hooks/other_threads.py", "hooks/stalls.py"}


def test_threads_are_not_told_apart_by_what_a_later_thread_may_have() -> None:
    """The identifier of a thread that has ended passes to another; `this_thread.number` stays."""
    found = {
        file
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Attribute, ast.alias))
        and (node.attr if isinstance(node, ast.Attribute) else node.name) in ("get_ident", "ident")
        and file.startswith("hooks/")
    }
    assert found == {"hooks/stalls.py"}, "it reads the frames of threads, which have identifiers"


def test_all_objects_are_looked_through_in_one_place() -> None:
    """In one call of C code: we must not hold a tuple that another thread is constructing."""
    found = [
        file
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("get_objects", "get_referrers")
    ]
    assert {*found} == {"hooks/objects.py"}


ALLOWED = {
    "__init__.py: globals()[name]": "names of the package itself, imported when they are asked for",
    "torch_private.py: globals()[name]": "likewise, names of torch",
    "hooks/compiled/variant.py: graph_compile.collect_bw_donated_buffer_idxs": (
        "what the backward of a piece of code may overwrite, while that is compiled"
    ),
    "hooks/compiled/variant.py: pgo._CODE_STATE": "what the compiler knows of sizes, for a call",
    "hooks/probing/copying.py: vars(made).update": "a module of a copy of ours",
    "hooks/probing/passes.py: vars(module).clear": "a module of a copy of ours",
    "hooks/probing/passes.py: vars(module).update": "a module of a copy of ours",
    "hooks/probing/seclusion.py: setattr": "what torch knows of its global hooks, put back",
    "doors/environment.py: os.environ[CHECKED]": "what child processes are told",
    "doors/environment.py: os.environ[RECORDED_BY]": "what child processes are told",
    "doors/script.py: sys.argv": "what `python script.py` does",
    "doors/script.py: sys.modules['__main__']": "what `python script.py` does",
    "doors/script.py: sys.path[0]": "what `python script.py` does",
    "doors/script.py: vars(module).update": "what `python script.py` does",
}


def test_attributes_of_others_are_set_by_patches_alone() -> None:
    found = {
        f"{file}: {ast.unparse(target)}"
        for file, tree in sources()
        for target in _foreign_writes(tree)
        if file != "hooks/patches.py"
    }
    assert found == set(ALLOWED)


def _foreign_writes(tree: ast.Module) -> Iterator[ast.expr]:
    """Yields what is written to objects that were imported from elsewhere or returned by a call."""
    foreign = set(_foreign_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _writes(node):
            yield node.func
        for target in _targets(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                root = _root(target.value)
                if root in foreign or root is None or _is_namespace(target.value):
                    yield target


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return [*node.targets]
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _writes(call: ast.Call) -> bool:
    if house.text(call.func) in ("setattr", "delattr"):
        return _root(call.args[0]) != "self"
    methods = {"update", "clear", "pop", "setdefault", "__setattr__", "__setitem__"}
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in methods
        and _is_namespace(function.value)
    )


def _foreign_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not alias.name.startswith("comgra_decl"):
                    yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and not _is_ours(node.module or ""):
            yield from (alias.asname or alias.name for alias in node.names)


def _is_ours(module: str) -> bool:
    return module.startswith("comgra_decl") and module != "comgra_decl.torch_private"


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_namespace(node: ast.expr) -> bool:
    """Whether an expression is an object's dict of attributes: `vars(x)`, `x.__dict__`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__dict__"
    return isinstance(node, ast.Call) and house.text(node.func) in ("vars", "globals")


def test_what_torch_may_refuse_to_tell_is_read_in_one_place() -> None:
    """`grad_fn` of some views raises; only `gradient_function` reads it."""
    readers = [
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "grad_fn"
    ]
    assert readers == ["hooks/pytree.py"]
