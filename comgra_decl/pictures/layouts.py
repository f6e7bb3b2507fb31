"""Layouts of points in the plane by t-SNE and UMAP, each continued from step to step."""

from __future__ import annotations

import logging
import warnings

import numpy as np
from numpy.typing import NDArray

from comgra_decl.errors import needed

Floats = NDArray[np.float64]

METHODS = ("tsne", "umap")
EXTRA = "projections"

_SEED = 0
_NEIGHBOURS = 15
_PERPLEXITY = 30.0
_FURTHER = 50
"""Iterations of t-SNE at each step after the first. More let the points drift without a reason in
the data; fewer leave them behind it."""


def layout(points: NDArray[np.floating], method: str) -> Floats:
    """Return coordinates [steps, samples, 2] of points [steps, samples, features].

    t-SNE begins at each step with the layout of the step before it, without early exaggeration.
    UMAP lays out all steps together, with each sample related to itself (AlignedUMAP).

    Raises:
        MissingPackageError: openTSNE or umap-learn is not installed.
        ValueError: there are too few samples.
    """
    count = points.shape[1]
    if count < 5:
        raise ValueError(f"{count} samples are too few for {method}; it needs at least 5")
    found = _tsne(points) if method == "tsne" else _umap(points)
    return np.asarray(found, np.float64)


def trustworthiness(points: NDArray[np.floating], placed: Floats) -> list[float]:
    """Return, for each step, how far neighbours in the plane are neighbours in the data.

    1 means all of them, among the five nearest (Venna and Kaski 2001; fewer for few samples).
    """
    measure = needed("sklearn.manifold", EXTRA).trustworthiness
    near = min(5, (points.shape[1] - 1) // 2)
    return [float(measure(x, y, n_neighbors=near)) for x, y in zip(points, placed, strict=True)]


def _tsne(points: NDArray[np.floating]) -> list[Floats]:
    library = needed("openTSNE", EXTRA)
    common = {
        "perplexity": min(_PERPLEXITY, (points.shape[1] - 1) / 3),
        "negative_gradient_method": "bh",
        "random_state": _SEED,
    }
    found = [np.asarray(library.TSNE(**common).fit(points[0]))]
    log = logging.getLogger("openTSNE.tsne")
    log.addFilter(_is_news)
    try:
        for step in points[1:]:
            more = library.TSNE(
                **common, initialization=found[-1], early_exaggeration_iter=0, n_iter=_FURTHER
            )
            found.append(np.asarray(more.fit(step)))
    finally:
        log.removeFilter(_is_news)
    return found


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the warning about a wide initial layout: the layout of the step before is meant."""
    return "Standard deviation of embedding" not in record.getMessage()


def _umap(points: NDArray[np.floating]) -> list[Floats]:
    library = needed("umap", EXTRA)
    steps, count, _ = points.shape
    options = {"n_neighbors": min(_NEIGHBOURS, count - 1), "random_state": _SEED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the single thread that a seed needs
        if steps == 1:
            return [library.UMAP(**options).fit_transform(points[0])]
        same = [{i: i for i in range(count)}] * (steps - 1)
        joint = library.AlignedUMAP(**options).fit(list(points), relations=same)
    return list(joint.embeddings_)
