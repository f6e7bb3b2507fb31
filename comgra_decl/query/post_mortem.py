"""Describe how a run's program ended: with an error, or because the process was killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from comgra_decl.store import Reader
from comgra_decl.store.last_seen import last_seen

from .ranks.heartbeats import ENDED_EARLY
from .ranks.reader import open_reader

if TYPE_CHECKING:
    from .run import Run

_MOST_TENSORS = 8
_MOST_FRAMES = 12
_MOST_STEPS = 10
_MOST_RANKS = 8
_NEARLY = 0.9
_MOST_LINES = 40  # of a message
"""Share of the available memory above which a killed process probably ran out of memory."""

LAST_SEEN = "Last seen"
"""Title of the part about a process that was killed."""

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
    "loss": "in the loss",
    "data": "while loading data",
    "other": "outside the model",
}


@dataclass(frozen=True)
class Ending:
    """How a program ended, if it did not end normally.

    Attributes:
        headline: one sentence: what happened, in which step and where.
        parts: titles and lines of text, most important first.
        content: the post-mortem as stored; empty if the process was killed.
        failed: whether this is a failure; False if the user interrupted the program.
    """

    headline: str
    parts: list[tuple[str, list[str]]] = field(default_factory=list)
    content: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = True


def ending_of(run: Run) -> Ending | None:
    """Return how a run's program ended; None if it ended normally or is still running.

    If there are several ranks, it is the ending of the one that stopped first.
    """
    first = run.first_stopped if len(run.ranks) > 1 and run.state in ENDED_EARLY else None
    if first is not None:
        return _of_ranks(run, first)
    content = run.document("post_mortem")
    if content is not None:
        return _failed(content, run)
    if run.state == "stopped" and run.error is None:
        return _killed(run)
    return None


def _of_ranks(run: Run, first: str) -> Ending:
    """Return how the rank that stopped first ended, preceded by the last steps of all ranks."""
    known = run.heartbeats
    times = dict(zip(run.ranks, known["seen"].tolist(), strict=True))
    stopped = [rank for rank in times if known["state"][rank] in ENDED_EARLY]
    own = run.rank(min(stopped, key=times.__getitem__)).ending
    lines = [
        f"rank {rank}: {row['state']}, step {row['step']}, "
        f"{datetime.fromtimestamp(row['seen'], UTC).astimezone():%Y-%m-%d %H:%M:%S}"
        for rank, row in known.sort_values("seen").head(_MOST_RANKS).iterrows()
    ]
    if len(known) > _MOST_RANKS:
        lines.append(f"and {len(known) - _MOST_RANKS} more")
    part = ("Last seen, earliest first", lines)
    if own is None:
        return Ending(first, [part])
    return Ending(f"{first}: {own.headline}", [part, *own.parts], own.content, failed=own.failed)


# -- a program that raised an error ------------------------------------------------------------


def _failed(content: Mapping[str, Any], run: Run) -> Ending:
    parts = [
        ("What it means", _lesson(content)),
        ("The whole message", _rest(content)),
        ("Notes", _notes(content["error"])),
        ("Where", _where(content)),
        ("Errors in the group", _members(content)),
        *_facts(content),
        ("Recorded before it", _before(content, run)),
        ("Stack, innermost last", _stack(content)),
    ]
    shown = [(title, lines) for title, lines in parts if lines]
    return Ending(_headline(content), shown, content, failed=not _interrupted(content))


def _interrupted(content: Mapping[str, Any]) -> bool:
    return bool(content["error"]["type"] == "KeyboardInterrupt")


def _headline(content: Mapping[str, Any]) -> str:
    error = content["error"]
    where = _PHASES.get(content["phase"], "")
    module = "" if content["module"] is None else f" of {content['module']}"
    if content["phase"] in ("data", "other"):
        module = ""
    if _interrupted(content):
        return f"the program was interrupted at step {content['step']}, {where}{module}"
    said = _said(error)
    return f"the program failed at step {content['step']}, {where}{module}: {said}"


def _lesson(content: Mapping[str, Any]) -> list[str]:
    lesson = content["lesson"]
    if lesson is None:
        return []
    return [
        f"{lesson['title']}. {lesson['meaning']}",
        "usual causes:",
        *(f"- {cause}" for cause in lesson["causes"]),
        "what to look at:",
        *(f"- {look}" for look in lesson["look"]),
    ]


def _rest(content: Mapping[str, Any]) -> list[str]:
    """Return a message of several lines, such as one that contains the traceback of a worker."""
    lines = [line for line in content["error"]["message"].splitlines() if line.strip()]
    if len(lines) > _MOST_LINES:
        hidden = f"... {len(lines) - _MOST_LINES} lines of the stored message ..."
        lines = [*lines[:2], hidden, *lines[2 - _MOST_LINES :]]
    return lines if len(lines) > 1 else []


def _where(content: Mapping[str, Any]) -> list[str]:
    lines = []
    place = content["place"]
    if place is not None:
        lines.append(f"{place['file']}:{place['line']} in {place['function']}")
        if place["text"]:
            lines.append(f"    {place['text']}")
    if content["calls"]:
        names = (f"{call['node']} ({call['class']})" for call in content["calls"])
        lines.append("module calls in progress: " + " > ".join(names))
    return [*lines, *_reasons(content)]


def _reasons(error: Mapping[str, Any]) -> list[str]:
    """Return what led to an error: its cause, or what the program was handling; and so on."""
    lines = []
    for each in error["because"]:
        how = "while handling" if each.get("how") == "context" else "caused by"
        lines += [f"{how} {_said(each)}", *(f"  note: {line}" for line in _notes(each))]
    return lines


def _notes(error: Mapping[str, Any]) -> list[str]:
    return [line for note in error.get("notes", ()) for line in note.splitlines() if line.strip()]


def _members(content: Mapping[str, Any]) -> list[str]:
    """Return the errors in a group, those in groups within it, and where each was raised."""
    lines = []
    for each in content.get("members", ()):
        place = each["place"]
        where = "" if place is None else f", {place['file']}:{place['line']} in {place['function']}"
        lines.append(f"{each['number']}. {_said(each)}{where}")
        lines += [f"   {line}" for line in _reasons(each)]
        lines += [f"   note: {line}" for line in _notes(each)]
    return [*lines, "and more"] if content.get("more_members") else lines


def _said(error: Mapping[str, Any]) -> str:
    first = _first_line(error["message"])
    return f"{error['type']}: {first}" if first else str(error["type"])


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts with the facts, starting with those that explain this error."""
    deciding = (content["lesson"] or {}).get("decides", [])
    order = [*deciding, *(name for name in _PARTS if name not in deciding)]
    for name in order:
        if name in _PARTS:
            title, lines = _PARTS[name]
            yield title, lines(content)


