"""A process in which other tests may have compiled models, which then are not measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from comgra_decl.hooks.measuring import memory, profiling
from comgra_decl.hooks.scalars import automatic


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """Measures as if this process had never compiled anything."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (memory, profiling, automatic):
            patch.setattr(module, "anything_compiled", lambda: False)
        yield
