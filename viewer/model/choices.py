"""Options of the selectors: runs, types, roles, iterations, statistics, samples, colours."""

from __future__ import annotations

from dataclasses import dataclass

from comgra_decl.records import AGGREGATES
from comgra_decl.viewer.model.catalogue import RunEntry
from comgra_decl.viewer.model.edge_paint import EFFECTS
from comgra_decl.viewer.model.findings import RULE, rule_label
from comgra_decl.viewer.model.labels import BATCH_HELP, BATCH_LABELS, STATISTIC_HELP, pass_label
from comgra_decl.viewer.model.painting import colours
from comgra_decl.viewer.model.ranks import without_rank
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a field."""

    value: str
    label: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """One selector; `style` is "menu", "buttons", "actions", "slider" or "number".

    Numbers range from `low` to `high`. `help` explains the selector under the pointer.
    """

    name: str
    label: str
    value: str
    options: tuple[Option, ...]
    help: str
    style: str = "menu"
    low: int = 0
    high: int = 0


Groups = tuple[tuple[str, tuple[Field, ...]], ...]


def run_choice(entries: tuple[RunEntry, ...], chosen: str) -> Field:
    """Return the run selector, newest runs first within their groups."""
    chosen = without_rank(chosen)
    options = [Option(entry.name, _run_label(entry), entry.group) for entry in entries]
    if all(option.value != chosen for option in options):
        options.insert(0, Option(chosen, chosen or "no runs yet"))
    return Field("run", "Run", chosen, tuple(options), "Runs in the viewer's folder")


def choices(
    view: RunView, at: Selection, colour: str, scale: str, runs: Field, *, measure: str = "raw"
) -> Groups:
    """Return all selectors for the current selection, in three groups."""
    shown = (
        _statistics(view, at), _batch(view, at), _scale(scale), _measure(measure),
        _colours(view, colour),
    )  # fmt: skip
    return (
        ("Run", (runs, *_ranks(view), _types(view, at))),
        ("Tensor", _tensor(view, at)),
        ("Shown", shown),
    )


def _run_label(entry: RunEntry) -> str:
    if not entry.readable:
        return f"{entry.label} \u00b7 unreadable"
    notes = [entry.state] if entry.state in ("live", "failed", "stopped") else []
    notes += ["no records yet"] if entry.empty else []
    return " \u00b7 ".join([entry.label, *notes])


def _ranks(view: RunView) -> tuple[Field, ...]:
    """Return the rank selector if there are several ranks."""
    if len(view.ranks) < 2:
        return ()
    options = [Option("", f"all {len(view.ranks)} combined")]
    options += [Option(str(rank), f"rank {rank} only") for rank in view.ranks]
    missing = view.whole.run.missing_ranks
    help_ = 'A process of distributed training; "all" combines the batches of all processes'
    help_ += f". Nothing was recorded on rank {', '.join(map(str, missing))}" if missing else ""
    chosen = "" if view.number is None else str(view.number)
    return (Field("rank", "Ranks", chosen, tuple(options), help_),)


def _types(view: RunView, at: Selection) -> Field:
    options = tuple(Option(t, type_label(view, t)) for t in view.types())
    return Field(
        "type", "Step type", at.type, options, "Which type of steps to show: train, eval, ..."
    )


def type_label(view: RunView, type_: str) -> str:
    """Return the name of a type of execution for menus."""
    return type_ or ("all training steps" if len(view.run.steps) else "all evaluations")


def _tensor(view: RunView, at: Selection) -> tuple[Field, ...]:
    roles = tuple(Option(role, role) for role in view.roles(at.node))
    numbers = tuple(Option(str(i), str(i)) for i in view.iterations(at.node, at.role))
    fields = [
        Field("role", "Role", at.role, roles, "Which of the node's tensors to show: output, ..."),
        Field("iteration", "Iteration", str(at.iteration), numbers,
              "Which of the node's calls within the step to show, starting at 0"),
    ]  # fmt: skip
    passes = view.other_passes(at.node, at.role, at.iteration)
    if len(passes) > 1:
        options = tuple(Option(p, pass_label(p)) for p in passes)
        fields.append(
            Field(
                "gradient",
                "Gradient",
                at.gradient,
                options,
                "Gradient shown next to the forward pass",
            )
        )
    return tuple(fields)


def _statistics(view: RunView, at: Selection) -> Field:
    names = [Option(name, name) for name in view.run.statistics]
    fits = Option("", f"automatic: {at.statistic}" if at.auto_statistic else "automatic")
    help_ = STATISTIC_HELP.get(at.statistic, at.statistic)
    help_ += ", computed per sample. Automatic selects one that suits the tensor"
    chosen = "" if at.auto_statistic else at.statistic
    return Field("statistic", "Statistic", chosen, (fits, *names), help_)


def _batch(view: RunView, at: Selection) -> Field:
    over = [Option(name, BATCH_LABELS[name], "over the batch") for name in AGGREGATES]
    numbers = range(view.run.sample_count)
    labels = dict(enumerate(view.sample_labels(at.step, at.type)))
    names = [f"Sample {i} | {labels[i]}" if i in labels else f"Sample {i}" for i in numbers]
    samples = [Option(str(i), name, "one sample") for i, name in zip(numbers, names, strict=True)]
    label = BATCH_LABELS.get(at.batch, at.batch).lower()
    fits = Option("", f"automatic: {label}" if at.auto_batch else "automatic")
    help_ = (
        f"Shown: {BATCH_HELP.get(at.batch, 'one recorded sample')}. Automatic selects what suits"
    )
    chosen = "" if at.auto_batch else at.batch
    return Field("batch", "Batch", chosen, (fits, *over, *samples), f"{help_} the tensor")


def _scale(scale: str) -> Field:
    options = (Option("linear", "linear"), Option("log", "logarithmic"))
    return Field(
        "scale", "Y axis", scale, options, "Scale of the y axis in charts over steps", "buttons"
    )


def _measure(measure: str) -> Field:
    options = (Option("raw", "recorded"), Option("relative", "relative"))
    help_ = "Values as recorded, or in standard deviations from the mean of the recorded samples"
    return Field("measure", "Values", measure, options, help_, "buttons")


def _colours(view: RunView, colour: str) -> Field:
    passes = ["forward", *view.gradient_passes()]
    options = [Option("kind", "kind")] + [Option(p, pass_label(p)) for p in passes]
    for name in colours(view, colour):
        if name.startswith(RULE):
            label = rule_label(name.removeprefix(RULE))
            options.append(Option(name, label, "findings of a rule"))
        elif name.startswith(EFFECTS):
            label = f"effects of {name.removeprefix(EFFECTS)}"
            options.append(Option(name, label, "on the edges"))
        else:
            options.append(Option(name, name))
    style = "buttons" if len(options) <= 3 else "menu"
    help_ = "Colours the nodes by kind, by statistic, or by findings at this step, or the edges"
    return Field("colour", "Graph colours", colour, tuple(options), help_, style)
