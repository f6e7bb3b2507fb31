"""Run tests on the host as if it were a GPU: `pytest -p tests.support.on_gpu tests/hooks`.

Every tensor takes the code path of GPU tensors: small ones are kept and read together, by the GPU
kernels under Triton's interpreter. The tests expect the same results as on the host.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from comgra_decl.hooks.tensors import capture
    from tests.stats.test_triton import OnGpu

    monkeypatch.setattr(capture, "Reducer", OnGpu)
