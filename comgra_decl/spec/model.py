"""The spec as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PrivateAttr, model_validator

from comgra_decl.errors import did_you_mean
from comgra_decl.records import COMPUTED_PICTURES
from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.dictionaries import DictionarySpec
from comgra_decl.spec.interventions import InterventionSpec, different_objectives, unknown_probes
from comgra_decl.spec.keep import KeepSpec
from comgra_decl.spec.measured import MemorySpec, ProfileSpec
from comgra_decl.spec.nodes import NodeSpec, Selectors
from comgra_decl.spec.pictures import PictureSpec
from comgra_decl.spec.preview import Previewing, PreviewSpec
from comgra_decl.spec.probes import ProbeName, ProbeSpec
from comgra_decl.spec.rules import FindingSpec, Rules
from comgra_decl.spec.run import (
    HistogramSpec,
    KpisSpec,
    RunSpec,
    StoreSpec,
    ValuesSpec,
)
from comgra_decl.spec.samples import SamplesSpec
from comgra_decl.spec.schedule import CheckpointsSpec, ScheduleSpec
from comgra_decl.spec.sinks import Sinks
from comgra_decl.spec.stats import DEFAULT, OptIn, Statistic, in_stored_order, name_of, opt_in
from comgra_decl.spec.tokens import TokensSpec
from comgra_decl.spec.types import TypesSpec

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to an entry of the spec."""


def _without_switched_off(entries: Any) -> Any:
    """Drop entries set to null, which is how a user removes an entry from a preset."""
    if not isinstance(entries, Mapping):
        return entries
    return {name: entry for name, entry in entries.items() if entry is not None}


