"""Values that interventions take from records of other runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from comgra_decl.errors import RunNotFoundError, UnknownNameError, did_you_mean
from comgra_decl.hooks.probing.changes import Recorded
from comgra_decl.store.location import location

if TYPE_CHECKING:
    from comgra_decl.hooks.probing.passes import Call
    from comgra_decl.query import Run
    from comgra_decl.spec.interventions import RecordedSpec
    from comgra_decl.store.location import Location


class Recalling:
    """Reads tensors from records of runs, each only once.

    The first reading comes before training, so that later changes of these runs have no effect.

    Args:
        own: where the run that is being recorded is, which is never the newest run of a group; None
            if there is none.
    """

    def __init__(self, own: Location | None = None) -> None:
        self._own = own
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
        key = (source.run, source.step, type_, node, role, call.iteration, call.pass_)
        if key not in self._known:
            self._known[key] = self._read(source, type_, node, role, call)
        return self._known[key]

    def _read(self, source: RecordedSpec, type_: str, node: str, role: str, call: Call) -> Recorded:
        from comgra_decl.query.checkpoints import as_tensor  # only what reads needs pandas

        run = self._opened(source.run)
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
        slot = run.slot(node, role=role, iteration=call.iteration, of=call.pass_)
        values = as_tensor(slot.value(step, type=type_))
        labels = [
            "" if label is None else str(label) for label in run.samples(step, type=type_)["label"]
        ]
        where = f"{node or 'the model'}, {role} in {source.run} at step {step}"
        return Recorded(values, labels[: len(values)], where)

    def _opened(self, where: str) -> Run:
        """Return a run; of a group, the newest one that is not being recorded.

        Raises:
            ComgraError: there is none.
        """
        from comgra_decl.query import open_group, open_run
        from comgra_decl.query.listing import is_run

        if where not in self._runs:
            place = location(where)
            if self._own is None or is_run(place):
                self._runs[where] = open_run(where)
            else:
                runs = open_group(where).runs
                others = [each.path for each in runs if not _is_same(each.path, self._own)]
                if not others:
                    raise RunNotFoundError(
                        f"{where} contains no other run than the one that is being recorded"
                    )
                self._runs[where] = open_run(others[-1])
        return self._runs[where]


def _is_same(one: Location, other: Location) -> bool:
    if isinstance(one, Path) and isinstance(other, Path):
        return one.absolute() == other.absolute()
    return one == other
