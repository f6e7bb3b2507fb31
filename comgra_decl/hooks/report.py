"""The report on a run: what was declared and recorded. It is logged and stored with the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from comgra_decl.hooks.limits import is_used_uncalled, why_silent
from comgra_decl.spec.globs import compile_text

if TYPE_CHECKING:
    import torch

    from comgra_decl.hooks.functions.beside import Beside
    from comgra_decl.hooks.optimizers import Optimizers
    from comgra_decl.hooks.plans import ModulePlan, Part, TensorPlan, TopPlan
    from comgra_decl.hooks.tensors.capture import StepCapture
    from comgra_decl.records import StepInfo
    from comgra_decl.spec import Spec

_log = logging.getLogger("comgra_decl")


class Reporter:
    """Builds the documents `modules` and `report`, and rebuilds them when their content changes."""

    def __init__(self, spec: Spec) -> None:
        self._warnings: dict[str, None] = {}
        self._choices: dict[str, str] = {}
        self._choice_count = 0
        self._last: dict[str, Any] = {}  # the newest report
        self._attached: dict[str, Any] = {}  # further documents, until they are stored
        self._is_priced = False
        self._described: WeakKeyDictionary[TopPlan, list[dict[str, Any]]] = WeakKeyDictionary()
        # the modules of each model, and those not called so far
        self._silent: WeakKeyDictionary[TopPlan, tuple[list[ModulePlan], list[ModulePlan]]]
        self._silent = WeakKeyDictionary()
        self.beside: Beside | None = None  # records functions and annotated tensors
        # called with classes of modules that were used without being called
        self.on_uncalled: Callable[[type], None] = lambda _: None
        self.price: Callable[[], dict[str, Any] | None] = lambda: None  # the cost of records
        self.optimizers: Optimizers | None = None  # tells which parameters are optimised

        self.follow(spec)

    def follow(self, spec: Spec) -> None:
        """From this call on, report what `spec` declares."""
        self._entries: dict[str, set[str]] = {
            name: set(entry.capture) for name, entry in spec.nodes.items()
        }
        self._states: dict[str, object] = {}
        self._silence_reported = False

    def warn(self, message: str) -> None:
        """Log a warning once and store it for the report."""
        if message not in self._warnings:
            self._warnings[message] = None
            _log.warning(message)

    def say(self, what: str, sentence: str) -> None:
        """Log a choice; store the newest choice about `what` for the report."""
        self._choices[what] = sentence
        self._choice_count += 1
        _log.info(sentence)

    def attach(self, name: str, content: Any) -> None:
        """Store a document with the next record, or at the end of the run."""
        self._attached[name] = content

    def documents(
        self, tops: Collection[TopPlan], capture: StepCapture, info: StepInfo, *, trained: int
    ) -> dict[str, Any]:
        """Return the documents that changed with this record; usually none.

        Args:
            tops: the models.
            capture: the record.
            info: facts about it.
            trained: a number that increases whenever a parameter is frozen or trained again.
        """
        attached, self._attached = self._attached, {}
        if self._state(tops, capture, trained) == self._states.get(info.mode):
            return attached
        report = self._report(tops, capture)
        if info.mode == "train":
            self._warn_of(report, tops)
        report["warnings"] = list(self._warnings)
        report |= self._priced()
        self._last = report
        self._states[info.mode] = self._state(tops, capture, trained)
        names: dict[int, str] = {}  # of parameters, which several models may share
        modules = [m for top in tops for m in self._modules(top, names)]
        return {"modules": modules, "report": report, **attached}

    @property
    def late_documents(self) -> dict[str, Any]:
        """The documents that changed after the last record."""
        last = self._last or self._empty()
        report = {**last, "warnings": list(self._warnings), **self._priced()}
        return self._attached | ({} if report == self._last else {"report": report})

    def _empty(self) -> dict[str, Any]:
        """Return the report on a run without records, in which no pattern is known to match."""
        nothing = {"matched": 0, "fired": 0, "written": 0, "never_called": []}
        return {
            "entries": {name: dict(nothing) for name in self._entries},
            "unmatched": [],
            "never_called": [],
            "refused": {},
            "choices": dict(self._choices),
        }

    def _priced(self) -> dict[str, Any]:
        price = self.price()
        return {} if price is None else {"price": price}

    def _modules(self, plan: TopPlan, seen: dict[int, str]) -> list[dict[str, Any]]:
        """Describe the modules in a model; if it no longer exists, describe their last state.

        Args:
            plan: the model.
            seen: names of parameters by id; those of this model are added.
        """
        if plan.top.module() is not None or plan not in self._described:
            known = {id(own.tensor): own.trainable for own in plan.parameters}
            held = {} if self.optimizers is None else self.optimizers.holders()
            before = self._described.get(plan, [])
            now = [_describe(plan, part, seen, known, held) for part in plan.parts]
            self._described[plan] = now if held else _with_holders(now, before)
        return self._described[plan]

    def _state(self, tops: Collection[TopPlan], capture: StepCapture, trained: int) -> object:
        """Return a value that changes whenever the documents change."""
        fired = sum([self._count_fired(top) for top in tops])
        beside = None if self.beside is None else self.beside.state
        refused, warned = len(capture.refused), len(self._warnings)
        self._is_priced = self._is_priced or self.price() is not None
        priced, count = self._is_priced, self._choice_count
        held = () if self.optimizers is None else self.optimizers.sizes()
        return (len(tops), fired, beside, refused, warned, count, trained, priced, held)

    def _count_fired(self, top: TopPlan) -> int:
        """Return how many modules have been called, looking only at those that had not been."""
        modules, silent = self._silent.get(top, ([], []))
        if modules is not top.modules:  # the model has changed
            silent = top.modules
        if silent:
            silent = [plan for plan in silent if not plan.fired]
            self._silent[top] = top.modules, silent
        return len(top.modules) - len(silent)

    def _report(self, tops: Collection[TopPlan], capture: StepCapture) -> dict[str, Any]:
        entries = {name: self._entry(name, tops) for name in self._entries}
        return {
            "entries": entries,
            "unmatched": [*_unmatched(tops), *self._unmatched_beside(tops)],
            "never_called": sorted(
                {p for entry in entries.values() for p in entry["never_called"]}
            ),
            "refused": dict(capture.refused),
            "choices": dict(self._choices),
        }

    def _entry(self, name: str, tops: Collection[TopPlan]) -> dict[str, Any]:
        wanted = self._entries[name]
        plans = [p for t in tops for p in t.modules if name in p.capture.entries]
        # by module: two models of one class share a name until one of them is numbered
        slots = {id(p.module): _output_slots(p, wanted) for p in plans}
        for top in tops:
            for parameter in top.parameters:
                if name in parameter.capture.entries:
                    slots[id(parameter.module)] += _parameter_slots(parameter, wanted)
            for buffer in top.buffers:
                if name in buffer.capture.entries and "buffer" in wanted:
                    slots[id(buffer.module)] += buffer.slot.id >= 0
        outputs = wanted & {"output", "output_grad", "input", "input_grad"}
        matched, fired, written = (0, 0, 0) if self.beside is None else self.beside.written(name)
        return {
            "matched": len(plans) + matched,
            "fired": sum(count > 0 for count in slots.values()) + fired,
            "written": sum(slots.values()) + written,
            "never_called": [p.node() for p in plans if outputs and _is_silent(p)],
        }

    def _unmatched_beside(self, tops: Collection[TopPlan]) -> list[str]:
        """Return warnings about patterns that match no function or annotation."""
        if self.beside is None:
            return []
        names, models = self.beside.names, [top.selection.unmarked for top in tops]
        return [
            *self.beside.unmatched(),
            *(
                sentence
                for pattern, sentence in (models[0] if models else {}).items()
                if all(pattern in other for other in models)
                and not any(compile_text(pattern).fullmatch(name) for name in names)
            ),
        ]

    def _warn_of(self, report: dict[str, Any], tops: Collection[TopPlan]) -> None:
        for sentence in report["unmatched"]:
            self.warn(sentence)
        plans = [] if self._silence_reported else [plan for top in tops for plan in top.modules]
        self._silence_reported = True
        called = {id(plan.module()) for plan in plans if plan.fired}  # possibly in another model
        silent = [plan for plan in plans if _is_silent(plan) and id(plan.module()) not in called]
        for plan in silent:
            module = plan.module()
            if module is not None and is_used_uncalled(module):
                self.on_uncalled(type(module))
        models = [model for top in tops if (model := top.top.module()) is not None]
        for sentence in why_silent(silent, models):
            self.warn(sentence)
        for name, reason in report["refused"].items():
            self.warn(f"{name} is not recorded: {reason}")


def _is_silent(plan: ModulePlan) -> bool:
    """Return whether a module was not called although a call was expected.

    The outermost module is exempt, because programs may call only its parts: Lightning calls a
    module's `training_step`, never the module.
    """
    return plan.can_fire and not plan.fired and plan.path != ""


def _output_slots(plan: ModulePlan, wanted: set[str]) -> int:
    """Return the number of series of a module's outputs and inputs that an entry requests."""
    count = 0
    for (role, _), slot in plan.slots.items():
        side = "input" if role.startswith("input") else "output"
        gradients = sum(name.startswith("grad") for name in slot.passes)
        count += (slot.id >= 0) + len(slot.passes) - gradients if side in wanted else 0
        count += gradients if f"{side}_grad" in wanted else 0
    return count


