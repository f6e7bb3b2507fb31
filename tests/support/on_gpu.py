"""Runs tests with the host in the place of a GPU: `pytest -p tests.support.on_gpu tests/hooks`.

Every tensor goes where those of a GPU go: small ones are held and read together, by the kernels of
GPUs under Triton's interpreter. The tests ask the same of it as of the host.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from comgra_decl.hooks.tensors import capture
    from tests.stats.test_triton import OnGpu

    monkeypatch.setattr(capture, "Reducer", OnGpu)
