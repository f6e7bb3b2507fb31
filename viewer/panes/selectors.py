"""The selectors in the sidebar."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any, ClassVar

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.chooser import Chooser
from comgra_decl.viewer.model.choices import Field, Groups, choices
from comgra_decl.viewer.model.ranks import with_rank
from comgra_decl.viewer.panes.base import TENSOR, Act, Pane, Shown


class SelectorsPane(Pane):
    """All selectors except node and step, which users choose in the graph and the step bar."""

    reads: ClassVar = TENSOR | {
        "gradient", "batch", "statistic", "colour", "scale", "looked", "measure",
    }  # fmt: skip
    sizing: ClassVar = "stretch_width"

    def __init__(self, act: Act, runs: Callable[[], Field]) -> None:
        self._runs = runs
        super().__init__(act)

    def build(self) -> Any:
        """Create the selectors."""
        self.view = Chooser(sizing_mode="stretch_width", margin=0)
        self.view.on_message(self._choose)
        return self.view

    def components(self) -> list[Any]:
        """Return the selectors, which handle choices."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Offers the options available for the current selection."""
        fields = choices(
            shown.view, shown.at, shown.colour, shown.scale, self._runs(), measure=shown.measure
        )
        offer(self.view, fields)

    def only_runs(self) -> None:
        """Offers only the run selector while no run can be shown."""
        offer(self.view, (("Run", (self._runs(),)),))

    def _choose(self, message: Message) -> None:
        ((name, value),) = message.items()
        if name == "rank":
            run = with_rank(self._runs().value, int(value) if value else None)
            self.act(run=run)
            return
        self.act(**{name: int(value) if name == "iteration" else value})


def offer(chooser: Chooser, groups: Groups) -> None:
    """Set the options. Unchanged options are not sent again."""
    parts = (
        f'{{"title": {json.dumps(title)}, "fields": [{", ".join(map(_json, fields))}]}}'
        for title, fields in groups
    )
    chooser.layout = f"[{', '.join(parts)}]"


@lru_cache(maxsize=256)
def _json(field: Field) -> str:
    """Return a field as JSON for `Chooser`. Cached, because most fields rarely change."""
    return json.dumps(asdict(field))
