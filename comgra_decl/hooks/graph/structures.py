"""Decide when to capture the dependency graph of a step, and assign a graph to each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from comgra_decl.errors import did_you_mean
from comgra_decl.hooks import modes
from comgra_decl.hooks.graph.carried import Carried
from comgra_decl.hooks.graph.memory import Memory
from comgra_decl.hooks.graph.opaque import OpaqueCalls
from comgra_decl.hooks.graph.provenance import MOST_EDGES, Provenance

if TYPE_CHECKING:
    import torch

    from comgra_decl.hooks.tensors.slots import Slot
    from comgra_decl.records import StepInfo, Structure

_RECAPTURE_EVERY = 10
"""A dependency can change while all traced calls stay the same, so the graph is captured again in
every tenth record."""

_FOLLOWED_FIRST = 2
"""The graph of the second record is captured as well, because state carried over between steps is
visible only in two consecutive steps."""


_OVERFLOWN = (
    f"the dependency graph of a step has more than {MOST_EDGES:,} edges (each part of a residual "
    "stream depends on all parts before it), so this run records no graph. Set graph: false in the "
    "spec to skip the attempt"
)


class Structures:
    """Captures the graph of steps with a new execution path, and of about every tenth record.

    A rolling signature of the captured slots identifies the execution path of a step. The signature
    costs nothing, whereas following torch calls costs 4 to 7 us per call.
    """

    def __init__(
        self,
        leaf_slot: Callable[[torch.Tensor], Slot | None],
        *,
        enabled: bool,
        on_fault: Callable[[BaseException], None],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._memory = Memory()
        self._carried = Carried()
        opaque = OpaqueCalls(on_fault=on_fault)
        self._new = partial(
            Provenance, leaf_slot, opaque=opaque, on_fault=on_fault, memory=self._memory
        )
        self._enabled = enabled
        self._known: dict[int, str] = {}  # signature of a step -> hash of its graph
        self._stored: set[str] = set()
        self._active: Provenance | None = None
        self._records = 0
        self._wanted = True

    def go_on_from(self, before: Structures) -> None:
        """Take over the stored graphs of the previous instance after the spec has changed."""
        self._stored = before._stored

    def start(self) -> Provenance | None:
        """If a capture is due, prepare to follow torch calls, starting with the first model call.

        Returns:
            The graph to be filled, or None if this step is not followed.
        """
        wanted = self._wanted or self._records % _RECAPTURE_EVERY == 0
        wanted = wanted or self._records < _FOLLOWED_FIRST
        self._active = self._new() if self._enabled and wanted else None
        return self._active

    def pause(self) -> None:
        """Remove the mode for an evaluation pass, where it would change which kernels run."""
        if self._active is not None:
            modes.remove(self._active)
            self._active.end()

    def resume(self) -> None:
        """Start or resume following calls when training calls a model."""
        if self._active is not None and not modes.is_placed(self._active):
            modes.insert_at_bottom(self._active)
            self._active.begin()

    def as_evaluation(self) -> None:
        """Treat the calls followed so far as an evaluation, since training has not started."""
        if self._active is not None:
            self._active.as_evaluation()

    def stop(self) -> None:
        """Stop following and discard the active graph."""
        self.pause()
        self._active = None

    def connect(self, source: Any, sink: Any) -> None:
        """Add an edge declared by the program, if the graph of this step is followed."""
        if self._active is None:
            return
        if isinstance(source, str) != isinstance(sink, str):
            self._warn("comgra.connect() takes two tensors or two node names, not one of each")
        else:
            self._active.connect(source, sink)

    def _close(self, active: Provenance, signature: int, step: int) -> Structure:
        structure = self._carried.complete(active.finish(), signature, step=step)
        active.leave_behind()
        names = {key.node for key in structure.keys}
        for name in active.unknown_names():
            near = did_you_mean(name, sorted(names))
            self._warn(
                f"comgra.connect() was given the name of a node that did not run: {name!r}{near}"
            )
        self.stop()
        return structure

    def finish(self, info: StepInfo, signature: int, *, training: bool) -> Structure | None:
        """Assign a graph to a closed step; return the graph if this run has not stored it yet.

        An evaluation never captures its own graph: a function mode would disable the native fast
        paths of attention layers and thereby change the results. It uses a previously captured
        graph.
        """
        if not training or self._active is None:
            info.structure = self._known.get(signature)
            if training:
                self._records += 1
                self._wanted = info.structure is None
            return None
        if self._active.overflown:
            self._enabled = False
            self._warn(_OVERFLOWN)
            self.stop()
            return None
        structure = self._close(self._active, signature, info.step)
        self._records += 1
        self._wanted = False
        self._known[signature] = info.structure = structure.hash
        if structure.hash in self._stored:
            return None
        self._stored.add(structure.hash)
        return structure
