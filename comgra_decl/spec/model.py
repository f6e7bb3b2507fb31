"""The declaration as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.keep import KeepSpec
from comgra_decl.spec.nodes import NodeSpec, Selectors
from comgra_decl.spec.rules import FindingSpec, Rules
from comgra_decl.spec.run import (
    HistogramSpec,
    KpisSpec,
    RunSpec,
    StoreSpec,
    ValuesSpec,
)
from comgra_decl.spec.samples import SamplesSpec
from comgra_decl.spec.schedule import ScheduleSpec
from comgra_decl.spec.stats import DEFAULT, OptIn, Statistic, in_stored_order, name_of, opt_in
from comgra_decl.spec.types import TypesSpec


def _without_switched_off(entries: Any) -> Any:
    """An entry set to null is one that the user has taken out of a preset."""
    if not isinstance(entries, Mapping):
        return entries
    return {name: entry for name, entry in entries.items() if entry is not None}


class Spec(SpecModel):
    """What to capture, when, and how it is reduced; saved with the run."""

    run: RunSpec = RunSpec()
    """Where the run is stored."""

    nodes: Annotated[dict[str, NodeSpec], BeforeValidator(_without_switched_off)] = {}
    """What to capture, by a name of your choice; later entries refine earlier ones."""

    exclude: Selectors = []
    """What is left out of every entry: globs over module paths or mappings, as in `select`."""

    stats: Annotated[list[Statistic], AfterValidator(in_stored_order)] = list(DEFAULT)
    """Statistics over the value dims of each sample; `nonfinite` is always among them. Names, and
    mappings: `{name: singular_value, on: [parameter, output]}`, `{name: q999, quantile: 0.999}`,
    `{name: mine, _target_: package.module.function}`."""

    histogram: HistogramSpec | None = HistogramSpec()
    """Histograms of all recorded tensors; null for none."""

    samples: SamplesSpec = SamplesSpec()
    """Elements of the batch that are recorded one by one."""

    values: ValuesSpec = ValuesSpec()
    """Limits of the tensors that are kept as they are."""

    schedule: ScheduleSpec = ScheduleSpec()
    """Which steps are recorded."""

    types: TypesSpec = TypesSpec()
    """What the type of execution of a step is."""

    keep: KeepSpec | None = None
    """Steps that are kept because of what happened in them; null for none."""

    rules: Rules = "default"
    """Rules that watch the run: `default` for all with their defaults, `off` for none, or a mapping
    that changes single ones, {dead_units: {share: 0.3}, loss_spike: off}, and adds your own,
    {mine: {when: "std < 1e-3", node: "blocks.*"}}; see `docs/rules.md`."""

    on_finding: FindingSpec = FindingSpec()
    """What happens when a rule has found something."""

    annotations: Bool = True
    """Whether what the program names with `comgra.node(...)` is recorded without being selected:
    its output and gradient. Entries with `select: {annotation: ...}` say it for each name."""

    kpis: KpisSpec = KpisSpec()
    """Numbers that are kept of every step."""

    graph: Bool = True
    """Whether the dependency graph of the recorded tensors is followed."""

    compile: Literal["eager", "observed", "auto"] = "eager"
    """How code under `torch.compile` runs in recorded steps: `eager`; `observed` as a second
    compiled variant that shows its tensors; `auto` the same as long as it shows all that eager
    code does. Where there can be no such variant, eagerly, which the log and the report say."""

    store: StoreSpec = StoreSpec()
    """How records travel to the disk."""

    dry_run: Bool = False
    """Whether only a few steps are run, to say what would be caught and what it costs; the program
    ends then, and nothing is kept. The same as `comgra-decl plan`."""

    enabled: Bool = True
    """Whether anything is recorded at all."""

    @model_validator(mode="after")
    def _triggers_look_at_what_is_recorded(self) -> Spec:
        problems = [] if self.keep is None else self.keep.unknown_statistics(self.statistics)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _somebody_asks_for_what_is_held(self) -> Spec:
        by_findings = self.on_finding.keep != "never"
        if by_findings and self.keep is None:
            raise ValueError(
                "on_finding.keep: nothing holds the steps before a finding; add `keep: {}`, or "
                "`keep: {ring: 20, when: []}` where findings alone decide"
            )
        if by_findings and self.rules == "off":
            raise ValueError("on_finding.keep: there are no findings, because of `rules: off`")
        if self.keep is not None and not self.keep.when and not by_findings:
            raise ValueError(
                "keep.when: nothing would ever be kept; name what to look for, such as "
                "nonfinite, or set `on_finding: {keep: error}`"
            )
        return self

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of all recorded statistics, in stored order."""
        return tuple(name_of(entry) for entry in self.stats)

    @property
    def opt_in(self) -> list[OptIn]:
        """The statistics that look at tensors once more, in stored order."""
        return opt_in(self.stats)
