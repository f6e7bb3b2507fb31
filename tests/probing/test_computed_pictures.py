"""Pictures of predictions, units, concepts and clouds, computed from the records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifier  # type: ignore[import-untyped]
from sklearn.metrics import roc_auc_score, silhouette_score  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Run

EYES = "probe:eyes"
CLASSES = 3
KNOWN, FOREIGN = 18, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.act = nn.ReLU()
        self.head = nn.Linear(5, CLASSES)
        with torch.no_grad():
            assert self.conv.bias is not None
            self.conv.bias[2] = -50.0  # a unit that is always dead

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.conv(x)).mean((2, 3)))


def images(classes: Tensor) -> Tensor:
    """Images with a bright column at the place of their class, in noise."""
    x = torch.randn(len(classes), 1, 6, 6)
    x[torch.arange(len(classes)), 0, :, classes + 1] += 1.0
    return x


def probe_batch() -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
    """Samples of all classes, followed by those of a category that the model does not know."""
    torch.manual_seed(7)
    classes = torch.arange(KNOWN) % CLASSES
    x = torch.cat([images(classes), 0.8 * torch.randn(FOREIGN, 1, 6, 6)])
    return (x,), {}, [*map(str, classes.tolist()), *["letter"] * FOREIGN]


def trained(
    root: Path,
    *,
    gradients: bool = True,
    pictures: Mapping[str, Any] | None = None,
    **probe: Any,
) -> Run:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    spec: dict[str, Any] = {
        "nodes": {
            "all": {
                "select": "**",
                "capture": ["output", "parameter", *(["output_grad"] if gradients else [])],
                "values": True,
            }
        },
        "schedule": {"first": 100},
        "pictures": pictures or {},
        "samples": {"count": KNOWN + FOREIGN, "by": "target"},
        "probes": {
            "eyes": {
                "samples": {"count": KNOWN + FOREIGN},
                "batch": {"_target_": f"{__name__}.probe_batch"},
                "schedule": {"every": 2},
                **probe,
            }
        },
    }
    with comgra.trace(spec, root=root) as session:
        for _ in range(6):
            optimizer.zero_grad()
            classes = torch.arange(12) % CLASSES
            F.cross_entropy(model(images(classes)), classes).backward()
            optimizer.step()
    assert session.path is not None
    return comgra.open_run(session.path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("runs"), foreign=["letter"])


def softmax(run: Run, step: int) -> Any:
    return torch.tensor(run.value("Net", step, type=EYES)).double().softmax(1).numpy()


# -- predictions


@pytest.mark.slow
def test_confident_errors_are_the_wrong_predictions_in_descending_order(run: Run) -> None:
    found = run.picture("confident_errors", 2)
    assert found.labels["quantity"] == ["sample", "class", "predicted class", "confidence"]
    assert found.facts == {"samples": KNOWN}
    chances = softmax(run, 2)
    wanted = [
        (i, i % CLASSES, chances[i].argmax(), chances[i].max())
        for i in range(KNOWN)
        if chances[i].argmax() != i % CLASSES
    ]
    wanted.sort(key=lambda row: -row[3])
    assert 0 < len(wanted) < KNOWN
    np.testing.assert_allclose(found.values, wanted, rtol=1e-12)


def test_foreign_samples_are_told_apart_as_well_as_scikit_learn_says(run: Run) -> None:
    found = run.picture("foreign_auroc")
    assert found.labels["step"] == [0, 2, 4]
    assert found.facts == {"familiar": KNOWN, "foreign": FOREIGN}
    familiar = np.arange(KNOWN + FOREIGN) < KNOWN
    wanted = [roc_auc_score(familiar, softmax(run, step).max(1)) for step in (0, 2, 4)]
    np.testing.assert_allclose(found.values, wanted, rtol=1e-12)
    assert run.picture("foreign_auroc", 4).values.tolist() == found.values[2:].tolist()


def test_foreign_samples_are_left_out_where_classes_are_compared(run: Run) -> None:
    assert run.picture("confusion", 4).values.sum() == KNOWN
    assert run.picture("reliability", 4).values[:, 2].sum() == KNOWN
    assert run.picture("linear_probe", 4).facts == {"fitted": [KNOWN // 2], "tested": [KNOWN // 2]}


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        ([], "no categories are declared as foreign; declare them .* foreign: "),
        (["digit"], "0 of the 24 samples of step 0 are of the foreign categories digit"),
    ],
)
def test_without_foreign_samples_the_message_says_what_to_declare(
    foreign: list[str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError, match=why):
        trained(tmp_path, foreign=foreign).picture("foreign_auroc")


# -- units


def largest(values: Any) -> Any:
    """The largest value of each channel at any place, [samples, channels]."""
    return values.astype(np.float64).max((2, 3))


def test_the_top_samples_of_a_unit_are_those_with_its_largest_values(run: Run) -> None:
    found = run.picture("top_samples", 4, "conv")
    active = largest(run.value("conv", 4, type=EYES))
    assert found.axes == ("unit", "rank", "quantity")
    assert found.values.shape == (5, 8, 2)
    for unit, ranked in enumerate(found.values):
        wanted = np.sort(active[:, unit])[::-1][:8]
        np.testing.assert_array_equal(ranked[:, 1], wanted)
        np.testing.assert_array_equal(active[ranked[:, 0].astype(int), unit], wanted)


def cohen(one: Any, other: Any) -> float:
    """The difference of the means in units of the pooled standard deviation."""
    freedom = len(one) + len(other) - 2
    pooled = ((len(one) - 1) * one.var(ddof=1) + (len(other) - 1) * other.var(ddof=1)) / freedom
    return float((one.mean() - other.mean()) / np.sqrt(pooled))


def halves(groups: Any) -> list[Any]:
    """Masks of every other sample of each group."""
    odd = np.zeros(len(groups), bool)
    for group in {*groups.tolist()}:
        odd[np.flatnonzero(groups == group)[1::2]] = True
    return [~odd, odd]


def test_units_are_ranked_by_their_effect_size_in_half_of_the_samples(run: Run) -> None:
    found = run.picture("unit_effects", 4, "act")
    names = found.labels["category"]
    assert names == ["0", "1", "2", "letter"]
    assert found.facts == {"fitted": 12, "tested": 12}
    groups = np.array([names.index(label) for label in run.samples(4, type=EYES)["label"]])
    active, (first, second) = largest(run.value("act", 4, type=EYES)), halves(groups)
    strongest = []
    for unit, category, effect, again in found.values[:-1]:
        one = active[:, int(unit)]
        sizes = [
            [cohen(one[half & (groups == g)], one[half & (groups != g)]) for g in range(4)]
            for half in (first, second)
        ]
        assert int(category) == np.abs(sizes[0]).argmax()
        assert effect == pytest.approx(sizes[0][int(category)], rel=1e-10)
        assert again == pytest.approx(sizes[1][int(category)], rel=1e-10)
        strongest.append(abs(effect))
    assert strongest == sorted(strongest, reverse=True)
    assert found.values[-1, 0] == 2  # dead, so it has no effect
    assert np.isnan(found.values[-1, 2:]).all()


def test_units_are_compared_between_types_of_execution(run: Run) -> None:
    found = run.picture("unit_effects_of_types", 4, "conv")
    assert found.labels["category"] == ["train", EYES]
    values = [largest(run.value("conv", 4, type=type_)) for type_ in ("train", EYES)]
    groups = np.repeat([0, 1], [len(each) for each in values])
    active, (first, _) = np.concatenate(values), halves(groups)
    unit, category, effect, _ = found.values[0]
    one, chosen = active[:, int(unit)], groups == category
    assert effect == pytest.approx(cohen(one[first & chosen], one[first & ~chosen]), rel=1e-10)


def test_units_that_are_active_together_are_correlated(run: Run) -> None:
    found = run.picture("coactivation", 4, "act")
    flat = run.value("act", 4, type=EYES).astype(np.float64).transpose(1, 0, 2, 3).reshape(5, -1)
    alive = [0, 1, 3, 4]
    wanted = np.corrcoef(flat[alive])
    np.testing.assert_allclose(found.values[np.ix_(alive, alive)], wanted, rtol=1e-10, atol=1e-12)
    assert np.isnan(found.values[2]).all()
    assert found.facts == {"samples": 24, "positions": 16}


def test_effects_need_samples_of_two_categories_in_each_half(tmp_path: Path) -> None:
    few = trained(tmp_path, samples={"count": 4})
    why = r"two of each of two categories; at step 4, 'act' has 4 samples of 3\. Raise `samples"
    with pytest.raises(UnknownNameError, match=why):
        few.picture("unit_effects", 4, "act")


# -- concepts


def test_concept_vectors_are_the_normals_of_scikit_learns_ridge_classifier(run: Run) -> None:
    found = run.picture("concept_vectors", 4, "act")
    names = found.labels["category"]
    groups = np.array([names.index(label) for label in run.samples(4, type=EYES)["label"]])
    values = run.value("act", 4, type=EYES).astype(np.float64)
    flat, (first, second) = values.reshape(len(values), -1), halves(groups)
    ridge = RidgeClassifier(alpha=1.0).fit(flat[first], groups[first])
    wanted = ridge.coef_ / np.linalg.norm(ridge.coef_, axis=1, keepdims=True)
    np.testing.assert_allclose(found.values.reshape(4, -1), wanted, atol=1e-10)
    assert found.values.shape == (4, *values.shape[1:])
    assert found.facts["accuracy"] == ridge.score(flat[second], groups[second])


def test_concept_derivatives_are_those_of_the_loss(run: Run) -> None:
    found = run.picture("concept_derivatives", 4, "act")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    classes = torch.arange(12) % CLASSES
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(images(classes)), classes).backward()
        optimizer.step()
    hidden = model.act(model.conv(images(classes))).detach()
    vectors = torch.from_numpy(run.picture("concept_vectors", 4, "act").values).float()
    for category, vector in enumerate(vectors):
        far = torch.zeros(12, requires_grad=True)  # how far each sample moves along the vector
        moved = hidden + far.reshape(-1, 1, 1, 1) * vector
        loss = F.cross_entropy(model.head(moved.mean((2, 3))), classes)
        wanted = torch.autograd.grad(loss, far)[0].numpy()
        places = run.samples(4)["place"].to_numpy()
        np.testing.assert_allclose(found.values[category], wanted[places], rtol=1e-4, atol=1e-7)
        assert found.facts["lowers_loss"][category] == (wanted < 0).mean()


def test_concepts_need_two_categories_and_derivatives_a_gradient(tmp_path: Path) -> None:
    one = trained(tmp_path, gradients=False, samples={"count": 1})
    with pytest.raises(UnknownNameError, match=r"two categories; those of step 4 have 0\. Set"):
        one.picture("concept_vectors", 4, "act")
    two = trained(tmp_path / "two", gradients=False)
    with pytest.raises(UnknownNameError, match="gradient"):
        two.picture("concept_derivatives", 4, "act")


# -- clouds


def test_the_separability_of_a_cloud_is_measured_at_each_step(run: Run) -> None:
    found = run.picture("separability", node="act")
    assert found.labels["step"] == [0, 2, 4]
    assert found.facts == {"samples": [24] * 3, "categories": [4] * 3}
    for step, (collapse, silhouette, rank) in zip((0, 2, 4), found.values, strict=True):
        flat = run.value("act", step, type=EYES).reshape(24, -1).astype(np.float64)
        labels = run.samples(step, type=EYES)["label"].tolist()
        assert silhouette == pytest.approx(silhouette_score(flat, labels), rel=1e-8)
        assert collapse > 0
        assert 1 < rank <= 23
    assert run.picture("separability", 2, "act").values.tolist() == found.values[1:2].tolist()


# -- all pictures


def test_a_picture_becomes_an_array_of_xarray_with_names_and_labels(run: Run) -> None:
    pytest.importorskip("xarray")
    likeness = run.picture("likeness", 4)
    array = likeness.to_xarray()
    assert (array.name, array.dims) == ("likeness", ("node", "other node"))
    wanted = likeness.values[likeness.labels["node"].index("conv")]
    np.testing.assert_array_equal(array.sel(node="conv"), wanted)
    assert array.attrs == {"node": None, "step": 4, "samples": [24] * len(wanted)}
    derivatives = run.picture("concept_derivatives", 4, "act").to_xarray()
    assert derivatives.dims == ("category", "sample")
    assert derivatives.coords["label"].values.tolist() == run.samples(4)["label"].tolist()
    cloud = run.embedding("act").to_xarray()
    np.testing.assert_array_equal(cloud.sel(step=2), run.embedding("act").values[1])
    ranked = run.picture("unit_effects", 4, "act").to_xarray()
    assert ranked.sel(quantity="effect").shape == (5,)


def test_the_number_of_samples_of_a_likeness_is_known(run: Run) -> None:
    picture = run.picture("likeness", 4)
    assert picture.facts == {"samples": [24] * len(picture.labels["node"])}
    assert run.picture("likeness_over_steps", node="act").facts == {"samples": [24] * 3}
