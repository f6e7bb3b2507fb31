"""All probes and checkpoints of a run, as the tracer and the step records use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from comgra_decl.hooks.probing.checkpoints import Checkpoints
from comgra_decl.hooks.probing.perturbations import Perturbations
from comgra_decl.hooks.probing.probe import InputSlot, Probe
from comgra_decl.records import INTERVENTION_CHECKS, INTERVENTION_PREFIX, PICTURE_CHECKS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from comgra_decl.hooks.plans import TopPlan
    from comgra_decl.hooks.probing.interventions import Recaller
    from comgra_decl.hooks.probing.replays import Replays
    from comgra_decl.hooks.probing.samples import KeptSamples
    from comgra_decl.hooks.stalls import OwnWork
    from comgra_decl.hooks.tensors.slots import SlotTable
    from comgra_decl.records import RawStep, StepInfo
    from comgra_decl.spec import Spec


class Probing:
    """Passes the events of a recorded training step to the probes and checkpoints.

    Args:
        spec: the declaration.
        input_slot: returns the slots of a model's inputs.
        scheduled: returns whether the step in progress will definitely be stored, rather than
            possibly kept.
        warn: called with the reason why a probe or a picture is missing.
        say: called with (probe, sentence) when a budget has chosen the gap between records.
        left: returns how many bytes the run's disk budget leaves; see `Checkpoints`.
        extra: returns whether the step in progress is recorded only because it may be replayed.
        tell: called with (intervention, sentence) about what it changes.
        attach: called with (name, content) to store a document.
        own: adds up the time that copying takes.

    Attributes:
        first: called with (node, model) before a trained model is called; None for nothing.
        single: whether a single call is recorded, which the probes follow even if it is no step.
        perturbations: copies models for experiments after the training, if the spec asks for them.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        input_slot: InputSlot,
        scheduled: Callable[[], bool],
        warn: Callable[[str], None],
        say: Callable[[str, str, str], None],
        left: Callable[[int], float | None],
        extra: Callable[[], bool],
        tell: Callable[[str, str], None],
        attach: Callable[[str, Any], None],
        own: OwnWork,
    ) -> None:
        self._own = own
        self._checks: dict[str, Any] = {}  # of the step that has just ended
        self._known: dict[str, Any] = {}  # of the newest record of each probe
        self._effects: dict[str, Any] = {}  # of the newest record of each intervention
        self._attach = attach
        self.first: Callable[[str, nn.Module], None] | None = None
        self.single = False
        self._scheduled = scheduled
        self._checkpoints = (
            None
            if spec.checkpoints is None
            else Checkpoints(spec, left=left, extra=extra, warn=warn)
        )
        self.perturbations = Perturbations() if spec.perturbations else None
        self._probes = [
            Probe(
                name,
                spec,
                input_slot=input_slot,
                warn=warn,
                say=lambda what, text, name=name: say(f"probes.{name}.budget", what, text),  # type: ignore[misc]
                tell=lambda name, text: tell(f"interventions.{name}", text),
                check=lambda found, name=name: self._checks.update({name: found}),  # type: ignore[misc]
            )
            for name in spec.probes
        ]

    def resume(self, samples: Mapping[str, KeptSamples | str]) -> None:
        """Go on with the samples of a resumed run, by probe; a string is the reason for others."""
        for probe in self._probes:
            probe.earlier = samples.get(probe.name)

    def recall(self, recaller: Recaller) -> None:
        """Let interventions take values from records of other runs."""
        for probe in self._probes:
            probe.recall(recaller)

    def enter(
        self,
        module: nn.Module,
        plan: TopPlan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        iteration: int,
    ) -> None:
        """Handle a call to a model that is trained, before any of the model has run."""
        if self.first is not None:
            self.first(plan.top.label, module)
        with self._own:
            if self.perturbations is not None and self.perturbations.due:
                self.perturbations.enter(module, plan, args, kwargs)
            checkpoints = self._checkpoints
            if checkpoints is not None and checkpoints.due and self._scheduled():
                checkpoints.enter(module, plan, args, kwargs)
            due = [probe for probe in self._probes if probe.due]
            for probe in due if due and self._scheduled() else ():
                probe.enter(module, plan, args, kwargs, iteration=iteration, single=self.single)

    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], size: int | None
    ) -> None:
        """Handle any other call to an outermost module, such as a loss."""
        for probe in self._probes:
            probe.called(module, args, kwargs, size)

    def leave(self, output: Any) -> None:
        """Handle the output of an outermost module."""
        for probe in self._probes:
            probe.left(output)

    @property
    def following(self) -> int:
        """How many steps after the one that has ended are recorded, whatever the schedule says."""
        return 0 if self._checkpoints is None else self._checkpoints.following

    def target(self, tensor: torch.Tensor) -> None:
        """Handle a tensor with which a loss compares the output of the model."""
        if self._replays is not None:
            self._replays.target(tensor)

    def stepping(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Handle an optimizer that is about to step."""
        if self._replays is not None:
            self._replays.stepping(optimizer, closure=closure)

    def scaling(self, scaler: Any) -> None:
        """Handle a gradient scaler that is about to let an optimizer step, or to skip it."""
        if self._replays is not None:
            self._replays.scaling(scaler)

    @property
    def _replays(self) -> Replays | None:
        return None if self._checkpoints is None else self._checkpoints.replays

    def loss(self, loss: torch.Tensor) -> None:
        """Handle a tensor on which `backward` is called."""
        for probe in self._probes:
            probe.loss(loss)

    def drop(self) -> None:
        """Handle a step that is not recorded."""
        if self._checkpoints is not None:
            self._checkpoints.drop()
        for probe in self._probes:
            probe.drop()

    def finish(self) -> None:
        """Report probes that have no record at the end of the run."""
        for probe in self._probes:
            probe.finish()

    def ended(self, info: StepInfo, table: SlotTable, sink: Callable[[RawStep], None]) -> None:
        """Run the probes that are due after a step that is recorded, and emit their records."""
        if self.perturbations is not None:
            self.perturbations.ended(info.step)
        for raw in () if self._checkpoints is None else self._checkpoints.ended(info, table):
            sink(raw)
        for probe in self._probes:
            self._checks.pop(probe.name, None)
            for raw in probe.ended(info, table):
                sink(raw)
                if raw.info.type.startswith(INTERVENTION_PREFIX):
                    self._note(raw.info.type.removeprefix(INTERVENTION_PREFIX), info.step, probe)
            if probe.name in self._checks:
                self._known[probe.name] = {"step": info.step, **self._checks[probe.name]}
                self._attach(PICTURE_CHECKS, dict(self._known))

    def _note(self, intervention: str, step: int, probe: Probe) -> None:
        """Note for the rules whether an intervention had any effect."""
        nothing = probe.nothing.get(intervention)
        before = self._effects.get(intervention, {"since": step, "nothing": nothing})
        kept = (before["nothing"] is None) == (nothing is None)
        since = before["since"] if kept else step
        node, role = probe.places[intervention]
        self._effects[intervention] = {
            "step": step, "nothing": nothing, "since": since, "node": node, "role": role
        }  # fmt: skip
        self._attach(INTERVENTION_CHECKS, dict(self._effects))


def probes_anything(spec: Spec) -> bool:
    """Return whether a spec declares probes, checkpoints or perturbations."""
    return bool(spec.probes or spec.perturbations or spec.checkpoints is not None)