def _parameter_slots(plan: TensorPlan, wanted: set[str]) -> int:
    kinds = [_captured(pass_) for pass_ in plan.slot.passes]
    count = (plan.slot.id >= 0 and "parameter" in wanted) + sum(k in wanted for k in kinds)
    return count + (len(plan.states) if "optimizer_state" in wanted else 0)


def _captured(pass_: str) -> str:
    """Return the capture option that a parameter's pass, other than forward, belongs to."""
    if pass_.startswith("update"):
        return "update"
    return "parameter_grad_raw" if pass_.startswith("grad:raw") else "parameter_grad"


def _unmatched(tops: Collection[TopPlan]) -> list[str]:
    """Return the warnings about patterns that match nothing in any of the models.

    The part of a warning before its first semicolon names the pattern; the rest suggests possible
    matches.
    """
    models = [top for top in tops if top.top.parametric] or list(tops)
    if not models:  # a program of functions and named tensors only
        return []
    found = [{text.partition(";")[0]: text for text in t.selection.unmatched} for t in models]
    return [text for key, text in found[0].items() if all(key in other for other in found)]


def _describe(
    plan: TopPlan,
    part: Part,
    seen: dict[int, str],
    trainable: dict[int, bool | None],
    held: Mapping[int, list[int]],
) -> dict[str, Any]:
    parameters = {}
    node = plan.top.node(part.path)
    module = part.module()
    several = any(number > 0 for numbers in held.values() for number in numbers)
    for name, parameter in [] if module is None else module._parameters.items():
        if parameter is not None:
            parameters[name] = {
                "shape": list(parameter.shape),
                "count": parameter.numel(),
                "trainable": parameter.requires_grad or bool(trainable.get(id(parameter))),
                "optimized": id(parameter) in held,
                "tied_to": seen.get(id(parameter)),
            }
            if several:
                parameters[name]["holders"] = held.get(id(parameter), [])
            seen.setdefault(id(parameter), f"{node}.{name}")
    described = {"path": part.path, "node": node, "class": part.class_name}
    return {**described, "parameters": parameters, **_settings(module)}


def _with_holders(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep which parameters optimizers held: a function that trains may have returned since."""
    known = {(m["node"], name): p for m in before for name, p in m["parameters"].items()}
    for module in now:
        for name, facts in module["parameters"].items():
            old = known.get((module["node"], name), {})
            facts.update({key: old[key] for key in ("optimized", "holders") if key in old})
    return now


_SETTINGS = (
    "batch_first",
    "bidirectional",
    "dropout",
    "eps",
    "groups",
    "momentum",
    "p",
    "track_running_stats",
)
"""Module attributes that are settings; all other attributes are ignored."""


def _settings(module: torch.nn.Module | None) -> dict[str, Any]:
    """Return a module's settings and the shapes of its buffers, if it has any."""
    if module is None:
        return {}
    given = {name: module.__dict__.get(name) for name in _SETTINGS}
    settings = {k: v for k, v in given.items() if isinstance(v, (bool, int, float))}
    buffers = {k: list(v.shape) for k, v in module._buffers.items() if v is not None}
    found = {"settings": settings, "buffers": buffers}
    return {name: content for name, content in found.items() if content}
