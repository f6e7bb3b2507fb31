"""What happens between the selected tensor and another node."""

from __future__ import annotations

from comgra_decl.query.between import Between
from comgra_decl.records import EARLIER_STEP, SlotKey
from comgra_decl.viewer.graph.layout import Scene, box_of
from comgra_decl.viewer.model.graph import Graph
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection


def between_of(view: RunView, at: Selection, node: str) -> Between | None:
    """Return what happens between the selected tensor and a node, in execution order.

    None if the node does not exist, nothing is selected, or both are the same.
    """
    if at.step is None or node == at.node or node not in set(view.nodes):
        return None

    def read() -> Between:
        here = view.run.slot(at.node, role=at.role, iteration=at.iteration)
        role = view.roles(node)[0]
        known = view.iterations(node, role)
        near = max((i for i in known if i <= at.iteration), default=known[0])
        there = view.run.slot(node, role=role, iteration=near)
        step, type_ = at.step, at.type or None
        found = view.run.between(here, there, step=step, type=type_)
        back = found if found.count else view.run.between(there, here, step=step, type=type_)
        return back if back.count else found

    place = at.node, at.role, at.iteration, at.step, at.type
    return view.ever(("between", node, *place), read)


def boxes_of(scene: Scene, graph: Graph, slots: tuple[SlotKey, ...]) -> list[str]:
    """Return the boxes on a path, in order; consecutive tensors in one box count once."""
    boxes: list[str] = []
    for key in slots:
        names = f"{key.node}.{key.role}", f"{key.node}{key.role.removeprefix('output')}"
        apart = names[key.role.endswith(EARLIER_STEP)]
        box = box_of(scene, apart if apart in graph.parameters else key.node)
        if box is not None and boxes[-1:] != [box]:
            boxes.append(box)
    return boxes
