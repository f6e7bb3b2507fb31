"""The post-mortem of a failed program: everything needed to understand the error, as plain data.

It is created after the fact, from the frames of the traceback and the module objects in them. It
therefore costs nothing before the error, and also works in steps that are not recorded. None of the
program's objects are kept, and the exception propagates unchanged.
"""

from __future__ import annotations

import os
import re
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from comgra_decl.errors import message_of
from comgra_decl.hooks.frames import Visit, is_module, own_module, variables, visits
from comgra_decl.hooks.memory_use import memory_facts, memory_limit
from comgra_decl.hooks.names import Names
from comgra_decl.hooks.place import ProgramPlace, phase_of
from comgra_decl.hooks.pytree import tensors_in
from comgra_decl.record.crash import tensors
from comgra_decl.record.crash.ended import ended_before
from comgra_decl.record.crash.lessons import lesson_about
from comgra_decl.record.crash.overwritten import needs
from comgra_decl.stats.quiet import quiet

DOCUMENT = "post_mortem"
"""Name of the document that contains a run's post-mortem."""

_LIBRARIES = (
    *{f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")},
    "<frozen ",
)
"""What the files of Python's own modules and of installed packages begin with."""

_MOST_FRAMES = 40
_MOST_CALLS = 16
_MOST_REASONS = 8  # errors that led to one another
_MOST_MEMBERS = 24  # errors in groups
_MOST_NOTES = 16
_LONGEST = 4000  # characters of a message
_LONG = 256  # entries of a container that is not searched for tensors
_LINE = 300  # characters of a line of code
_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


@dataclass(eq=False)
class _Call:
    """A module call in progress when the error was raised."""

    module: nn.Module
    node: str
    method: str
    inputs: list[dict[str, Any]] = field(default_factory=list)
    variables: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "class": type(self.module).__name__,
            "method": self.method,
            "training": bool(getattr(self.module, "training", False)),
            "inputs": self.inputs,
            "variables": self.variables,
        }


def post_mortem(error: BaseException, place: ProgramPlace) -> dict[str, Any]:
    """Return the post-mortem of an error as JSON-serialisable data.

    An interruption is no failure: only where the program was is of interest. No tensor is read,
    because reading one on a device that does not respond would wait forever.

    Args:
        error: the error, with its traceback.
        place: the program's position, as far as tracing knows.
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    own_chain = [error] if interrupted else [*_chain(error)]
    members = [] if interrupted else [*islice(_members(error), _MOST_MEMBERS + 1)]
    chain = [*own_chain, *(each for _, member in members for each in _chain(member))]
    frames = _frames(chain)
    names = Names(place.naming)
    calls = [*_calls(frames, names, reads=not interrupted)][-_MOST_CALLS:]
    phase, outputs = _phase(frames, calls)
    own = _place(frames)
    document: dict[str, Any] = {
        "error": _told(error),
        "because": [*_reasons(own_chain)],
        "members": [_member(number, each) for number, each in members[:_MOST_MEMBERS]],
        "more_members": len(members) > _MOST_MEMBERS,
        "time": time.time(),
        "step": place.step,
        "recorded": place.recorded,
        "phase": phase,
        "module": calls[-1].node if calls else None,
        "calls": [call.facts() for call in calls],
        "place": None if own is None else _line(own),
        "variables": [] if own is None or interrupted else _variables(own),
        "batch": [] if interrupted else _batch(frames, calls),
        "parameters": [],
        "needs": [],
        "unused": [*_unused(chain, calls)],
        "stack": [_line(v) for v in [v for v in frames if not v.is_plumbing][-_MOST_FRAMES:]],
        "memory": memory_limit() if interrupted else memory_facts(),
        "lesson": None if interrupted else lesson_about(iter(chain)),
    }
    if interrupted:
        return document
    held = [*names.parameters_of(calls[-1].module, calls[-1].node)] if calls else []
    for model in place.models():
        names.look_at(model)
    if phase in ("forward", "loss", "other"):
        document["ended"] = ended_before(frames, names)
    if outputs is not None:
        found, used = _needs(error, outputs, names)
        document["needs"] = found
        document["module"] = document["module"] or next((n["module"] for n in found), None)
        held += used
    if phase == "optimizer":
        misfits = [*_misfits(frames, names)]
        held += misfits
        if misfits:
            document["module"] = document["module"] or misfits[0][0].rpartition(".")[0]
    document["parameters"] = tensors.described(held)
    _note_gradients(document["parameters"], dict(held))
    return document


def _told(error: BaseException) -> dict[str, Any]:
    """Return the type, the message and the notes of an error."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": _message(error)}
    notes = object.__getattribute__(error, "__dict__").get("__notes__")
    if isinstance(notes, list):
        texts = [note for note in notes if type(note) is str]
        told |= {"notes": [_shortened(text) for text in texts[:_MOST_NOTES]]} if texts else {}
    return told


