"""Layouts by t-SNE and UMAP equal those of the libraries called directly."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.manifold import trustworthiness  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import MissingPackageError, UnknownNameError
from comgra_decl.pictures.layouts import layout
from comgra_decl.query import Run


def drifting() -> np.ndarray[Any, Any]:
    """Return 3 steps of 30 points that move apart into three groups."""
    random = np.random.default_rng(0)
    groups = 4 * random.normal(size=(3, 1, 8)).repeat(10, 1).reshape(30, 8)
    noise = random.normal(size=(30, 8))
    return np.stack([noise + share * groups for share in (0.5, 0.75, 1.0)])


def test_tsne_continues_the_layout_of_the_step_before(caplog: pytest.LogCaptureFixture) -> None:
    library: Any = pytest.importorskip("openTSNE")
    points = drifting()
    found = layout(points, "tsne")
    assert caplog.messages == []  # without a warning about the layout that it begins with
    place = library.TSNE(perplexity=29 / 3, random_state=0, negative_gradient_method="bh").fit(
        points[0]
    )
    np.testing.assert_array_equal(found[0], place)
    for step in (1, 2):
        near = library.affinity.PerplexityBasedNN(points[step], perplexity=29 / 3, random_state=0)
        further = library.TSNEEmbedding(
            np.array(found[step - 1]), near, random_state=0, negative_gradient_method="bh"
        )
        place = further.optimize(50, momentum=0.8)
        np.testing.assert_allclose(found[step], place, rtol=1e-6, atol=1e-9)
    moved = np.linalg.norm(found[1] - found[0], axis=1).mean() / found[0].std()
    alone = library.TSNE(perplexity=29 / 3, random_state=1, initialization="random").fit(points[1])
    apart = np.linalg.norm(np.asarray(alone) - found[0], axis=1).mean() / found[0].std()
    assert moved < apart


def test_umap_lays_out_all_steps_together() -> None:
    library: Any = pytest.importorskip("umap")
    points = drifting()
    same = [{i: i for i in range(30)}] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = library.AlignedUMAP(n_neighbors=15, random_state=0).fit(
            list(points), relations=same
        )
        alone = library.UMAP(n_neighbors=15, random_state=0).fit_transform(points[0])
    np.testing.assert_array_equal(layout(points, "umap"), np.stack(wanted.embeddings_))
    np.testing.assert_array_equal(layout(points[:1], "umap")[0], alone)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    spec: dict[str, Any] = {
        "nodes": {"all": {"select": "**"}},
        "schedule": {"first": 100},
        "samples": {"count": 12},
        "probes": {"eyes": {"samples": {"count": 12}, "schedule": {"first": 0, "every": 2}}},
    }
    with comgra.trace(spec, root=tmp_path_factory.mktemp("runs")) as session:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(12, 6)), torch.arange(12) % 3).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.mark.slow
def test_a_run_has_the_layout_of_a_node_with_its_trustworthiness(run: Run) -> None:
    pytest.importorskip("openTSNE")
    found = run.embedding("1", method="tsne")
    values = np.stack([run.value("1", s, type="probe:eyes") for s in (0, 2)]).astype(np.float64)
    assert (found.axes, found.labels["step"]) == (("step", "sample", "component"), [0, 2])
    np.testing.assert_array_equal(found.values, layout(values, "tsne"))
    wanted = [
        trustworthiness(x, y, n_neighbors=5) for x, y in zip(values, found.values, strict=True)
    ]
    assert found.facts == {"method": "tsne", "trustworthiness": pytest.approx(wanted)}


def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    with pytest.raises(MissingPackageError, match=r"comgra-decl\[projections\]"):
        run.embedding("1", method="tsne")


def test_wrong_arguments_are_refused(run: Run) -> None:
    with pytest.raises(UnknownNameError, match="'tnse' is not one of pca, tsne, umap; did you"):
        run.embedding("1", method="tnse")
    with pytest.raises(UnknownNameError, match="method='umap' has no basis"):
        run.embedding("1", "last", method="umap")
    with pytest.raises(ValueError, match="4 samples are too few for tsne"):
        layout(np.zeros((1, 4, 3)), "tsne")


def test_the_viewer_lays_out_the_cloud_if_it_is_asked_to(run: Run) -> None:
    pytest.importorskip("openTSNE")
    from comgra_decl.viewer.model.runview import RunView
    from comgra_decl.viewer.panes.pictures import PicturesPane
    from tests.viewer.app.test_probe_pictures import shown

    pane = PicturesPane(lambda **_: None)
    view = RunView(run)
    pane.refresh(shown(view, node="1", step=2))
    assert 'data-send="cloud:pca" aria-pressed="true"' in pane.view.html
    before = pane.view.html
    pane._on_message({"send": "cloud:tsne"})
    assert 'data-send="cloud:tsne" aria-pressed="true"' in pane.view.html
    for thread in threading.enumerate():
        if thread.name == "comgra_decl layout":
            thread.join(60)
    pane.again()
    trust = run.embedding("1", method="tsne").facts["trustworthiness"][1]
    assert f"t-SNE, trustworthiness {trust:.2f}" in pane.view.html
    assert pane.view.html != before