class Spec(SpecModel):
    """What to capture, when, and how to reduce it; saved with the run."""

    run: RunSpec = RunSpec()
    """Where to store the run."""

    nodes: Annotated[dict[str, NodeSpec], BeforeValidator(_without_switched_off)] = {}
    """What to capture. The entries have names of your choice; later entries refine earlier ones."""

    exclude: Selectors = []
    """Modules to omit from every entry: globs over module paths, or mappings as in `select`."""

    stats: Annotated[list[Statistic], AfterValidator(in_stored_order)] = list(DEFAULT)
    """Statistics over the value dims of each sample; `nonfinite` is always included. Each entry is
    a name or a mapping, such as `{name: singular_value, on: [parameter, output]}`, `{name: q999,
    quantile: 0.999}` or `{name: mine, _target_: package.module.function}`."""

    histogram: HistogramSpec | None = HistogramSpec()
    """Histograms of all recorded tensors; null for none."""

    samples: SamplesSpec = SamplesSpec()
    """Which elements in the batch are recorded individually."""

    values: ValuesSpec = ValuesSpec()
    """Limits on the tensors whose values are kept."""

    preview: Previewing = PreviewSpec()
    """How often to keep a small preview of each tensor that is recorded without its values; false
    for never.
    """

    schedule: ScheduleSpec = ScheduleSpec()
    """Which steps to record."""

    types: TypesSpec = TypesSpec()
    """How to determine the type of execution of a step."""

    keep: KeepSpec | None = None
    """Steps to keep based on their results; null for none."""

    probes: Annotated[dict[ProbeName, ProbeSpec], BeforeValidator(_without_switched_off)] = {}
    """The same samples at every record, passed through a copy of the model, under names of your
    choice.
    """

    pictures: Annotated[dict[ProbeName, PictureSpec], BeforeValidator(_without_switched_off)] = {}
    """Pictures of the probes' samples, such as {method: grad_cam, of: eyes, select: {class:
    Conv2d}}, under names of your choice. See `docs/pictures.md`."""

    checkpoints: CheckpointsSpec | None = None
    """Which recorded training steps to store with all parameters and buffers of the models, so that
    `comgra.look` can repeat them later; null for none. See `docs/pictures.md`."""

    interventions: Annotated[
        dict[ProbeName, InterventionSpec], BeforeValidator(_without_switched_off)
    ] = {}
    """Passes of the probes' samples with something changed in the model, such as {of: eyes, select:
    "blocks.3.mlp", do: zero}, under names of your choice. See `docs/interventions.md`."""

    dictionaries: Annotated[
        dict[ProbeName, DictionarySpec], BeforeValidator(_without_switched_off)
    ] = {}
    """Sparse autoencoders and transcoders of the probes, such as {of: eyes, select: "blocks.3",
    load: {_target_: my_project.load}}, under names of your choice. See `docs/dictionaries.md`."""

    perturbations: Bool = False
    """Whether to experiment with copies of small trained models after the last step, for rules that
    need it: changing one part of the input shows whether a model sees the tokens that it predicts,
    mixes samples, or ignores an argument. See `docs/findings.md`."""

    rules: Rules = "default"
    """Rules that watch the run: `default` for all rules with their defaults, `off` for no rules, or
    a mapping. A mapping changes individual rules, as in {dead_units: {share: 0.3}, loss_spike:
    off}, and adds your own, as in {mine: {when: "std < 1e-3", node: "blocks.*"}}. See
    `docs/rules.md`."""

    on_finding: FindingSpec = FindingSpec()
    """What happens when a rule reports a finding."""

    annotations: Bool = True
    """Whether to record the value and gradient of tensors named with `comgra.node(...)` even if no
    entry selects them. Entries with `select: {annotation: ...}` determine what is recorded for
    individual names."""

    tokens: TokensSpec | None = None
    """The tokens that ids in inputs and targets stand for; null shows the ids. See
    `docs/viewer.md`."""

    kpis: KpisSpec = KpisSpec()
    """Metrics that are stored for every step."""

    profile: ProfileSpec | None = None
    """Steps in which torch's profiler measures where the time goes; null for none."""

    memory: MemorySpec | None = None
    """Steps in which to measure what holds the memory; null for none."""

    graph: Bool = True
    """Whether to follow the dependency graph between the recorded tensors."""

    compile: Literal["eager", "observed", "auto"] = "eager"
    """How code under `torch.compile` runs in recorded steps. `eager`: without compilation.
    `observed`: as a second compiled variant that exposes its tensors. `auto`: as that variant,
    provided that it exposes everything that eager code exposes. If the variant cannot be compiled,
    the code runs eagerly, and the reason is logged and reported."""

    store: StoreSpec = StoreSpec()
    """How records are written to disk."""

    sinks: Sinks = []
    """Other tools that receive a selection of what is recorded, such as [tensorboard, {wandb:
    {project: x}}]. See `docs/bridges.md`."""

    dry_run: Bool = False
    """Whether to run only a few steps, report what would be recorded and at what cost, and then end
    the program without storing anything, as `comgra-decl plan` does."""

    enabled: Bool = True
    """Whether to record anything."""

    _expressions: dict[KeyPath, tuple[str, Any]] = PrivateAttr(default_factory=dict)

    @property
    def expressions(self) -> dict[KeyPath, tuple[str, Any]]:
        """Environment expressions as written, with their values, by key path."""
        return self._expressions

    def with_expressions(self, found: Mapping[KeyPath, tuple[str, Any]]) -> Spec:
        """Return a copy that remembers which values come from the environment."""
        copy = self.model_copy()
        copy._expressions = dict(found)  # noqa: SLF001
        return copy

    @model_validator(mode="after")
    def _trigger_statistics_are_recorded(self) -> Spec:
        problems = [] if self.keep is None else self.keep.unknown_statistics(self.statistics)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _sent_statistics_are_recorded(self) -> Spec:
        problems = [
            f"sinks[{i}].{sink.tool}.statistics: {problem}"
            for i, sink in enumerate(self.sinks)
            for problem in sink.options.unknown_statistics(self.statistics)
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _kept_steps_have_a_trigger(self) -> Spec:
        by_findings = self.on_finding.keep != "never"
        if by_findings and self.keep is None:
            raise ValueError(
                "on_finding.keep: the steps before a finding are not buffered; add `keep: {}`, or "
                "`keep: {ring: 20, when: []}` to keep steps for findings only"
            )
        if by_findings and self.rules == "off":
            raise ValueError("on_finding.keep: there are no findings, because of `rules: off`")
        if self.keep is not None and not self.keep.when and not by_findings:
            raise ValueError(
                "keep.when: must not be empty, because nothing would be kept; add a trigger such "
                "as "
                "nonfinite, or set `on_finding: {keep: error}`"
            )
        return self

    @model_validator(mode="after")
    def _pictures_have_probes(self) -> Spec:
        for name, picture in self.pictures.items():
            if name in COMPUTED_PICTURES:
                raise ValueError(
                    f"pictures.{name}: every run has a picture called {name!r}, which is computed "
                    "from its records; use another name"
                )
            if picture.of not in self.probes:
                known = ", ".join(self.probes) or "none is declared"
                raise ValueError(
                    f"pictures.{name}.of: there is no probe {picture.of!r} ({known})"
                    f"{did_you_mean(picture.of, self.probes)}"
                )
        for name, probe in self.probes.items():
            if not 1 <= probe.samples.count <= self.samples.count:
                raise ValueError(
                    f"probes.{name}.samples.count: must be between 1 and samples.count, which is "
                    f"{self.samples.count}, got {probe.samples.count}"
                    f"{'' if 'count' in probe.samples.model_fields_set else ', the default'}"
                )
            if probe.labels is not None and probe.batch is None:
                raise ValueError(
                    f"probes.{name}.labels: needs a batch; without one, the samples and their "
                    "classes come from the first training batch"
                )
        return self

    @model_validator(mode="after")
    def _interventions_have_probes(self) -> Spec:
        problems = [
            *unknown_probes("interventions", self.interventions, self.probes),
            *different_objectives(self.interventions),
            *unknown_probes("dictionaries", self.dictionaries, self.probes),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of all recorded statistics, in the order in which they are stored."""
        return tuple(name_of(entry) for entry in self.stats)

    @property
    def opt_in(self) -> list[OptIn]:
        """The statistics that need another pass over the tensors, in stored order."""
        return opt_in(self.stats)
