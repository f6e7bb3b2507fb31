"""Read the frames of a traceback after the fact: module calls in progress and local variables.

This attaches nothing to the program. Before Python 3.13, reading the variables of a frame stores a
dict in the frame. That dict would keep tensors alive, and if the program called `locals()`, the
call returned the same dict. `variables` therefore empties a dict to which there is no other
reference, and does not read a frame whose code could keep one.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from comgra_decl.torch_private import module_call

T = TypeVar("T")

# These begin the file names of code objects. Resolving links would make them differ, for example
# if the environment is a link to another folder.
TORCH_FOLDER = torch.__file__.removesuffix("__init__.py")
OUR_FOLDER = __file__.removesuffix(str(Path("hooks", "frames.py")))
_REFLECTIVE = frozenset({"locals", "vars", "exec", "eval", "dir"})
"""Functions through which code may obtain the dict of its variables, or keep variables only there.

Methods of the same name, such as `model.eval()`, do not.
"""

_REFLECTIVE_ANYWHERE = frozenset({"f_locals", "_getframe", "currentframe"})
"""Further ones, which are usually attributes, such as `inspect.currentframe`."""

_STACK = "stack"  # that of `inspect` is a further one
_WITH_ANOTHER_STACK = frozenset({"torch", "np", "numpy", "jnp"})

_MODULES_OF_BUILTINS = frozenset({"builtins", "__builtins__"})
_VARIABLE_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

_PLUMBING = (
    str(Path("nn", "modules", "module.py")),
    str(Path("utils", "_contextlib.py")),
)
_STAND_IN = "make.<locals>."  # functions with which `hooks/patches.py` replaces others
_HELD_BY_FRAME = 3  # references to the dict: the frame's, `variables`', `getrefcount`'s
_WORD = re.compile(r"[^\W\d]\w*")
_MOST_LINES = 4  # of a statement that spans several lines


@dataclass(frozen=True)
class Visit:
    """A frame of a traceback, with the line that it was running."""

    frame: FrameType
    line: int
    instruction: int

    @property
    def file(self) -> str:
        """The file that contains its code."""
        return self.frame.f_code.co_filename

    @property
    def function(self) -> str:
        """The name of its function, including the class."""
        return self.frame.f_code.co_qualname

    @property
    def in_torch(self) -> bool:
        """Whether the code belongs to torch."""
        return self.file.startswith(TORCH_FOLDER)

    @property
    def ours(self) -> bool:
        """Whether the code belongs to comgra_decl, including code that it generates."""
        return is_ours(self.frame)

    @property
    def is_plumbing(self) -> bool:
        """Whether the code only forwards a call: torch's code that calls modules, or our own."""
        stand_in = self.file == "<string>" and self.function.startswith(_STAND_IN)
        return self.ours or stand_in or self.file.endswith(_PLUMBING)

    @property
    def calls_module(self) -> bool:
        """Whether the frame is torch's code that calls a module."""
        return self.frame.f_code is module_call.__code__

    @property
    def text(self) -> str:
        """The running statement, on one line; "" if its file cannot be read."""
        first, last = self._lines()
        lines = (linecache.getline(self.file, n).strip() for n in range(first, last + 1))
        return " ".join(line for line in lines if line)

    @property
    def words(self) -> frozenset[str]:
        """The names in the running statement."""
        return frozenset(_WORD.findall(self.text))

    def _lines(self) -> tuple[int, int]:
        positions = [*self.frame.f_code.co_positions()]
        at = self.instruction // 2
        first, last, _, _ = positions[at] if 0 <= at < len(positions) else (None,) * 4
        first = self.line if first is None else min(first, self.line)
        last = first if last is None else last
        return first, min(last, first + _MOST_LINES - 1)


def visits(traceback: TracebackType | None) -> Iterator[Visit]:
    """Yield the frames of a traceback, outermost first."""
    while traceback is not None:
        yield Visit(traceback.tb_frame, traceback.tb_lineno, traceback.tb_lasti)
        traceback = traceback.tb_next


def variables(frame: FrameType, look: Callable[[Mapping[str, Any]], T]) -> T | None:
    """Pass the local variables of a frame to a function, and return its result.

    The frame is left as it was: no dict in it keeps a variable alive, and no dict of the program
    changes. Returns None if that is impossible: before Python 3.13, if the code uses `locals()` or
    similar.

    Args:
        frame: a frame.
        look: receives the variables by name; must not keep or change the mapping.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return look(frame.f_locals)
    if _is_reflective(frame.f_code):
        return None
    known = frame.f_locals
    try:
        return look(known)
    finally:
        if sys.getrefcount(known) <= _HELD_BY_FRAME:
            known.clear()


@functools.lru_cache(maxsize=1024)
def _is_reflective(code: CodeType) -> bool:
    """Return whether code names a function through which it may obtain its variables."""
    names = _REFLECTIVE | _REFLECTIVE_ANYWHERE | {_STACK}
    if names.isdisjoint(code.co_names) and names.isdisjoint(code.co_freevars):
        return False  # nearly always
    if not _REFLECTIVE_ANYWHERE.isdisjoint(code.co_names):
        return True
    if _STACK in code.co_names and _may_be_of_inspect(code):
        return True
    if not _REFLECTIVE.isdisjoint(code.co_freevars):
        return True
    if not _MODULES_OF_BUILTINS.isdisjoint((*code.co_names, *code.co_freevars, *code.co_varnames)):
        return True  # `builtins.locals` is an attribute
    return any(
        step.argval in _REFLECTIVE
        for step in dis.get_instructions(code)
        if step.opname in _VARIABLE_LOADS or step.opname == "IMPORT_FROM"
    )


def _may_be_of_inspect(code: CodeType) -> bool:
    """Return whether `stack` in code may be `inspect.stack`, unlike `torch.stack`, `self.stack`."""
    if "inspect" in (*code.co_names, *code.co_freevars, *code.co_varnames):
        return True
    before = ""  # the name of the variable that the previous instruction has loaded
    for step in dis.get_instructions(code):
        if step.argval == _STACK:
            if step.opname in (*_VARIABLE_LOADS, "IMPORT_FROM"):
                return True
            attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
            if attribute and before not in ("", *_WITH_ANOTHER_STACK):
                return True
        before = str(step.argval) if step.opname in _VARIABLE_LOADS else ""
    return False


def is_ours(frame: FrameType) -> bool:
    """Return whether the code of a frame belongs to comgra_decl."""
    module = frame.f_globals.get("__name__")
    return frame.f_code.co_filename.startswith(OUR_FOLDER) or str(module).startswith("comgra_decl.")


def is_module(thing: object) -> bool:
    """Return whether an object is an initialised module, without running the object's code."""
    return issubclass(type(thing), nn.Module) and "_modules" in object.__getattribute__(
        thing, "__dict__"
    )


def own_module(known: Mapping[str, Any], frame: FrameType) -> nn.Module | None:
    """Return the module whose method a frame runs; None if it runs no module's method."""
    code = frame.f_code
    first = known.get(code.co_varnames[0]) if code.co_argcount else None
    if not (isinstance(first, nn.Module) and is_module(first)):
        return None
    return first if code.co_varnames[0] == "self" or _is_method(code, type(first)) else None


def _is_method(code: CodeType, class_: type) -> bool:
    """Return whether a class defines a method with this code, decorated or not."""
    for base in class_.__mro__:
        defined = vars(base).get(code.co_name)
        while defined is not None:
            if getattr(defined, "__code__", None) is code:
                return True
            defined = getattr(defined, "__wrapped__", None)
    return False