def _inputs(content: Mapping[str, Any]) -> list[str]:
    lines = []
    for call in content["calls"][-2:]:
        head = f"{call['node']} ({call['class']})"
        lines += [f"{head}, {line}" for line in tensor_lines(call["inputs"])]
    return lines


def _ended(content: Mapping[str, Any]) -> list[str]:
    lines = []
    for each in content.get("ended", ()):
        name = each["operation"].removesuffix("Backward0")
        output = each["output"]
        if each["node"] is not None:
            name += f" of {each['node']}"
        elif each["after"] is not None:
            name += f" after {each['after']}"
        told = "output not kept" if output is None else tensor_text({**output, "name": "output"})
        lines.append(f"{name}, {told}")
    return lines


def _needs(content: Mapping[str, Any]) -> list[str]:
    lines = []
    for need in content["needs"]:
        where = ""
        if need["module"] is not None:
            where = f" of {need['module']}"
        elif need["after"] is not None:
            where = f", called after {need['after']}"
        lines.append(f"the backward pass of {need['operation']}{where} needs its `{need['value']}`")
    return lines


def _memory(content: Mapping[str, Any]) -> list[str]:
    known = content["memory"].get("host") is not None
    return [memory_text(content["memory"], past=True)] if known else []


def _unused(content: Mapping[str, Any]) -> list[str]:
    return list(content["unused"])


_Lines = Callable[[Mapping[str, Any]], list[str]]
_PARTS: dict[str, tuple[str, _Lines]] = {
    "needs": ("Operations that needed the overwritten tensor", _needs),
    "unused": ("Parameters without a gradient", _unused),
    "inputs": ("Inputs of the last calls", _inputs),
    "ended": ("Operations that had ended, the last ones first", _ended),
    "variables": ("Variables in the failing function", lambda c: tensor_lines(c["variables"])),
    "parameters": ("Parameters involved", lambda c: tensor_lines(c["parameters"])),
    "batch": ("The batch", lambda c: tensor_lines(c["batch"])),
    "memory": ("Memory", _memory),
}


