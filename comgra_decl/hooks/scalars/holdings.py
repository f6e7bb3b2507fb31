"""Measure what the modules, optimizers and variables of a program hold, to compare it later."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from comgra_decl.hooks.frames import is_module, is_ours, variables
from comgra_decl.hooks.module_tree import Top, named_modules
from comgra_decl.hooks.objects import instances_of, unfrozen_of
from comgra_decl.hooks.pytree import gradient_function, tensors_in, tensors_of

_FRAMES = 60
_MOST_OPERATIONS = 100_000  # counted in the graphs of all variables
_MOST_STEPS_BACK = 64  # operations between a tensor and the parameter that names it
_NO_OBJECTS = (ModuleType, type, FunctionType)

Made = tuple[str, tuple[int, ...]]


@dataclass
class Holdings:
    """What a program holds at one time, by names such as `buffer bank of encoder`.

    Attributes:
        sizes: bytes of buffers, parameters and other tensors of modules, of optimizer states, and
            of variables.
        counts: number of hooks of modules and parameters, and number of operations in the graphs
            that variables keep.
        made: number of tensors that keep their graph, by the operation that made them and their
            shape.
    """

    sizes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    made: Counter[Made] = field(default_factory=Counter)


def program_frames() -> Iterator[FrameType]:
    """Yield the frames of the running program, innermost first, without those of comgra_decl."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if not is_ours(frame):
            yield frame
        frame = frame.f_back


def place_of(frame: FrameType) -> str:
    """Return the function and the file of a frame, such as `train (train.py)`."""
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name})"


def own_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object without running its code; {} if it has none."""
    if issubclass(type(thing), _NO_OBJECTS):  # not `isinstance`, which wakes lazy proxies
        return {}
    try:  # not by a `__getattribute__` of the program
        own = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return dict(own) if type(own) is dict else {}


def holdings() -> Holdings:
    """Return what the program holds now, in the thread that calls this."""
    found = Holdings()
    for node, module in _modules().values():
        _measure_module(found, node, module)
    # by id, because an object may be found twice
    for optimizer in {id(each): each for each in instances_of(Optimizer)}.values():
        states = tensors_of([*optimizer.state.values()])
        found.sizes[f"states of {type(optimizer).__name__}"] += sum(map(_bytes, states))
    _measure_variables(found)
    found.made.update(map(_made, _with_graphs()))
    return found


def makers(wanted: AbstractSet[Made]) -> dict[Made, str]:
    """Return what made tensors, such as `MseLossBackward0 after head`, by operation and shape.

    Tensors that only serve to compute others among them are left out.
    """
    nodes = {
        id(tensor): node
        for node, module in _modules().values()
        for tensor in module._parameters.values()
        if tensor is not None
    }
    made = {gradient_function(tensor): _made(tensor) for tensor in _with_graphs()}
    examples = {each: function for function, each in made.items() if function and each in wanted}
    names: dict[Made, str] = {}
    inner: set[Made] = set()
    for each, function in examples.items():
        before = _operations([function], _MOST_STEPS_BACK)
        inner |= {made[used] for used in before if used in made} - {each}
        found = (nodes.get(id(getattr(used, "variable", None))) for used in before)
        node = next(filter(None, found), None)
        names[each] = each[0] if node is None else f"{each[0]} after {node}"
    return {each: name for each, name in names.items() if each not in inner}


def _modules() -> dict[int, tuple[str, nn.Module]]:
    """Return the node and the module of all modules, by id."""
    every = {id(each): each for each in instances_of(nn.Module) if is_module(each)}
    inner = {id(child) for each in every.values() for child in each._modules.values()}
    found: dict[int, tuple[str, nn.Module]] = {}
    for top in (each for number, each in every.items() if number not in inner):
        naming = Top(top, lambda _: False)
        for path, module in named_modules(top):
            found.setdefault(id(module), (naming.node(path), module))
    return found


def _measure_module(found: Holdings, node: str, module: nn.Module) -> None:
    for kind, held in (("buffer", module._buffers), ("parameter", module._parameters)):
        for name, tensor in [*held.items()]:
            if tensor is not None:
                found.sizes[f"{kind} {name} of {node}"] += _bytes(tensor)
                hooks = tensor._backward_hooks
                found.counts[f"hooks of {kind} {name} of {node}"] += len(hooks or ())
    for name, thing in own_attributes(module).items():
        if name.endswith("_hooks") and isinstance(thing, dict):
            readable = name.strip("_").replace("_", " ")
            found.counts[f"{readable} of {node}"] += len(thing)
        elif isinstance(thing, Tensor):
            found.sizes[f"attribute {name} of {node}"] += _bytes(thing)


def _measure_variables(found: Holdings) -> None:
    left = _MOST_OPERATIONS
    known: set[frozenset[int]] = set()  # a caller may have variables for the same tensors
    for frame in program_frames():
        held = variables(frame, _tensors_of) or {}
        for name, tensors in held.items():
            which = frozenset(map(id, tensors))
            if which in known:
                continue
            known.add(which)
            place = f"{name} in {place_of(frame)}"
            found.sizes[place] = sum(map(_bytes, tensors))
            number = len(_operations(map(gradient_function, tensors), left))
            left -= number
            if number:
                found.counts[f"operations in the graph of {place}"] = number


def _tensors_of(known: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return the tensors that variables and attributes of variables are, or have in tuples."""
    found: dict[str, list[Tensor]] = {}
    for name, value in dict(known).items():
        things = {name: value}
        if not isinstance(value, (Tensor, nn.Module)):  # modules are measured by their nodes
            things |= {f"{name}.{key}": each for key, each in own_attributes(value).items()}
        for place, thing in things.items():
            if isinstance(thing, (Tensor, tuple)):
                found[place] = [tensor for _, tensor in tensors_in(thing)]
    return {name: tensors for name, tensors in found.items() if tensors}


def _operations(functions: Iterable[Any], most: int) -> dict[Any, None]:
    """Return at most about `most` operations of a graph, by their distance from the given ones."""
    found: dict[Any, None] = dict.fromkeys(each for each in functions if each is not None)
    waiting = deque(found)
    while waiting and len(found) < most:
        for each, _ in waiting.popleft().next_functions:
            if each is not None and each not in found:
                found[each] = None
                waiting.append(each)
    return found


def _with_graphs() -> list[Tensor]:
    return [tensor for tensor in unfrozen_of((Tensor,)) if not tensor.is_leaf]


def _made(tensor: Tensor) -> Made:
    function = gradient_function(tensor)
    return "" if function is None else str(function.name()), tuple(tensor.shape)


def _bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements; 0 if they cannot be told."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # uninitialised, nested and others
        return 0
