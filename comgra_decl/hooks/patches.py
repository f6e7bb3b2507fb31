"""The one way in which something of ours stands in the place of something foreign.

Some events of torch have no hook: a module is switched to evaluation, `backward` is called, a
scaler skips a step. There a stand-in calls the original once, with the same arguments, and returns
its result. What a program keeps of it (`b = torch.autograd.backward`, a partial, a decorator)
behaves as the original once tracing is over, and what others put on top of it stays.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from comgra_decl.torch_private import of_evaluation

_ABSENT = object()
_is_compiling = torch.compiler.is_compiling

in_place: WeakSet[Patch] = WeakSet()
"""The patches that are applied now."""


class Patch:
    """Puts a stand-in into the place of one attribute of a module or class.

    A stand-in does something of ours only while its patch is applied, and never in code that is
    being compiled; at all other times it is the original and one more call. It has the original's
    name, signature, documentation and globals, so `inspect` and TorchScript see the original.

    Args:
        owner: the module or class.
        name: of the attribute, which a class may have inherited.
        around: called as `around(original, *args, **kwargs)` in the original's place. Of a class
            method, `original` is called with the class first.
        whole: where one more call would be felt: given the original, and a list whose only element
            says whether the patch is applied, makes the stand-in itself.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        around: Callable[..., Any] | None = None,
        *,
        whole: Callable[[Any, list[bool]], Any] | None = None,
    ) -> None:
        self.owner = owner
        self.name = name
        self._around = around
        self._whole = whole
        self._before: Any = None  # as the owner itself stores it, or nothing
        self._original: Any = None
        self._stand_in: Any = None
        self._on = [False]  # of the newest stand-in; an older one, which somebody has kept, is off

    def apply(self) -> None:
        """Puts the stand-in in place; calling it twice is harmless."""
        if self._on[0]:
            return
        found = vars(self.owner).get(self.name, _ABSENT)
        if found is _ABSENT or found is not self._stand_in:  # else it was left
            self._before = found
            original = self._stored()
            if original is not self._original:
                self._on = [False]
                self._stand_in = self._made(original)
                self._original = original
            setattr(self.owner, self.name, self._stand_in)
        self._on[0] = True
        in_place.add(self)

    def restore(self) -> None:
        """Puts back what was there, unless somebody else has replaced it since."""
        ours = self._on[0] and vars(self.owner).get(self.name) is self._stand_in
        self._on[0] = False
        in_place.discard(self)
        if ours and self._before is _ABSENT:
            delattr(self.owner, self.name)
        elif ours:
            setattr(self.owner, self.name, self._before)

    def leave(self) -> None:
        """Ends what it does and leaves the stand-in, where a program may have kept it by now.

        So that it has one `torch.compile` and not two, of which one is the stand-in.
        """
        self._on[0] = False
        in_place.discard(self)

    def _stored(self) -> Any:
        """Returns the attribute as it is stored: a class method still is one."""
        if self._before is not _ABSENT:
            return self._before
        inherited = inspect.getattr_static(self.owner, self.name, _ABSENT)
        return getattr(self.owner, self.name) if inherited is _ABSENT else inherited

    def _made(self, stored: Any) -> Any:
        if self._whole is not None:
            return _disguised(self._whole(stored, self._on), stored)
        if isinstance(stored, classmethod):
            return classmethod(self._standing_in(stored.__func__))
        if isinstance(stored, staticmethod):
            return staticmethod(self._standing_in(stored.__func__))
        if isinstance(stored, _CLASS_METHOD_OF_C):
            bound = _disguised(lambda cls, *a, **k: stored.__get__(None, cls)(*a, **k), stored)
            return classmethod(self._standing_in(bound))
        return self._standing_in(stored)

    def _standing_in(self, original: Callable[..., Any]) -> Any:
        assert self._around is not None
        code = _stand_in_code(original)
        made = code(original, self._around, self._on, _is_compiling)
        run_natively(made, within=False)
        # TorchScript resolves names that it finds in the original's source in these globals.
        variables = getattr(inspect.unwrap(original), "__globals__", globals())
        made = FunctionType(made.__code__, variables, closure=made.__closure__)
        made.__defaults__ = getattr(original, "__defaults__", None)
        made.__kwdefaults__ = getattr(original, "__kwdefaults__", None)
        return _disguised(made, original)