def _before(content: Mapping[str, Any], run: Run) -> list[str]:
    step = content["step"]
    steps = [int(number) for number in run.steps if number <= step]
    if not steps:
        return ["no step was recorded before the error"]
    listed = ", ".join(map(str, steps[-_MOST_STEPS:]))
    more = "..., " if len(steps) > _MOST_STEPS else ""
    itself = "" if content["recorded"] else "; the failing step was not due to be recorded"
    return [f"steps {more}{listed}{itself}"]


def _stack(content: Mapping[str, Any]) -> list[str]:
    return [
        f"{frame['file']}:{frame['line']} in {frame['function']}: {frame['text']}".rstrip(": ")
        for frame in content["stack"][-_MOST_FRAMES:]
    ]


def tensor_lines(facts: list[Mapping[str, Any]]) -> list[str]:
    """Return a line for each of the first tensors in a list."""
    lines = [tensor_text(fact) for fact in facts[:_MOST_TENSORS]]
    more = len(facts) - _MOST_TENSORS
    return [*lines, f"and {more} more"] if more > 0 else lines


def tensor_text(fact: Mapping[str, Any]) -> str:
    """Return one line: `x: float32 [5, 8] on cpu, requires grad; min -1, max 2, mean 0, std 1`."""
    shape = ", ".join(map(str, fact["shape"]))
    text = f"{fact['name']}: {fact['dtype']} [{shape}] on {fact['device']}"
    if fact["requires_grad"]:
        text += ", requires grad"
    if fact.get("has_grad") is False:
        text += ", has no gradient"
    numbers = [f"{n} {fact[n]:.4g}" for n in ("min", "max", "mean", "std") if n in fact]
    if fact.get("nonfinite"):
        numbers.append(f"{fact['nonfinite']} not finite")
    if "read" in fact:
        numbers.append(f"read from {fact['read']} of its elements")
    return f"{text}; {', '.join(numbers)}" if numbers else text


# -- a process that was killed -----------------------------------------------------------------


def _killed(run: Run) -> Ending | None:
    seen = last_seen(run.path)
    steps = [int(step) for step in (*run.steps[-1:], *([] if seen is None else [seen["step"]]))]
    after = f" at or after step {max(steps)}" if steps else ""
    reader = open_reader(run.path)
    if isinstance(reader, Reader) and reader.is_left:
        return Ending(
            "the process that recorded this run is still running, but no longer writes to this "
            f"folder{after}: this is a copy of a run in progress, or recording has ended",
            failed=False,
        )
    headline = f"the process ended without finishing the run{after}"
    if seen is None:
        return Ending(f"{headline}, or this is a copy from before it finished")
    when = datetime.fromtimestamp(seen["time"], UTC).astimezone()
    lines = [f"last seen at step {int(seen['step'])}, {when:%Y-%m-%d %H:%M:%S}"]
    if len(steps) > 1 and steps[0] > steps[1]:
        lines.append(f"last record: step {steps[0]}")
    if "host" in seen:
        lines.append(memory_text(seen, past=True))
    full = seen.get("limit") and seen.get("used", 0) >= _NEARLY * seen["limit"]
    why = ", probably because memory ran out" if full else ""
    return Ending(f"{headline}{why}", [(LAST_SEEN, lines)])


def memory_text(memory: Mapping[str, Any], *, past: bool = False) -> str:
    """Return one line about memory usage, given facts in bytes.

    Args:
        memory: the facts.
        past: whether the process is gone.
    """
    uses, are, take = ("used", "were", "took") if past else ("uses", "are", "take")
    parts = [f"the process {uses} {_gb(memory['host'])}"]
    if memory.get("limit"):
        parts.append(f"{_gb(memory.get('used', 0))} of {_gb(memory['limit'])} {are} in use")
    if memory.get("device") is not None and memory.get("device_total"):
        parts.append(
            f"tensors {take} {_gb(memory['device'])} of {_gb(memory['device_total'])} on the device"
        )
    return ", ".join(parts)


def _gb(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
