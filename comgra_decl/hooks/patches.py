"""Monkey patches of torch and of the program; all patches go through this module.

Torch has no hook for some events, such as when a module switches to evaluation mode, `backward` is
called, or a scaler skips a step. For these events, a stand-in replaces a function. It calls the
original once, with the same arguments, and returns its result. A program may hold references to a
stand-in (`b = torch.autograd.backward`, a partial, a decorator). After tracing has ended, they
behave like the original. Patches that other code applies on top of a stand-in are left in place.
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
"""The patches that are currently applied."""


class Patch:
    """Replaces one attribute of a module or class with a stand-in.

    A stand-in is active only while its patch is applied, and never in code that is being compiled;
    at all other times, it only calls the original. It has the original's name, signature,
    documentation and globals, so `inspect` and TorchScript see the original.

    Args:
        owner: the module or class.
        name: the name of the attribute, which a class may have inherited.
        around: called as `around(original, *args, **kwargs)` instead of the original. For a class
            method, `original` takes the class as its first argument.
        whole: creates the entire stand-in, for cases in which the cost of an additional call
            matters. It receives the original and a list whose only element states whether the patch
            is applied.
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
        self._before: Any = None  # the attribute as stored on the owner itself, or `_ABSENT`
        self._original: Any = None
        self._stand_in: Any = None
        self._on = [False]  # of the newest stand-in; older ones that a program still holds stay off

    def apply(self) -> None:
        """Apply the patch. Idempotent."""
        if self._on[0]:
            return
        found = vars(self.owner).get(self.name, _ABSENT)
        if found is _ABSENT or found is not self._stand_in:  # otherwise `leave` left it in place
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
        """Restore the original attribute, unless other code has replaced it since."""
        ours = self._on[0] and vars(self.owner).get(self.name) is self._stand_in
        self._on[0] = False
        in_place.discard(self)
        if ours and self._before is _ABSENT:
            delattr(self.owner, self.name)
        elif ours:
            setattr(self.owner, self.name, self._before)

    def leave(self) -> None:
        """Deactivate the stand-in but leave it in place.

        Meant for functions such as `torch.compile`, to which a program may hold a reference. If the
        original were restored, the program would hold two different versions.
        """
        self._on[0] = False
        in_place.discard(self)

    def _stored(self) -> Any:
        """Return the attribute as it is stored, without binding class methods."""
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
        # TorchScript resolves the names in the original's source in these globals.
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
    """Return a factory of stand-ins with exactly the parameters of a function.

    `torch.fx` and others inspect a function's code, not only its signature. If the parameters are
    unknown, or clash with the names in `_STAND_IN`, the stand-in takes `*args` and `**kwargs`.
    """
    name = getattr(original, "__name__", "")
    parameters, arguments = "*args, **kwargs", "*args, **kwargs"
    code = getattr(original, "__code__", None)
    if code is not None:
        actual = _actual_parameters(original, code)
        if _ABOVE.isdisjoint(p.name for p in actual) and _ABOVE.isdisjoint([name]):
            parameters, arguments = _parameters(actual), _arguments(actual)
    if not name.isidentifier() or keyword.iskeyword(name) or name in _ABOVE:
        name = "stand_in"
    variables: dict[str, Any] = {}
    exec(_STAND_IN.format(name=name, parameters=parameters, arguments=arguments), variables)
    made: Callable[..., Any] = variables["make"]
    return made


def _actual_parameters(original: Any, code: CodeType) -> list[inspect.Parameter]:
    """Return the parameters of a function itself, ignoring a signature from `functools.wraps`."""
    bare = FunctionType(code, {}, argdefs=original.__defaults__, closure=original.__closure__)
    bare.__kwdefaults__ = original.__kwdefaults__
    return list(inspect.signature(bare).parameters.values())


def _parameters(actual: Iterable[inspect.Parameter]) -> str:
    """Return the source of a parameter list, with placeholders for the defaults."""
    empty = inspect.Parameter.empty
    given = [
        p.replace(annotation=empty, default=empty if p.default is empty else None) for p in actual
    ]
    return str(inspect.Signature(given))[1:-1]


def _arguments(actual: Iterable[inspect.Parameter]) -> str:
    """Return the source of an argument list that passes the parameters on."""
    forms: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*{0}",
        inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
        inspect.Parameter.VAR_KEYWORD: "**{0}",
    }
    return ", ".join(forms.get(p.kind, "{0}").format(p.name) for p in actual)


_CLASS_METHOD_OF_C = type(dict.__dict__["fromkeys"])


def _disguised(stand_in: Any, original: Any) -> Any:
    """Give a stand-in the name, documentation and signature of the original, and return it."""
    functools.update_wrapper(stand_in, original)
    stand_in.__module__ = getattr(original, "__module__", None)
    with suppress(TypeError, ValueError):  # C functions may have no signature
        stand_in.__signature__ = inspect.signature(original)
    return stand_in


def watch_mode(
    on_mode: Callable[[nn.Module, bool], None], *, on_fault: Callable[[BaseException], None]
) -> Patch:
    """Return a patch that calls `on_mode` after a module switches to training or evaluation mode.

    `eval()` is `train(False)`. Detection costs nothing between recorded steps, because nothing is
    attached to modules, and a program switches modes once per evaluation phase, not once per batch.
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
    """Prevent Dynamo from compiling tracing's own functions where compiled code calls them.

    Between two graphs of a compiled function, Dynamo compiles all Python functions that are called,
    including those of comgra_decl. `is_compiling()` is true in compiled code, so a hook would
    assume that it is called during compilation, and do nothing.

    Args:
        functions: plain functions or methods.
        within: whether to skip the functions that they call as well; False for wrappers, because
            they call the program's code.
    """
    evaluation = of_evaluation
    if not hasattr(evaluation, "set_code_exec_strategy"):  # torch without it compiles them
        return
    action = evaluation._FrameAction
    inner = action.SKIP if within else action.DEFAULT
    for function in functions:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:  # C functions have no code object
            strategy = evaluation._FrameExecStrategy(action.SKIP, inner)
            evaluation.set_code_exec_strategy(code, strategy)
