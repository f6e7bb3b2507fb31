"""Fixtures shared by several of these tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from comgra_decl.hooks.compiled.observers import Observers


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Returns the nodes and passes that compiled code shows, in order."""
    # an older torch lacks what it imports
    from comgra_decl.hooks.compiled.observers import Observers

    seen: list[tuple[str, str]] = []
    read, gradient = Observers.read, Observers.gradient

    def reading(self: Observers, tensor: torch.Tensor, what: Any) -> int:
        seen.append((self._plans[what.module].node(), "input" if what.entering else "output"))
        return read(self, tensor, what)

    def arriving(self: Observers, tensor: torch.Tensor, ticket: int) -> None:
        seen.append(("", "gradient"))
        gradient(self, tensor, ticket)

    monkeypatch.setattr(Observers, "read", reading)
    monkeypatch.setattr(Observers, "gradient", arriving)
    return seen
