"""Compare the records of a script with what an untraced process observed."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

import comgra_decl as comgra
from benchmarks.scripts.catalogue import Entry
from benchmarks.scripts.running import Started, ends, last
from comgra_decl.rules import diagnose

_TOLERANCE = 2e-4  # relative: float32 sums depend on the order
_FIRST, _BACKOFF = 10, 1.1  # of the `debug` preset, as in its file
_MOST_ITERATIONS = 256  # schedule.max_iterations

_CALLS = ("forward", "no_grad")
"""Passes of calls with gradients enabled and disabled (teachers, target networks)."""

_MOST = 8


@dataclass
class Promise:
    """One promise for one script: the number of comparisons, and the failures."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, right: bool, text: str) -> None:
        """Count one comparison, and add `text` to the failures unless `right`."""
        self.compared += 1
        if not right:
            self.wrong.append(text)


@dataclass
class Verdict:
    """Result for one script; without a verdict, `skipped` or `broken` is the reason."""

    name: str
    commit: str = ""
    skipped: str = ""
    broken: str = ""
    promises: dict[str, Promise] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Whether every promise is kept."""
        kept = all(not promise.wrong for promise in self.promises.values())
        return not self.broken and not self.skipped and kept


# -- neutral ---------------------------------------------------------------------------------------


def neutral(entry: Entry, plain: Started, traced: Started) -> Promise:
    """Compare two starts: digests after each step, exit codes, lines and files."""
    found = Promise()
    found.check(plain.code == traced.code, f"exit code {plain.code}, traced {traced.code}")
    if entry.bits:
        ones = sorted(p["steps"] for p in plain.processes if p["steps"])
        others = sorted(p["steps"] for p in traced.processes if p["steps"])
        if entry.runs > 1:  # the assignment of training runs to processes is random
            ones, others = ([sorted(s[1:] for p in o for s in p)] for o in (ones, others))
        lengths = [len(steps) for steps in ones], [len(steps) for steps in others]
        found.check(lengths[0] == lengths[1], f"optimizer steps: {lengths[0]}, traced {lengths[1]}")
        for one, other in zip(ones, others, strict=False):
            _same_steps(found, one, other)
        _same_output(found, plain.output, traced.output)
        _same_files(found, plain.files, traced.files)
    return found


def _same_steps(found: Promise, one: list[Any], other: list[Any]) -> None:
    if not one or not other:
        return
    names = ("optimizer", "parameters", "gradients", "states", "generators")[-len(one[0]) :]
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        parted = [name for name, x, y in zip(names, a, b, strict=True) if x != y]
        found.check(not parted, f"step {number}: {', '.join(parted)} differ")
        if parted:
            return


def _same_output(found: Promise, one: list[str], other: list[str]) -> None:
    for a, b in zip(one, other, strict=False):
        found.check(a == b, f"printed {a[:80]!r}, traced {b[:80]!r}")
        if a != b:
            return
    found.check(len(one) == len(other), f"{len(one)} lines printed, traced {len(other)}")


def _same_files(found: Promise, one: dict[str, str], other: dict[str, str]) -> None:
    for name in sorted(one.keys() | other.keys()):
        found.check(one.get(name) == other.get(name), f"the file {name} differs")


# -- what the script did ---------------------------------------------------------------------------


@dataclass
class _Step:
    """What happens in one step, which may contain several optimizer steps."""

    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    grads: dict[int, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    roots: dict[int, list[list[bool]]] = field(default_factory=lambda: defaultdict(list))
    detailed: bool = True


class Oracle:
    """What an untraced process observed, step by step.

    Args:
        answer: output of the watcher.
        entry: catalogue entry, which defines what counts as a step.
    """

    def __init__(self, answer: dict[str, Any], entry: Entry) -> None:
        self._answer = answer
        self.modules: list[dict[str, Any]] = answer["modules"]
        self.parameters: dict[int, list[list[Any]]] = {
            int(k): v for k, v in answer["parameters"].items()
        }
        self.edges = [tuple(edge) for edge in answer["edges"]]
        self.to_loss: list[int] = answer["to_loss"]
        self.optimizers: list[str] = answer["optimizers"]
        self.segments: list[dict[str, Any]] = answer["segments"]
        self.steps, self.rest = self._grouped(entry)

    def trainings(self, entry: Entry) -> list[Oracle]:
        """Return an oracle for each training run in the process, which has its own optimizer.

        Calls between two of them belong to the one that calls these modules in its later steps.
        """
        found = []
        optimizers = [segment["optimizer"] for segment in self.segments]
        for optimizer in dict.fromkeys(number for number in optimizers if number is not None):
            places = [at for at, number in enumerate(optimizers) if number == optimizer]
            own = {m for at in places[1:] or places for m in self.segments[at]["calls"]}
            parts = [_calling(own, self.segments[at]) for at in places]
            for after in self.segments[places[-1] + 1 :][:1]:
                ended = {**after, "optimizer": None, "losses": [], "grads": {}, "leaves": []}
                parts.append(_calling(own, ended))
            found.append(Oracle({**self._answer, "segments": parts}, entry))
        return found

    def follow(self, losses: Sequence[int]) -> int:
        """Use the run's steps, for a program whose steps are not defined in another way.

        Args:
            losses: number of losses in each step of the run. A step ends with the first optimizer
                step after that many losses.

        Returns:
            Number of optimizer steps that do not belong to any step of the run.
        """
        self.steps, self.rest = [], _Step()
        left = 0
        for number, segment in enumerate(self.segments):
            _add(self.rest, segment, detailed=number < 60)
            left += segment["optimizer"] is not None
            at = len(self.steps)
            ends = segment["optimizer"] is not None and at < len(losses)
            if ends and len(self.rest.losses) >= losses[at]:
                self.steps.append(self.rest)
                self.rest, left = _Step(), 0
        return left

    def _grouped(self, entry: Entry) -> tuple[list[_Step], _Step]:
        """Return the steps, and what follows the last one."""
        groups: list[_Step] = []
        current, stepped, last = _Step(), set[int](), -1
        for number, segment in enumerate(self.segments):
            _add(current, segment, detailed=number < 60)
            optimizer = segment["optimizer"]
            if optimizer is None:
                continue
            stepped.add(optimizer)
            if entry.steps == "each":
                whole = True
            elif last < 0 and len(stepped) == len(self.optimizers):
                whole, last = True, optimizer
            else:
                whole = optimizer == last
            if whole:
                groups.append(current)
                current = _Step()
        return groups, current

    @property
    def updates(self) -> int:
        """Number of backward passes, which are the steps of a script without an optimizer."""
        return sum(len(segment["losses"]) for segment in self.segments)

    @cached_property
    def trained(self) -> set[int]:
        """Modules that have a parameter with a gradient, or contain such a module."""
        owned = {p for s in self.segments for p in (*map(int, s["grads"]), *s["leaves"])}
        found: set[int] = set()
        for number in owned:
            for module, _ in self.parameters.get(number, ()):
                found.update(m for m, _ in self.modules[module]["above"])
                found.add(module)
        return found

    def evaluated(self) -> list[int]:
        """Return the steps before which a trained model was called in evaluation mode."""
        found = []
        for number, step in enumerate([*self.steps, self.rest]):
            for module, ways in step.roots.items():
                if module in self.trained and any(not training for training, _, _ in ways):
                    found.append(number)
                    break
        return found

    def evaluations_possible(self) -> set[int]:
        """Return the steps before which any module was called in evaluation mode.

        After the last step, calls without gradients count as well.
        """
        every = enumerate([*self.steps, self.rest])
        found = {n for n, s in every if any(c["eval"] for c in s.calls.values())}
        without = any(call["plain"] for call in self.rest.calls.values())
        return found | ({len(self.steps)} if without else set())


def _calling(modules: Collection[Any], segment: dict[str, Any]) -> dict[str, Any]:
    """Return a segment with only the calls of these modules."""
    only = {
        name: {key: value for key, value in segment[name].items() if key in modules}
        for name in ("calls", "roots")
    }
    return {**segment, **only}


def _add(step: _Step, segment: dict[str, Any], *, detailed: bool) -> None:
    step.detailed = step.detailed and detailed
    step.losses += segment["losses"]
    for number, norm in segment["grads"].items():
        step.grads[int(number)].append(norm)
    for number, ways in segment["roots"].items():
        step.roots[int(number)] += ways
    for key, call in segment["calls"].items():
        number = int(key)
        if number not in step.calls:
            step.calls[number] = dict(call)
            continue
        mine = step.calls[number]
        for count in ("grad", "plain", "eval", "fed"):
            mine[count] += call[count]
        for which in ("mean", "trained"):
            mine[which] = call[which] if mine[which] is None else mine[which]


def scheduled(steps: int) -> list[int]:
    """Return the indices of the steps that `debug` records: ten, then increasingly rare ones."""
    found = list(range(min(_FIRST, steps)))
    at, gap = _FIRST, 0
    while at < steps:
        found.append(at)
        at += math.floor(math.pow(_BACKOFF, gap))
        gap += 1
    return found


# -- the record ------------------------------------------------------------------------------------


class Names:
    """Finds the node of each module that the untraced process observed.

    A run lists its modules model by model, each beginning with the model itself. Several models of
    one class appear in the order of their first calls.
    """

    def __init__(self, run: Any, oracle: Oracle) -> None:
        self._groups = _models(run.modules)
        self._oracle = oracle
        self._taken: dict[int, int] = {}
        self._free: dict[str, list[int]] = defaultdict(list)
        for number, group in enumerate(self._groups):
            self._free[group[""]["class"]].append(number)
        self._match()

    def _match(self) -> None:
        """Assign each model of the run to the module of its class that was called first."""
        for step in [*self._oracle.steps, self._oracle.rest]:
            for number in step.calls:
                for above, path in reversed(self._oracle.modules[number]["above"]):
                    self._take(above, path, self._oracle.modules[number]["class"])

    def _take(self, above: int, path: str, kind: str) -> None:
        """Assign a model to the first free group of its class that has such a part."""
        if above in self._taken:
            return
        free = self._free.get(self._oracle.modules[above]["class"], [])
        for group in free:
            part = self._groups[group].get(path.replace("_orig_mod.", ""))
            if part is not None and part["class"] == kind:
                self._taken[above] = group
                free.remove(group)
                return
        if above not in self._oracle.trained:  # a model loaded for a test instead of another
            kind = self._oracle.modules[above]["class"]
            known = self._taken.items()
            alike = [group for o, group in known if self._oracle.modules[o]["class"] == kind]
            if alike:
                self._taken[above] = alike[-1]

    def of(self, number: int) -> dict[str, Any] | None:
        """Return the run's entry for a module, or None."""
        mine = self._oracle.modules[number]
        for above, path in mine["above"] or [(number, "")]:
            group = self._taken.get(above)
            if group is None:
                continue
            found: dict[str, Any] | None = self._groups[group].get(path.replace("_orig_mod.", ""))
            if found is not None and found["class"] == mine["class"]:
                return found
        return self._only(mine)

    def _only(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Return the only part of that class and path, where each call creates a new wrapper."""
        parts = [
            group[path]
            for above, path in mine["above"]
            for group in self._groups
            if group[""]["class"] == self._oracle.modules[above]["class"] and path in group
        ]
        return parts[0] if len(parts) == 1 and parts[0]["class"] == mine["class"] else None

    def made(self, number: int) -> dict[str, Any] | None:
        """Return any module of the class, for one created within a call and kept nowhere."""
        mine = self._oracle.modules[number]
        if len(mine["above"]) > 1 or number in self._oracle.trained:
            return None
        alike = [group[""] for group in self._groups if group[""]["class"] == mine["class"]]
        return alike[0] if alike else None

    def is_below(self, number: int, paths: Sequence[str]) -> bool:
        """Whether a module is, or is inside, one of these parts of a model."""
        known = (path for _, path in self._oracle.modules[number]["above"])
        return any(f"{path}.".startswith(f"{part}.") for path in known for part in paths)

    def title(self, number: int) -> str:
        """Return the title of a module: its longest path, and its class."""
        mine = self._oracle.modules[number]
        paths = [path for _, path in mine["above"]]
        return f"{max(paths, key=len, default='') or '(model)'} ({mine['class']})"


def _models(modules: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    groups: list[dict[str, dict[str, Any]]] = []
    for module in modules:
        if not module["path"] or not groups:
            groups.append({})
        groups[-1][module["path"].replace("_orig_mod.", "")] = module
    taken: Counter[str] = Counter()
    for group in groups:
        if "" not in group:
            group[""] = {"class": "", "node": "", "path": ""}
        for path, module in group.items():
            taken[module["node"]] += 1
            turn = taken[module["node"]]
            if turn > 1:  # the slots of a second module of that name are numbered, its entry is not
                group[path] = {**module, "node": f"{module['node']}#{turn}"}
    return groups


# -- correctness -----------------------------------------------------------------------------------


def complete(verdict: Verdict, entry: Entry, run: Any, oracle: Oracle) -> None:
    """Judge records, modules, numbers, gradients, losses and graph of one run."""
    names = Names(run, oracle)
    records = verdict.promises.setdefault("records", Promise())
    if entry.steps == "seen":
        losses = _losses_of(run)
        left = oracle.follow([len(losses[step]) for step in range(max(losses, default=-1) + 1)])
        broken = left >= max(len(oracle.optimizers), 1)  # otherwise the last round was interrupted
        records.check(not broken, f"{left} optimizer steps do not belong to any step of the run")
    steps = len(oracle.steps) if entry.steps != "backward" else oracle.updates
    trained = sorted(set(run.steps.tolist()))
    verdict.facts |= {"steps": steps, "records": len(trained), "series": len(run.slots)}
    wanted = sorted({*scheduled(steps), *_sudden(run, steps)})
    records.check(trained == wanted, _sequence("train records", trained, wanted))
    _evaluations(records, verdict, run, oracle, entry)
    _modules(verdict, entry, run, names, oracle)
    if entry.steps == "backward":
        _gradients_of_all(verdict, run, oracle, names)
    elif not entry.races:
        _numbers(verdict, entry, run, oracle, names)
        _gradients(verdict, run, oracle, names)
        _losses(verdict, run, oracle)
    _graph(verdict, entry, run, oracle, names)


def _sudden(run: Any, steps: int) -> list[int]:
    """Return the steps that a run says it recorded because the loss had jumped."""
    found = (
        re.search(r"schedule\.sudden: .* steps (\d+) to (\d+) are", t) for t in run.notes().text
    )
    spans = (range(int(match[1]), int(match[2]) + 1) for match in found if match)
    return [step for span in spans for step in span if step < steps]


def _sequence(what: str, seen: list[int], wanted: list[int]) -> str:
    missing, extra = sorted(set(wanted) - set(seen)), sorted(set(seen) - set(wanted))
    text = f"{what}: {len(seen)} instead of {len(wanted)}"
    text += f"; missing {_some(missing)}" if missing else ""
    return text + (f"; unexpected {_some(extra)}" if extra else "")


def _some(values: Iterable[Any], most: int = _MOST) -> str:
    listed = list(values)
    text = ", ".join(str(value) for value in listed[:most])
    return text + (f", ... ({len(listed)})" if len(listed) > most else "")


def _evaluations(
    records: Promise, verdict: Verdict, run: Any, oracle: Oracle, entry: Entry
) -> None:
    table = run.records
    seen = sorted(set(table.step[table["mode"] == "eval"].tolist()))
    verdict.facts["evaluations"] = len(seen)
    wanted = oracle.evaluated()
    verdict.facts["evaluations wanted"] = len(wanted)
    if entry.steps == "backward":  # the untraced process cannot distinguish their steps
        records.check(bool(seen) == bool(wanted), f"eval records: {seen}")
        return
    missing = [step for step in wanted if step not in seen]
    unfounded = [step for step in seen if step not in oracle.evaluations_possible()]
    records.check(not missing, f"eval records missing at {_some(missing)} (seen: {_some(seen)})")
    records.check(not unfounded, f"eval records without an evaluation at {_some(unfounded)}")


def _modules(verdict: Verdict, entry: Entry, run: Any, names: Names, oracle: Oracle) -> None:
    """Check that each module with parameters that the script calls has an output.

    Modules called only after the training (a model loaded for a test) are exempt.
    """
    found = verdict.promises.setdefault("modules", Promise())
    slots, modules = run.slots, run.modules
    outputs = slots[slots.role.str.startswith("output") & slots["pass"].isin(_CALLS)]
    recorded = set(outputs.node)
    called = {n for step in oracle.steps for n in step.calls}
    called |= {n for n in oracle.rest.calls if n in oracle.trained or not oracle.steps}
    if entry.forward:
        owners = {m for listed in oracle.parameters.values() for m, _ in listed}
        called |= {n for n in owners if oracle.modules[n]["class"] in entry.forward}
    for number in sorted(called):
        if oracle.modules[number]["parameters"] and not names.is_below(number, entry.evaluated):
            node = names.of(number) or names.made(number)
            title = names.title(number)
            if node is None:
                reported = any(_is_stray(oracle, number, text) for text in run.report["warnings"])
                found.check(reported, f"{title} is called but not in the record")
            else:
                found.check(node["node"] in recorded, f"{title} is called but has no output")
    verdict.facts["modules"] = found.compared
    listed = Counter(module["node"] for module in modules)
    twice = [node for node, number in listed.items() if number > 1]
    found.check(not twice, f"the run lists several modules as {_some(twice, 3)}")


def _is_stray(oracle: Oracle, number: int, warning: str) -> bool:
    """Whether a warning reports that a module does not belong to any model."""
    facts = oracle.modules[number]
    names = warning.partition("not registered in it: ")[2].partition(".")[0].split(", ")
    return len(facts["above"]) <= 1 and facts["class"] in names


def _numbers(verdict: Verdict, entry: Entry, run: Any, oracle: Oracle, names: Names) -> None:
    """Compare the mean of each module's first output in a step, or in a call with gradients."""
    found = verdict.promises.setdefault("numbers", Promise())
    slots = run.slots
    outputs = slots[slots["pass"].isin(_CALLS) & slots.role.str.startswith("output")]
    role_of = outputs.drop_duplicates("node").set_index("node").role
    wrong: Counter[str] = Counter()
    table: dict[tuple[str, str], Any] = {}
    for number, module, seen in _measured(run, oracle, entry):
        place = names.of(module)
        if place is None or place["node"] not in role_of:
            continue
        node = place["node"]
        means = [seen["mean"], *([seen["trained"]] if seen["trained"] else [])]
        for pass_ in _CALLS:
            if (node, pass_) not in table:
                table[node, pass_] = _series(run, node, "mean", role_of[node], pass_)
        value = table[node, "forward"].get(number, math.nan)
        if math.isnan(value):
            value = table[node, "no_grad"].get(number, math.nan)
        found.compared += 1
        if not any(_is_mean(value, mean, size) for mean, size in means):
            wrong[node] += 1
            if wrong[node] == 1:
                text = f"{node}: mean {value:.6g} instead of {means[-1][0]:.6g}"
                found.wrong.append(f"{text} at step {number}")
    _shorten(found)


def _measured(run: Any, oracle: Oracle, entry: Entry) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (step, module, observation) for each mean that can be compared with the record.

    Excludes modules called more often than is recorded, losses that evaluations also compute, and
    classes whose `forward` is called directly, which hooks do not observe.
    """
    evaluated = set(oracle.evaluated())
    for number, step in enumerate(oracle.steps):
        if number not in run.steps or not step.detailed:
            continue
        for module, seen in step.calls.items():
            facts = oracle.modules[module]
            loss = not facts["parameters"] and len(facts["above"]) <= 1
            beside = (loss and number in evaluated) or facts["class"] in entry.forward
            if seen["mean"] is not None and seen["grad"] <= _MOST_ITERATIONS and not beside:
                yield number, module, seen


def _is_mean(value: float, mean: float, size: float) -> bool:
    """Whether a recorded mean is correct, for values with mean magnitude `size`."""
    close = abs(value - mean) <= _TOLERANCE * max(size, abs(mean)) + 1e-12
    return close or (math.isnan(mean) and math.isnan(value)) or mean == value


def _series(run: Any, node: str, statistic: str, role: str, pass_: str) -> dict[int, float]:
    """Return one statistic of the first call in each step, by step; empty without a series."""
    try:
        series = run.slot(node, role=role, of=pass_).series(statistic)
    except KeyError:
        return {}
    return {int(step): float(value) for step, value in series.items()}


def _gradients(verdict: Verdict, run: Any, oracle: Oracle, names: Names) -> None:
    """Compare the gradient norm of each parameter that has a gradient when its optimizer steps."""
    found = verdict.promises.setdefault("gradients", Promise())
    tables: dict[tuple[str, str], dict[int, float]] = {}
    wrong: dict[int, str] = {}
    for number, step in enumerate(oracle.steps):
        if number not in run.steps:
            continue
        for parameter, norms in step.grads.items():
            if not oracle.parameters.get(parameter):
                continue  # the preset does not record tensors outside modules
            found.compared += 1
            if parameter not in wrong:
                exact = [norm for norm in norms if norm is not None] if step.detailed else []
                text = _gradient(
                    run, names, tables, oracle.parameters.get(parameter, []), (number, exact)
                )
                if text:
                    wrong[parameter] = text
    found.wrong = list(wrong.values())
    _shorten(found)


def _gradient(
    run: Any,
    names: Names,
    tables: dict[tuple[str, str], dict[int, float]],
    owners: list[list[Any]],
    seen: tuple[int, list[float]],
) -> str:
    """Return what is wrong with the gradient of a parameter at one step, or "" if correct."""
    number, exact = seen
    places = [(names.of(module), name) for module, name in owners]
    known = [(place["node"], name) for place, name in places if place is not None]
    if not known:
        return f"{names.title(owners[0][0])}.{owners[0][1]}: its gradient is not in the record"
    for place in known:
        if place not in tables:
            tables[place] = _series(run, place[0], "l2", place[1], "grad")
    values = [tables[place].get(number, math.nan) for place in known]
    if all(math.isnan(v) for v in values) and not any(math.isnan(e) for e in exact):
        return f"{'.'.join(known[0])}: no gradient at step {number}"
    if exact and not _any_close(values, exact):
        norm = f"gradient's norm {values[0]:.6g} instead of {exact[0]:.6g}"
        return f"{'.'.join(known[0])}: {norm} at step {number}"
    return ""


def _any_close(values: list[float], exact: list[float]) -> bool:
    return any(
        abs(v - e) <= 1e-3 * abs(e) + 1e-12 or (math.isnan(v) and math.isnan(e)) or v == e
        for v in values
        for e in exact
    )


def _gradients_of_all(verdict: Verdict, run: Any, oracle: Oracle, names: Names) -> None:
    """Check that each parameter reached by backward has a gradient, without an optimizer."""
    found = verdict.promises.setdefault("gradients", Promise())
    slots = run.slots
    graded = slots[(slots["pass"].str.startswith("grad")) & (slots.kind == "parameter")]
    recorded = set(zip(graded.node, graded.role, strict=True))
    for parameter in sorted({p for s in oracle.segments for p in s["leaves"]}):
        owners = oracle.parameters.get(parameter, [])
        places = [(names.of(m), n) for m, n in owners]
        known = [(place["node"], name) for place, name in places if place is not None]
        title = ".".join(known[0]) if known else f"parameter {parameter}"
        found.check(any(p in recorded for p in known), f"{title}: its gradient is not recorded")
    _shorten(found)


def _losses(verdict: Verdict, run: Any, oracle: Oracle) -> None:
    """Compare the losses on which backward was called, for every step, recorded or not."""
    found = verdict.promises.setdefault("losses", Promise())
    recorded = _losses_of(run)
    for number, step in enumerate(oracle.steps):
        wanted = [loss for loss in step.losses if loss is not None]
        seen = recorded.get(number, [])
        every = all(any(_equal(loss, value) for value in seen) for loss in wanted[:200])
        found.check(every, f"step {number}: losses {_listed(seen)} instead of {_listed(wanted)}")
    _shorten(found, most=2)


def _losses_of(run: Any) -> dict[int, list[float]]:
    kpis = run.kpis()
    kpis = kpis[kpis["name"].str.startswith("loss")]
    if "type" in kpis:
        kpis = kpis[kpis["type"] != "eval"]
    recorded: dict[int, list[float]] = defaultdict(list)
    for step, value in zip(kpis.step, kpis.value, strict=True):
        recorded[int(step)].append(float(value))
    return recorded


def _equal(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= 1e-5 * max(abs(a), abs(b))


def _listed(values: list[float]) -> str:
    return _some([f"{value:.6g}" for value in values], 3) or "none"


def _shorten(found: Promise, most: int = 12) -> None:
    if len(found.wrong) > most:
        found.wrong = [*found.wrong[:most], f"and {len(found.wrong) - most} more"]


# -- the graph -------------------------------------------------------------------------------------


def _graph(verdict: Verdict, entry: Entry, run: Any, oracle: Oracle, names: Names) -> None:
    """Check that the graph has all of autograd's connections, and that no node is isolated."""
    found = verdict.promises.setdefault("graph", Promise())
    structures = [run.structure(int(step)) for step in run.steps[:3]]
    edges: set[tuple[str, str]] = set()
    inputs, targets, losses, present = set[str](), set[str](), set[str](), set[str]()
    for structure in structures:
        if structure is None:
            continue
        keys = [key.node for key in structure.keys]
        edges |= {(keys[a], keys[b]) for a, b, _ in structure.edges if keys[a] != keys[b]}
        present |= {n for n, kind in zip(keys, structure.kinds, strict=True) if kind != "parameter"}
        for kind, into in (("input", inputs), ("target", targets), ("loss", losses)):
            into |= {n for n, k in zip(keys, structure.kinds, strict=True) if k == kind}
    graph = nx.DiGraph(list(edges))
    graph.add_nodes_from(present)
    verdict.facts |= {"nodes": len(present), "edges": len(edges)}
    found.check(bool(losses), "there is no loss")
    reaching = set(losses).union(*(nx.ancestors(graph, loss) for loss in losses))
    for name in sorted(inputs):
        found.check(name in reaching, f"{name} has no path to a loss")
    if entry.target:
        found.check(bool(targets & reaching), "no target has a path to a loss")
    _fed(found, graph, oracle, names)
    _autograd(found, graph, oracle, names)
    for island in nx.weakly_connected_components(graph):
        found.check(bool(island & losses), f"isolated nodes: {_some(sorted(island), 4)}")
    _shorten(found)


def _fed(found: Promise, graph: Any, oracle: Oracle, names: Names) -> None:
    """Check that models called by the program with tensors receive them from other nodes."""
    for number in {n for s in oracle.steps[:3] for n, call in s.calls.items() if call["fed"]}:
        parts = {
            node["node"]
            for other, module in enumerate(oracle.modules)
            if number in [above for above, _ in module["above"]]
            and (node := names.of(other)) is not None
            and node["node"] in graph
        }
        entering = any(u not in parts for part in parts for u in graph.predecessors(part))
        if parts:
            found.check(entering, f"nothing enters {names.title(number)}")


def _autograd(found: Promise, graph: Any, oracle: Oracle, names: Names) -> None:
    below: dict[str, set[str]] = {}
    for one, other in oracle.edges:
        source, sink = names.of(one), names.of(other)
        if source is None or sink is None or source["node"] == sink["node"]:
            continue
        a, b = source["node"], sink["node"]
        if a not in graph or b not in graph:
            continue  # `_modules` reports missing modules
        if a not in below:
            below[a] = nx.descendants(graph, a)
        joined = b in below[a] or (_same(oracle, one, other) and a in nx.descendants(graph, b))
        found.check(joined, f"{a} has no path to {b}")


def _same(oracle: Oracle, one: int, other: int) -> bool:
    """Whether one module contains the other: a container returns its last child's output."""
    held = {m for m, _ in oracle.modules[one]["above"]}
    return other in held or one in {m for m, _ in oracle.modules[other]["above"]}


# -- messages --------------------------------------------------------------------------------------


def messages(verdict: Verdict, run: Any, oracle: Oracle, traced: Started) -> None:
    """Store messages and findings; check that no called module is reported as never called."""
    found = verdict.promises.setdefault("said", Promise())
    times = Counter(n for step in oracle.steps for n in step.calls)
    usual = [n for n, number in times.items() if 2 * number > len(oracle.steps)]
    names = Names(run, oracle)
    called = {node["node"] for n in usual if (node := names.of(n)) is not None}
    untrue = sorted(set(run.report.get("never_called", [])) & called)
    found.check(not untrue, f"reported as never called, but called: {_some(untrue)}")
    verdict.messages += [
        line for line in traced.ours if "recording to" not in line and "Traceback" not in line
    ]
    faults = [
        line for line in traced.ours if "has stopped" in line or "because of an error" in line
    ]
    found.check(not faults, _some(faults, 2))
    for finding in diagnose(run).findings:
        verdict.findings.append(
            {
                "rule": finding.rule,
                "severity": str(getattr(finding.severity, "value", finding.severity)),
                "message": finding.message[:300],
            }
        )


def _several(
    verdict: Verdict, entry: Entry, runs: list[Any], oracles: list[Oracle], traced: Started
) -> None:
    """Judges each run in a process with several runs by the training that it recorded."""
    left = [training for oracle in oracles for training in oracle.trainings(entry)]
    records = verdict.promises["records"]
    records.check(len(left) == len(runs), f"{len(left)} training runs in {len(runs)} runs")
    facts: Counter[str] = Counter()
    for run in runs:
        losses = _losses_of(run)
        mine = next((training for training in left if _follows(losses, training)), None)
        records.check(mine is not None, f"no training has the losses of {run.name}")
        if mine is None:
            continue
        left.remove(mine)
        complete(verdict, entry, run, mine)
        messages(verdict, run, mine, traced)
        for name in ("steps", "records", "series", "evaluations", "evaluations wanted"):
            facts[name] += verdict.facts[name]
    verdict.facts |= facts


def _follows(losses: dict[int, list[float]], training: Oracle) -> bool:
    """Whether the losses of a run match those of a training run, step by step."""
    steps = [[loss for loss in step.losses if loss is not None] for step in training.steps]
    return all(
        any(_equal(loss, value) for value in losses.get(number, []))
        for number, step in enumerate(steps)
        for loss in step
    )


def judge(entry: Entry, watched: Started, plain: Started, traced: Started, runs: Path) -> Verdict:
    """Return the verdict on three starts of a script."""
    verdict = Verdict(entry.name, commit=entry.commit)
    verdict.seconds = {"plain": round(plain.seconds, 1), "traced": round(traced.seconds, 1)}
    if plain.code not in ends(entry):
        verdict.broken = f"ends with {plain.code} without tracing: {last(plain.errors)}"
        return verdict
    verdict.promises["neutral"] = neutral(entry, plain, traced)
    verdict.facts["optimizer steps"] = sum(len(p["steps"]) for p in plain.processes)
    folders = sorted(path.parent for path in runs.rglob("trace.ocdbt"))
    records = verdict.promises.setdefault("records", Promise())
    records.check(len(folders) == entry.runs, f"{len(folders)} runs instead of {entry.runs}")
    oracles = [Oracle(answer, entry) for answer in watched.processes]
    oracles = [one for one in oracles if one.steps or one.updates]
    if traced.code not in ends(entry):
        verdict.messages.append(last(traced.errors))
    if not folders or not oracles:
        return verdict
    opened = [comgra.open_run(folder) for folder in folders]
    if entry.runs > 1 and any(len(oracle.trainings(entry)) > 1 for oracle in oracles):
        _several(verdict, entry, opened, oracles, traced)
        return verdict
    opened.sort(key=lambda run: -len(run.records))
    oracles.sort(key=lambda oracle: -len(oracle.steps))
    for run, oracle in zip(opened[: len(oracles)], oracles, strict=False):
        complete(verdict, entry, run, oracle)
        messages(verdict, run, oracle, traced)
    return verdict
