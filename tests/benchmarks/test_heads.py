"""The run with many heads has as many as the benchmark states, at every record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import comgra_decl
from benchmarks.viewer import heads


@pytest.mark.slow
def test_every_record_has_the_weights_of_all_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "RECORDS", 2)
    run = comgra_decl.open_run(heads.made_heads(tmp_path))
    assert run.types == ["train", "probe:sequences"]
    assert run.report.get("refused", {}) == {}
    nodes = [node for node in run.nodes if node.endswith(".attn")]
    assert len(nodes) == heads.LAYERS
    for type_ in run.types:
        for node in nodes:
            weights = run.slot(node, role="attention (recomputed)").value(1, type=type_)
            assert weights.shape == (heads.SAMPLES, heads.HEADS, heads.TOKENS, heads.TOKENS)
            np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert {"why", "read", "lens"} <= {*run.pictures}
    assert heads.made_heads(tmp_path) == Path(str(run.path)).parents[1]  # and is not made again
    assert len(comgra_decl.open_run(heads.made_heads(tmp_path)).steps) == 2