_STAND_IN = """
def make(original, around, on, compiling):
    def {name}({parameters}):
        if compiling() or not on[0]:
            return original({arguments})
        return around(original, {arguments})
    return {name}
"""
_ABOVE = frozenset({"original", "around", "on", "compiling"})


def _stand_in_code(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what makes a stand-in with the very parameters of a function.

    `torch.fx` and others look at a function's code, not only at its signature. A function that
    does not tell its parameters, or names them as we do ours, gets one that takes whatever comes.
    """
    name = getattr(original, "__name__", "")
    parameters, arguments = "*args, **kwargs", "*args, **kwargs"
    code = getattr(original, "__code__", None)
    if code is not None:
        told = _told_by(original, code)
        if _ABOVE.isdisjoint(p.name for p in told) and _ABOVE.isdisjoint([name]):
            parameters, arguments = _parameters(told), _arguments(told)
    if not name.isidentifier() or keyword.iskeyword(name) or name in _ABOVE:
        name = "stand_in"
    variables: dict[str, Any] = {}
    exec(_STAND_IN.format(name=name, parameters=parameters, arguments=arguments), variables)
    made: Callable[..., Any] = variables["make"]
    return made


def _told_by(original: Any, code: CodeType) -> list[inspect.Parameter]:
    """Returns the parameters that a function takes: `functools.wraps` makes it tell others."""
    bare = FunctionType(code, {}, argdefs=original.__defaults__, closure=original.__closure__)
    bare.__kwdefaults__ = original.__kwdefaults__
    return list(inspect.signature(bare).parameters.values())


def _parameters(told: Iterable[inspect.Parameter]) -> str:
    """Returns parameters as a function declares them; their defaults are given to it afterwards."""
    empty = inspect.Parameter.empty
    given = [
        p.replace(annotation=empty, default=empty if p.default is empty else None) for p in told
    ]
    return str(inspect.Signature(given))[1:-1]


def _arguments(told: Iterable[inspect.Parameter]) -> str:
    """Returns the arguments that pass parameters on."""
    forms: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*{0}",
        inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
        inspect.Parameter.VAR_KEYWORD: "**{0}",
    }
    return ", ".join(forms.get(p.kind, "{0}").format(p.name) for p in told)


_CLASS_METHOD_OF_C = type(dict.__dict__["fromkeys"])


def _disguised(stand_in: Any, original: Any) -> Any:
    """Gives a stand-in the name, documentation and signature of the original."""
    functools.update_wrapper(stand_in, original)
    stand_in.__module__ = getattr(original, "__module__", None)
    with suppress(TypeError, ValueError):  # of C, which may not tell
        stand_in.__signature__ = inspect.signature(original)
    return stand_in


def watch_mode(
    on_mode: Callable[[nn.Module, bool], None], *, on_fault: Callable[[BaseException], None]
) -> Patch:
    """Tells `on_mode` each module that is switched to training or evaluation, afterwards.

    `eval()` is `train(False)`. This is what makes evaluation visible at no cost: between recorded
    steps nothing is attached to any module, and a program switches once per evaluation phase, not
    once per batch.
    """

    def train(original: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
        result = original(module, mode)
        try:
            on_mode(module, mode)
        except Exception as error:
            on_fault(error)
        return result

    return Patch(nn.Module, "train", train)


def run_natively(*functions: Callable[..., Any], within: bool = True) -> None:
    """Keeps Dynamo from compiling functions of ours that compiled code comes by.

    Between two graphs of a compiled function it compiles whatever Python is called there, ours
    too; and since `is_compiling()` is true in all that it compiles, a hook would take its call for
    one that is only traced and do nothing.

    Args:
        functions: plain functions or methods.
        within: whether what they call is kept from it as well; not for wrappers, which call the
            program's code.
    """
    evaluation = of_evaluation
    if not hasattr(evaluation, "set_code_exec_strategy"):  # another torch: they are compiled, then
        return
    action = evaluation._FrameAction
    inner = action.SKIP if within else action.DEFAULT
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:  # of Python, not of C
            strategy = evaluation._FrameExecStrategy(action.SKIP, inner)
            evaluation.set_code_exec_strategy(code, strategy)
