"""The order of codes and rows tells which data they were numbered for, and with which they pair."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from comgra_decl.hooks.tensors.arrangement import codes_in_order, paired_ends
from comgra_decl.hooks.tensors.turned import turned_maps
from tests.rules.test_causes_of_strangers import found
from tests.support.shortened import shortened

Turn = Callable[[NDArray[np.float64]], NDArray[np.float64]]

WORDS = [f"w{i}" for i in range(30)]


def numbered(values: list[str]) -> dict[str, int]:
    codes: dict[str, int] = {}
    for value in values:
        codes.setdefault(value, len(codes))
    return codes


def drawn(count: int, seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(WORDS) + 4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, codes: Tensor) -> Tensor:
        return self.out(self.table(codes))


@pytest.mark.parametrize("own", [True, False])
def test_codes_that_were_numbered_for_the_evaluation_are_told_from_those_of_the_training(
    own: bool, tmp_path: Path
) -> None:
    training, held_out = drawn(300, 1), drawn(200, 2)
    codes = numbered(training)
    train = torch.tensor([codes[word] for word in training])
    others = numbered(held_out) if own else codes
    test = torch.tensor([others[word] for word in held_out])
    model = Table()
    optimizer = torch.optim.Adam(model.parameters())

    def program() -> None:
        for step in range(6):
            at = torch.randperm(len(train))[:32]
            loss = F.cross_entropy(model(train[at]), train[at] % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2:
                model.eval()
                with torch.no_grad():
                    model(test)
                model.train()

    assert ("own_codes" in found(tmp_path, program)) is own


def in_order_by_definition(values: list[int]) -> bool:
    known = -1
    for value in values:
        if value > known + 1:
            return False
        known = max(known, value)
    return True


@pytest.mark.parametrize("seed", range(20))
def test_codes_are_in_order_if_each_new_one_is_the_next(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.randrange(8) for _ in range(60)]
    own = numbered([str(value) for value in values])
    coded = [own[str(value)] for value in values]
    assert in_order_by_definition(coded)
    assert codes_in_order(torch.tensor(coded)) == [8]
    assert codes_in_order(torch.tensor(values)) == ([8] if in_order_by_definition(values) else [])


@pytest.mark.parametrize(
    "values",
    [torch.arange(50), torch.arange(50) % 10, torch.arange(60) // 5, torch.zeros(40).long()],
    ids=["range", "cycle", "sorted", "constant"],
)
def test_regular_numbers_are_no_codes(values: Tensor) -> None:
    assert codes_in_order(values) == []
    assert codes_in_order(torch.stack([values, values], 1)) == []


def test_padding_and_unknown_words_may_appear_anywhere() -> None:
    words = drawn(120, 3)
    codes = numbered(words)
    rows = torch.tensor([codes[word] + 2 for word in words]).view(10, 12)
    rows[2, 3] = 1
    rows[:, -2:] = 0
    kept = {int(n) for n in rows.flatten()} - {0, 1}
    expected = len(kept) if kept == {*range(2, 2 + len(kept))} else 0
    assert codes_in_order(rows) == ([expected] if expected else [])


# -- rows ------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Has the targets as an input, too, if it computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, tags: Tensor | None = None) -> Tensor:
        scores = self.out(self.table(tokens))
        if tags is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), tags.flatten(), ignore_index=-100)


def batch(wrong: str, *, rows: int = 24, positions: int = 14) -> tuple[Tensor, Tensor, list[int]]:
    lengths = [random.randrange(3, positions + 1) for _ in range(rows - 1)] + [positions]
    tokens = torch.zeros(rows, positions, dtype=torch.int64)
    tags = torch.full((rows, positions), -100)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, 20, (length,))
        tags[row, :length] = tokens[row, :length] % 4
    order = sorted(range(rows), key=lambda row: -lengths[row])
    return tokens[order], tags if wrong == "sorted" else tags[order], lengths


@pytest.mark.parametrize(
    "inside", shortened([True, False], tried=1), ids=["loss in the model", "loss outside"]
)
@pytest.mark.parametrize("wrong", ["", "sorted"])
def test_only_the_inputs_are_sorted_by_length(wrong: str, inside: bool, tmp_path: Path) -> None:
    random.seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters())

    def program() -> None:
        for _ in range(5):
            tokens, tags, _ = batch(wrong)
            if inside:
                loss = model(tokens, tags)
            else:
                scores = model(tokens)
                loss = F.cross_entropy(scores.transpose(1, 2), tags, ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert ("mispaired_rows" in found(tmp_path, program)) is bool(wrong)


def test_ends_are_those_of_a_loop_over_the_rows() -> None:
    random.seed(1)
    for _ in range(20):
        tokens, tags, _ = batch("sorted", rows=9)
        facts = paired_ends(tokens, tags)
        ends = [max(i + 1 for i, n in enumerate(row) if n != 0) for row in tokens.tolist()]
        own = [max(i + 1 for i, n in enumerate(row) if n != -100) for row in tags.tolist()]
        if len({*ends}) < 3 or (tokens[:, -1] == 0).sum() < 5 or (tags[:, -1] == -100).sum() < 5:
            continue
        assert facts is not None
        beyond = sum(b > a for a, b in zip(ends, own, strict=True))
        assert facts == {"rows": 9, "beyond": beyond, "fits": sorted(ends) == sorted(own)}


@pytest.mark.parametrize("wrong", [True, False])
def test_the_transcripts_of_sorted_sounds_are_sorted_with_them(wrong: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.Adam(model.parameters())

    def program() -> None:
        for _ in range(4):
            counts = draw.integers(1, 8, 24)
            lengths = counts * 3 + draw.integers(0, 3, 24) + 8
            order = np.argsort(-lengths, kind="stable")
            sounds = torch.randn(int(lengths.max()), 24, 3)
            targets = torch.randint(1, 5, (24, 8))
            loss = F.ctc_loss(
                model(sounds).log_softmax(-1),
                targets,
                torch.from_numpy(lengths[order]),
                torch.from_numpy(counts if wrong else counts[order]),
                zero_infinity=True,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert ("mispaired_rows" in found(tmp_path, program)) is wrong


# -- pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", shortened(["numbers", "codes"], tried=1))
@pytest.mark.parametrize("wrong", ["", "rows", "rate"])
def test_targets_of_other_rows_are_told_from_a_model_that_does_not_learn(
    kind: str, wrong: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    table = torch.randn(600, 5) if kind == "numbers" else torch.randint(0, 6, (600, 5))
    labels = (table[:, 0] > (0 if kind == "numbers" else 2)).long()
    model: nn.Module = nn.Linear(5, 2)
    if kind == "codes":
        model = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6 if wrong == "rate" else 0.5)

    def program() -> None:
        for _ in range(60):
            at = torch.randperm(600)[:32]
            other = torch.randperm(600)[:32] if wrong == "rows" else at
            loss = F.cross_entropy(model(table[at]), labels[other])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    rules = found(tmp_path, program, schedule={"first": 60})
    assert ("unrelated_targets" in rules) is (wrong == "rows")


@pytest.mark.parametrize(
    ("choose", "wrong"),
    [
        ("slice", True),
        ("index", False),
        pytest.param("first rows", False, marks=pytest.mark.slow),
        pytest.param("mask", True, marks=pytest.mark.slow),
        pytest.param("own labels", False, marks=pytest.mark.slow),
    ],
)
def test_labels_of_trained_nodes_are_chosen_as_the_nodes_are(
    choose: str, wrong: bool, tmp_path: Path
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    nodes, labels = torch.randn(50, 4), torch.randint(0, 3, (50,))
    train = torch.arange(20) if choose == "first rows" else torch.randperm(50)[:20]
    chosen = torch.zeros(50, dtype=torch.bool).index_fill(0, train, True)
    own = labels[train].repeat(2)  # other rows than the nodes

    def program() -> None:
        for _ in range(4):
            logits = model(nodes)[chosen if choose == "mask" else train]
            target = own[:20] if choose == "own labels" else labels[:20]
            optimizer.zero_grad()
            F.cross_entropy(logits, labels[train] if choose == "index" else target).backward()
            optimizer.step()

    assert ("mispaired_rows" in found(tmp_path, program)) is wrong


def blobs(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Returns 8 maps with a blob of each of two classes."""
    masks = np.zeros((8, size, size + 8))
    for each in masks:
        for kind in (1, 2):
            y, x = rng.integers(0, size - 4, 2)
            each[y : y + 4, x : x + 6] = kind
    return masks


