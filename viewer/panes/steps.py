"""The bar of recorded steps."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.stepbar import StepBar
from comgra_decl.viewer.model.brushing import brushed_marks
from comgra_decl.viewer.model.findings import finding_marks, findings_of
from comgra_decl.viewer.model.flags import nonfinite_marks
from comgra_decl.viewer.palette import BLUE, RED
from comgra_decl.viewer.panes.base import Pane, Shown


class StepsPane(Pane):
    """Navigates recorded steps."""

    reads: ClassVar = frozenset({"run", "revision", "type", "step", "follow", "looked", "brush"})
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the step bar."""
        self._drawn: object = None
        self.view = StepBar(sizing_mode="stretch_width", margin=0)
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the step bar, which handles clicks and keys."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Send the position, and the steps if they have changed."""
        steps = shown.view.steps(shown.at.type)
        index = -1 if shown.at.step is None else int(np.searchsorted(steps, shown.at.step))
        changes: dict[str, Any] = {"index": index, "follow": shown.follow}
        key = (shown.view, shown.view.revision, shown.at.type, findings_of(shown.view),
               shown.brush)  # fmt: skip
        if key != self._drawn:
            marks = nonfinite_marks(shown.view, shown.at.type)
            changes["steps"] = [int(step) for step in steps]
            known = finding_marks(shown.view, shown.at.type)
            changes["marks"] = [
                *({"index": m.index, "color": RED, "title": m.title} for m in marks),
                *({"index": m.index, "color": m.colour, "title": m.title} for m in known),
                *(
                    {"index": m.index, "color": BLUE, "title": m.title}
                    for m in brushed_marks(shown.view, shown.at.type, shown.brush)
                ),
            ]
            self._drawn = key
        self.view.put(**changes)

    def _on_message(self, message: Message) -> None:
        if "follow" in message:
            self.act(follow=message["follow"])
        else:
            self.act(step=self.view.steps[message["index"]], follow=False)
