"""Values that interventions take from records of other runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comgra_decl.errors import UnknownNameError, did_you_mean
from comgra_decl.hooks.probing.changes import Recorded

if TYPE_CHECKING:
    from comgra_decl.hooks.probing.passes import Call
    from comgra_decl.query import Run
    from comgra_decl.spec.interventions import RecordedSpec


class Recalling:
    """Reads tensors from records of runs, each only once.

    The first reading comes before training, so that later changes of these runs have no effect.
    """

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._known: dict[tuple[object, ...], Recorded] = {}

    def __call__(self, type_: str, source: RecordedSpec, call: Call) -> Recorded:
        """Return what a run has recorded.

        Args:
            type_: the type of execution, unless `source` names one.
            source: the run and, where they are given, the step, the type and the tensor.
            call: the tensor that is changed, which stands for what `source` leaves open.

        Raises:
            ComgraError: there is no such run or record, or it does not contain the values.
        """
        type_ = source.type or type_
        node, role = source.node or call.path, source.role or call.role
        key = (source.run, source.step, type_, node, role, call.iteration)
        if key not in self._known:
            self._known[key] = self._read(source, type_, node, role, call.iteration)
        return self._known[key]

    def _read(
        self, source: RecordedSpec, type_: str, node: str, role: str, iteration: int
    ) -> Recorded:
        # only what reads a run needs pandas
        from comgra_decl.query import open_run
        from comgra_decl.query.checkpoints import as_tensor

        if source.run not in self._runs:
            self._runs[source.run] = open_run(source.run)
        run = self._runs[source.run]
        if type_ not in run.types:
            known = ", ".join(run.types)
            raise UnknownNameError(
                f"{source.run} has no records of type {type_!r}"
                f"{did_you_mean(type_, run.types) or ''}; it has {known or 'none yet'}. Choose one "
                "with `type`"
            )
        records = run.records
        steps = records["step"][records["type"] == type_]
        step = int(steps.max()) if source.step is None else source.step
        slot = run.slot(node, role=role, iteration=iteration)
        values = as_tensor(slot.value(step, type=type_))
        labels = [
            "" if label is None else str(label) for label in run.samples(step, type=type_)["label"]
        ]
        where = f"{node or 'the model'}, {role} in {source.run} at step {step}"
        return Recorded(values, labels[: len(values)], where)