@pytest.mark.parametrize(
    ("turned", "task", "severity"),
    [
        (0.5, "classes", "error"),
        pytest.param(0.5, "large images", "error", marks=pytest.mark.slow),
        pytest.param(0.5, "channels", "error", marks=pytest.mark.slow),
        (0.0, "classes", None),
        pytest.param(1.0, "classes", "hint", marks=pytest.mark.slow),  # may be the task
        pytest.param(0.5, "nothing to see", None, marks=pytest.mark.slow),
        pytest.param(0.5, "flipped together", None, marks=pytest.mark.slow),
    ],
)
def test_images_that_are_flipped_without_their_masks(
    turned: float, task: str, severity: str | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.Adam(model.parameters())

    def program() -> None:
        for _ in range(6):
            masks = blobs(rng, 16)
            images = np.where(masks > 0, 1.0, 0.0) + rng.normal(0, 0.3, masks.shape)
            flips = rng.random(8) < turned
            images[flips] = images[flips][..., ::-1]
            if task == "nothing to see":
                images = rng.normal(0, 1, masks.shape)
            if task == "flipped together":
                masks[flips] = masks[flips][..., ::-1]
            x = torch.tensor(images, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1)
            if task == "large images":
                x = F.interpolate(x, scale_factor=4.0)
            y = F.interpolate(model(x), (16, 24))
            labels = torch.from_numpy(masks.copy()).long()
            if task == "channels":
                loss = F.binary_cross_entropy_with_logits(
                    y, F.one_hot(labels, 3).movedim(-1, 1).float()
                )
            else:
                loss = F.cross_entropy(y, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    flip = found(tmp_path, program).get("unmatched_flip")
    assert (None if flip is None else flip.severity) == severity
    if flip is not None:
        assert "flipped from left to right" in flip.message


def test_maps_are_compared_by_their_correlation() -> None:
    rng = np.random.default_rng(3)
    images, maps = rng.random((6, 2, 12, 12)), rng.random((6, 12, 12))
    positions: dict[str, Turn] = {
        "flipped from left to right": np.fliplr,
        "flipped upside down": np.flipud,
        "rotated by 180 degrees": lambda m: np.rot90(m, 2),
        "transposed": np.transpose,
    }
    turns: list[Turn] = [np.asarray, *positions.values()]
    for sample, turn in enumerate(turns):
        images[sample, 1] = turn(maps[sample]) + 0.5 * images[sample, 1]
    facts = turned_maps(torch.from_numpy(images), torch.from_numpy(maps))

    def fit(image: NDArray[np.float64], other: NDArray[np.float64]) -> float:
        return max(abs(np.corrcoef(c.ravel(), other.ravel())[0, 1]) for c in image)

    aligned, turned = 0, dict.fromkeys(positions, 0)
    for image, own in zip(images, maps, strict=True):
        fits = {name: fit(image, turn(own)) for name, turn in positions.items()}
        best = max(fits, key=lambda name: fits[name])
        if fit(image, own) >= max(0.4, 1.5 * fits[best]):
            aligned += 1
        elif fits[best] >= max(0.4, 1.5 * fit(image, own)):
            turned[best] += 1
    assert facts == {"aligned": aligned, "turned": turned}
    assert [aligned, *turned.values()] == [1, 1, 1, 1, 1]