def _reasons(chain: list[BaseException]) -> Iterator[dict[str, Any]]:
    """Yield the errors behind the first one, and how each of them led to the one before."""
    for error, reason in islice(pairwise(chain), _MOST_REASONS):
        how = "cause" if error.__cause__ is reason else "context"
        yield _told(reason) | {"how": how}


def _members(error: BaseException, number: str = "") -> Iterator[tuple[str, BaseException]]:
    """Yield the errors in a group, or in groups that caused an error, numbered such as "2.1"."""
    groups = [each for each in _chain(error) if isinstance(each, BaseExceptionGroup)]
    count = 0
    for group in groups:
        for member in BaseExceptionGroup.exceptions.__get__(group):
            count += 1
            yield f"{number}{count}", member
            yield from _members(member, f"{number}{count}.")


def _member(number: str, error: BaseException) -> dict[str, Any]:
    """Return what a member of a group says, where it was raised, and what led to it."""
    own = _place([*visits(error.__traceback__)])
    return _told(error) | {
        "number": number,
        "place": None if own is None else _line(own),
        "because": [*_reasons([*_chain(error)])],
    }


def _message(error: BaseException) -> str:
    """Return the message; of a long one, the beginning, and how much is missing."""
    return _shortened(message_of(error))


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    lines = text[_LONGEST:].count("\n")
    more = f", {lines:,} lines" if lines else ""
    return f"{text[:_LONGEST]}\n... {len(text) - _LONGEST:,} more characters{more} ..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__ or current.__cause__ is not None
        current = current.__cause__ if hidden else current.__context__


def _frames(chain: list[BaseException]) -> list[Visit]:
    """Return the frames of the error, or of the first cause or member raised in a module.

    If a `forward` has caught an error of a module that it calls, and has raised another one from
    it, the frames of the cause follow, because they lead to the module that failed.
    """
    parts = [[*visits(error.__traceback__)] for error in chain]
    first = next((i for i, part in enumerate(parts) if _in_module(part)), 0)
    frames = parts[first]
    for part in parts[first + 1 :]:
        frames = _continued(frames, part)
    return frames


def _continued(frames: list[Visit], cause: list[Visit]) -> list[Visit]:
    """Return the frames of an error, followed by those of its cause if they go deeper."""
    caught = cause[0].frame if cause else None  # where the traceback of a cause begins
    at = next((i for i, visit in enumerate(frames) if visit.frame is caught), None)
    if at is None or _in_module(frames[at + 1 :]) or not _in_module(cause):
        return frames
    return [*frames[:at], *cause]


def _in_module(frames: list[Visit]) -> bool:
    return any(visit.calls_module for visit in frames)


# -- modules -----------------------------------------------------------------------------------


def _calls(frames: list[Visit], names: Names, *, reads: bool) -> Iterator[_Call]:
    """Yield the module calls in progress, outermost first.

    Args:
        frames: the frames of the error.
        names: names the modules.
        reads: whether to read the tensors in them.
    """
    call: _Call | None = None
    outermost: nn.Module | None = None
    for visit in frames:
        if visit.is_plumbing and not visit.calls_module:
            continue
        found = variables(visit.frame, lambda known, at=visit: _seen(known, at, reads=reads))  # type: ignore[misc]
        if found is None:
            continue
        module, inputs, inside = found
        outermost = outermost or module
        if visit.calls_module or call is None or call.module is not module:
            call = _Call(module, names.module(module, within=outermost), "", inputs)
            yield call
        if not visit.calls_module:
            call.method, call.variables = visit.frame.f_code.co_name, inside


_Seen = tuple[nn.Module, list[dict[str, Any]], list[dict[str, Any]]]


def _seen(known: Mapping[str, Any], visit: Visit, *, reads: bool) -> _Seen | None:
    """Return the module whose method a frame runs, its inputs, and the frame's tensors."""
    module = own_module(known, visit.frame)
    if module is None:
        return None
    if not reads:
        return module, [], []
    if visit.calls_module:
        given = {"input": known.get("args", ()), **(known.get("kwargs") or {})}
        return module, tensors.described(_named(given)), []
    return module, [], [] if visit.in_torch else _tensors_of(known, visit)


def _named(given: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    with quiet():
        for name, value in given.items():
            found = [*tensors.in_value(name, value)]
            if name == "input" and len(found) == 1:
                found = [("input", found[0][1])]
            named += found
    return named


def _tensors_of(known: Mapping[str, Any], visit: Visit) -> list[dict[str, Any]]:
    """Return the tensors in a frame's variables, those in the running statement first."""
    words = visit.words
    items = [(name, value) for name, value in [*known.items()] if not name.startswith("__")]
    items.sort(key=lambda item: item[0] not in words)  # stable
    found = []
    with quiet():
        for name, value in items:
            if is_module(value) or isinstance(value, type):
                continue
            if isinstance(value, (list, tuple, dict)) and len(value) > _LONG:
                continue  # such as a whole data set
            found += [*tensors.in_value(name, value)]
            if len(found) >= tensors.MOST:
                break
    return tensors.described(found)


# -- where -------------------------------------------------------------------------------------


def _phase(frames: list[Visit], calls: list[_Call]) -> tuple[str, Any]:
    """Return what the program was doing, and the outputs of a backward pass."""
    phase, visit = phase_of(frames)
    if phase == "backward" and visit is not None:
        return phase, variables(visit.frame, lambda known: known.get("t_outputs"))
    if phase == "forward":
        return ("loss" if _is_loss(calls[-1].module if calls else None) else phase), None
    if phase != "other":
        return phase, None
    own = _place(frames)
    if own is not None and any(_is_loss_function(visit) for visit in frames):
        return "loss", None
    return ("forward" if calls else "other"), None


def _is_loss(module: nn.Module | None) -> bool:
    bases = () if module is None else type(module).__mro__
    return any(base.__module__ == "torch.nn.modules.loss" for base in bases)


def _is_loss_function(visit: Visit) -> bool:
    name = visit.frame.f_code.co_name
    return visit.file.endswith("functional.py") and ("loss" in name or "entropy" in name)


def _place(frames: list[Visit]) -> Visit | None:
    """Return the innermost frame of the program's own code or, if it has none, of a library."""
    outside = [visit for visit in frames if not (visit.in_torch or visit.is_plumbing)]
    own = [visit for visit in outside if not visit.file.startswith(_LIBRARIES)]
    found = own or outside
    return found[-1] if found else None


def _line(visit: Visit) -> dict[str, Any]:
    text = visit.text[:_LINE]
    return {"file": visit.file, "line": visit.line, "function": visit.function, "text": text}


def _variables(visit: Visit) -> list[dict[str, Any]]:
    return variables(visit.frame, lambda known: _tensors_of(known, visit)) or []


def _batch(frames: list[Visit], calls: list[_Call]) -> list[dict[str, Any]]:
    """Return the tensors in the training loop: the model's inputs and the loop's variables."""
    given = next((call.inputs for call in calls if call.inputs), [])
    loop = next((v for v in reversed(frames) if not v.in_torch and not _is_method(v)), None)
    around = [] if loop is None else _variables(loop)
    known = [fact | {"name": ""} for fact in around]
    return [*around, *(fact for fact in given if fact | {"name": ""} not in known)]


def _is_method(visit: Visit) -> bool:
    return visit.ours or bool(
        variables(visit.frame, lambda known: own_module(known, visit.frame) is not None)
    )


# -- parameters --------------------------------------------------------------------------------


def _needs(
    error: BaseException, outputs: Any, names: Names
) -> tuple[list[dict[str, Any]], list[tuple[str, Tensor]]]:
    """Return the operations that needed an overwritten tensor, and their parameters."""
    found, used = [], []
    for need in needs(message_of(error), [tensor for _, tensor in tensors_in(outputs)]):
        own = [(name, leaf) for leaf in need.leaves if (name := names.parameter(leaf)) is not None]
        before = [name for leaf in need.before if (name := names.parameter(leaf)) is not None]
        used += own
        module = own[0][0].rpartition(".")[0] if own else None
        found.append(
            {
                "operation": need.operation,
                "value": need.value,
                "module": module,
                "parameters": [name for name, _ in own],
                "after": before[0].rpartition(".")[0] if before else None,
                "traceback": need.traceback[:_LONGEST],
            }
        )
    return found, used


def _misfits(frames: list[Visit], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a failing optimizer whose gradient or states have other shapes.

    They have if a parameter got other values after the optimizer had created its states. The
    parameter comes first, then what does not fit it.
    """
    optimizer = next((o for visit in frames if (o := variables(visit.frame, _optimizer))), None)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.parameter(parameter) or "parameter"
            parts = {"gradient": parameter.grad, **optimizer.state.get(parameter, {})}
            wrong = [
                (f"{name} ({part})", tensor)
                for part, tensor in parts.items()
                if isinstance(tensor, Tensor)
                and tensor.dim() == parameter.dim()  # others, such as a count of steps, may differ
                and tensor.shape != parameter.shape
            ]
            if wrong:
                yield name, parameter
                yield from wrong


def _optimizer(known: Mapping[str, Any]) -> Optimizer | None:
    own = known.get("self")
    return own if isinstance(own, Optimizer) else None


def _unused(chain: list[BaseException], calls: list[_Call]) -> Iterator[str]:
    """Yield the names of the parameters that DDP lists by number."""
    found = next((m for error in chain if (m := _UNUSED.search(message_of(error)))), None)
    wrapper = next((call.module for call in calls), None)
    if found is None or wrapper is None:
        return
    trained = [name for name, p in wrapper.named_parameters() if p.requires_grad]
    for number in map(int, found[1].split()):
        if number < len(trained):
            yield trained[number].removeprefix("module.")


def _note_gradients(facts: list[dict[str, Any]], held: Mapping[str, Tensor]) -> None:
    """Add to each parameter whether it has a gradient."""
    for fact in facts:
        tensor = held.get(fact["name"])
        if tensor is not None and tensor.is_leaf:
            fact["has_grad"] = tensor.grad is not None
