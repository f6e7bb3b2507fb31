"""Calls whose arguments reveal mistakes that statistics do not, and similar, correct calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comgra_decl.rules.attention.weights import IneffectiveMask, SingleWeight, SoftmaxAxis
from comgra_decl.rules.data.last_step import PaddedLastStep
from comgra_decl.rules.structure.doubled import ConcatenatedWithItself
from comgra_decl.rules.structure.settings import FrozenBatchNorm
from comgra_decl.rules.structure.views import ViewForPermute, moved
from tests.rules.programs import BATCH, Tensor, findings, train, train_around

Between = Callable[[Tensor], Tensor]


# -- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([8, 32, 32, 3], [8, 3, 32, 32], True),
        ([8, 3, 16, 16], [8, 16, 16, 3], True),
        ([8, 16, 64], [8, 4, 16, 16], True),  # heads without a transpose
        ([8, 4, 16, 12], [8, 16, 48], True),  # and back
        ([8, 20, 64], [8, 64, 20], True),
        ([8, 64, 4, 6], [8, 16, 8, 12], True),  # channels become height and width
        ([8, 3, 9, 9], [8, 27, 3, 3], True),  # and back
        ([8, 64, 4, 6], [8, 16, 16, 6], None),
        ([8, 64, 1, 1], [8, 16, 2, 2], None),  # a map from a vector, as a generator begins
        ([32, 20, 64], [20, 32, 64], True),
        ([47, 48], [48, 47], None),  # without a diagonal
        ([8, 4, 9, 10], [8, 4, 10, 9], None),  # relative positions
        ([9, 10, 64], [10, 9, 64], True),
        ([8, 16, 64], [8, 64, 16], False),  # perhaps merges four steps
        ([8, 16, 32], [8, 32, 16], None),  # or shifts by relative positions
        ([32, 128], [128, 32], None),  # heads of each sample: [batch * heads, size]
        ([8, 16, 64], [8, 16, 4, 16], None),
        ([32, 16, 20], [512, 20], None),
        ([8, 16, 64], [8, 4, 256], None),  # patches merged
        ([6, 8, 16], [2, 3, 8, 16], None),  # layers and directions
        ([8, 4, 4, 24], [8, 96, 4], None),  # boxes of anchors
        ([5, 1, 4], [5, 4], None),
        ([8, 2, 3, 6, 6], [8, 6, 6, 6], None),  # a channel shuffle, after its transpose
    ],
)
def test_a_view_moves_a_dimension_only_if_it_stands_elsewhere(
    source: Sequence[int], target: Sequence[int], expected: bool | None
) -> None:
    assert moved(source, target, batches={8, 32}) is expected


def patches(x: Tensor) -> Tensor:
    """Cuts [batch, 4, 6, 6] into windows of 3 x 3, as a Swin transformer does."""
    cut = x.view(BATCH, 4, 2, 3, 2, 3).permute(0, 2, 4, 3, 5, 1)
    return cut.reshape(BATCH * 4, 9, 4)


def shuffled(x: Tensor) -> Tensor:
    return x.view(BATCH, 2, 2, 6, 6).transpose(1, 2).reshape(BATCH, 4, 6, 6)


MOVING: dict[str, tuple[Between, tuple[int, ...], str]] = {
    "image": (lambda x: x.reshape(BATCH, 3, 5, 5), (5, 5, 3), "warning"),
    "time": (lambda x: torch.reshape(x, (5, BATCH, 4)), (5, 4), "warning"),
    "heads": (lambda x: x.view(BATCH, 2, 5, 4), (5, 8), "warning"),
    "upsampled": (lambda x: x.view(BATCH, 2, 4, 6), (8, 2, 3), "warning"),
    "ambiguous": (lambda x: x.view(BATCH, 12, 4), (4, 12), "hint"),
}
HARMLESS: dict[str, tuple[Between, tuple[int, ...]]] = {
    "heads": (lambda x: x.view(BATCH, 5, 2, 4).transpose(1, 2), (5, 8)),
    "patches": (patches, (4, 6, 6)),
    "shuffle": (shuffled, (4, 6, 6)),
    "channels last": (lambda x: x.permute(0, 3, 1, 2).reshape(BATCH, 3, 25), (5, 5, 3)),
    "shifted": (lambda x: F.pad(x, (1, 0)).view(BATCH, 6, 5)[:, 1:], (5, 5)),  # rows, as in XL
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (8, 2, 3)),
    "merged": (lambda x: x.reshape(BATCH, 2, 12), (4, 6)),
}


@pytest.mark.parametrize("name", MOVING)
def test_a_view_in_place_of_a_permutation_is_found(name: str) -> None:
    between, shape, severity = MOVING[name]
    (found,) = findings(ViewForPermute(), lambda: train_around(between, *shape))
    assert found.severity == severity
    assert "test_calls_tell.py" in found.message  # the line of the program


@pytest.mark.parametrize("name", HARMLESS)
def test_views_that_split_and_merge_are_not(name: str) -> None:
    between, shape = HARMLESS[name]
    assert not findings(ViewForPermute(), lambda: train_around(between, *shape))


# -- frozen batch norms ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frozen", "trains", "expected"),
    [
        ("layer", True, ["0"]),
        ("layer", False, []),
        ("nothing", True, []),
        ("head", True, []),
        ("copy", True, []),  # a target network, whose statistics may follow its own batches
    ],
)
def test_frozen_batch_norms_that_still_move(frozen: str, trains: bool, expected: list[str]) -> None:
    def program() -> None:
        layer, head = nn.BatchNorm1d(3), nn.Linear(3, 2)
        model, copy = nn.Sequential(layer, head), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        layer.train(trains)
        {"layer": layer, "head": head, "copy": copy, "nothing": nn.ReLU()}[frozen].requires_grad_(
            False
        )
        x = torch.randn(BATCH, 3)
        train(model, lambda net: (net(x) - copy(x)).square().sum())

    found = findings(FrozenBatchNorm(), program)
    assert [str(f.place.node).rpartition(".")[2] for f in found if f.place] == expected


# -- concatenations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "shape", "copies"),
    [
        (lambda x: torch.cat([x, x], 1), (8, 2, 3), 2),
        (lambda x: torch.cat((x, x, x), dim=-1), (3, 5), 3),
        (lambda x: torch.cat([x, x.flip(1)], 1), (8, 2, 3), None),
        (lambda x: torch.cat([x, -x], 1), (8, 2, 3), None),  # a concatenated ReLU
        (lambda x: torch.cat([x, x, 2 * x], 1), (8, 2, 3), None),
        (lambda x: torch.cat([x, x, x], 1), (1, 5, 5), None),  # gray as three colours
        (lambda x: torch.cat([x, x])[:BATCH], (8,), None),  # along the batch
        (lambda x: x * torch.cat([torch.ones(4)] * 2), (8,), None),  # no gradient: rotary angles
        (lambda x: torch.cat([x], 1), (8,), None),
    ],
)
def test_a_tensor_joined_with_itself(
    between: Between, shape: tuple[int, ...], copies: int | None
) -> None:
    found = findings(ConcatenatedWithItself(), lambda: train_around(between, *shape))
    assert [finding.evidence["count"] for finding in found] == ([copies] if copies else [])
    assert all("test_calls_tell.py" in finding.message for finding in found)


# -- softmaxes -----------------------------------------------------------------------------------


def attention(dim: int, product: str = "@", drop: float = 0.0) -> Between:
    """Self-attention [batch, 5, 4] whose softmax runs over `dim`."""

    def between(x: Tensor) -> Tensor:
        weights = F.dropout((x @ x.transpose(1, 2)).softmax(dim), drop)
        if product == "einsum":
            return torch.einsum("bij,bjd->bid", weights, x)
        return torch.bmm(weights, x) if product == "bmm" else weights @ x

    return between


def slots(x: Tensor) -> Tensor:
    """Slots compete for inputs, and their weights are normalized again."""
    weights = (x @ x.transpose(1, 2)).softmax(1)
    return (weights / weights.sum(-1, keepdim=True)) @ x


def clusters(x: Tensor) -> Tensor:
    """Assigns 5 nodes to 4 clusters, and pools them."""
    assigned = x.softmax(-1)
    return assigned.transpose(1, 2) @ x


@pytest.mark.parametrize(
    "wrong",
    [attention(1), attention(-2, "einsum", 0.1), attention(1, "bmm")],
    ids=["matmul", "einsum", "bmm"],
)
def test_a_softmax_over_the_queries_is_found(wrong: Between) -> None:
    (found,) = findings(SoftmaxAxis(), lambda: train_around(wrong, 5, 4))
    assert (found.severity, found.evidence["dim"]) == ("error", 1)
    assert "[6, 5, 5]" in found.message


@pytest.mark.parametrize(
    "right",
    [attention(2), attention(-1, "einsum"), attention(-1, drop=0.1), slots, clusters],
    ids=["matmul", "einsum", "dropout", "slots", "clusters"],
)
def test_a_softmax_over_what_is_summed_is_not(right: Between) -> None:
    assert not findings(SoftmaxAxis(), lambda: train_around(right, 5, 4))


HIDDEN = torch.tensor([[0, 0, 1, 1, 1]] * 5).bool()  # three of five


def masked(how: Callable[[Tensor], Tensor]) -> Between:
    """Attention between equal vectors, whose scores are then all alike."""
    return lambda x: how((x * 0) @ x.transpose(1, 2)) @ x


def again(scores: Tensor) -> Tensor:
    """A softmax of masked products that is masked and normalized again."""
    keep = (~HIDDEN).float()
    weights = (scores * keep).softmax(-1) * keep
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "how",
    [
        lambda s: s.masked_fill(HIDDEN, 0.0).softmax(-1),
        lambda s: torch.where(~HIDDEN, s, torch.zeros_like(s.detach())).softmax(-1),
        lambda s: F.softmax(s * (~HIDDEN).float() / 2, dim=-1),
    ],
    ids=["masked_fill", "where", "product"],
)
def test_a_mask_of_zeros_before_a_softmax_hides_nothing(how: Callable[[Tensor], Tensor]) -> None:
    (found,) = findings(IneffectiveMask(), lambda: train_around(masked(how), 5, 4))
    assert found.evidence == {"hidden": 0.6, "weight": 0.6, "fill": 0.0}  # equal scores


@pytest.mark.parametrize(
    "how",
    [
        lambda s: s.masked_fill(HIDDEN, float("-inf")).softmax(-1),
        lambda s: torch.where(~HIDDEN, s, torch.full_like(s.detach(), -1e9)).softmax(-1),
        lambda s: s.masked_fill(HIDDEN, -20.0).softmax(-1),
        again,
        lambda s: (s + HIDDEN * -1e4).softmax(-1),
    ],
    ids=["infinity", "where", "twenty", "again", "sum"],
)
def test_a_mask_of_large_numbers_hides(how: Callable[[Tensor], Tensor]) -> None:
    assert not findings(IneffectiveMask(), lambda: train_around(masked(how), 5, 4))


def pooled(dim: int) -> Between:
    """Weighs 5 positions by scores [batch, 5, 1]."""
    return lambda x: (x * x.sum(-1, keepdim=True).softmax(dim)).sum(1)


def test_a_softmax_over_one_value_is_found() -> None:
    (found,) = findings(SingleWeight(), lambda: train_around(pooled(-1), 5, 4))
    assert (found.severity, found.evidence["shape"]) == ("hint", "[6, 5, 1]")
    rights: list[Between] = [
        pooled(1),
        lambda x: x.softmax(-1),
        lambda x: x[:, :1].flatten(1).softmax(-1),
    ]
    for right in rights:
        assert not findings(SingleWeight(), partial(train_around, right, 5, 4))


# -- the last step ---------------------------------------------------------------------------------

LENGTHS = torch.tensor([7, 4, 5, 3, 7, 2])  # of 7 positions: four of six samples are padded


class Reader(nn.Module):
    """A GRU over tokens; `read` takes its output, its final state and the lengths."""

    def __init__(self, read: Callable[..., Tensor], *, packs: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.read, self.packs = read, packs

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.packs:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, state = self.gru(x)
        if self.packs:
            out, _ = nn.utils.rnn.pad_packed_sequence(out, True)
        answer: Tensor = self.head(self.read(out, state, lengths))
        return answer


def read_tokens(
    read: Callable[..., Tensor], *, packs: bool = False, pads: str = "right"
) -> Callable[[], None]:
    def program() -> None:
        def loss_of(model: nn.Module) -> Tensor:
            tokens = torch.randint(1, 20, (BATCH, 7))
            beyond = torch.arange(7) >= LENGTHS[:, None]
            if pads != "none":
                tokens[beyond if pads == "right" else beyond.flip(1)] = 0
            answer: Tensor = F.cross_entropy(model(tokens, LENGTHS), torch.randint(2, (BATCH,)))
            return answer

        train(Reader(read, packs=packs), loss_of)

    return program


def last(out: Tensor, _state: Tensor, _lengths: Tensor) -> Tensor:
    return out[:, -1]


def final(_out: Tensor, state: Tensor, _lengths: Tensor) -> Tensor:
    return state[-1]


def at_the_end(out: Tensor, _state: Tensor, lengths: Tensor) -> Tensor:
    return out[torch.arange(BATCH), lengths - 1]


def mean(out: Tensor, _state: Tensor, lengths: Tensor) -> Tensor:
    there = (torch.arange(7) < lengths[:, None]).float()
    return (out * there[..., None]).sum(1) / lengths[:, None]


@pytest.mark.parametrize(
    ("read", "severity"),
    [
        (last, "warning"),
        (lambda o, _s, _l: o.select(1, 6), "warning"),
        (lambda o, _s, _l: o[:, 0] + o[:, -1], "warning"),
        (final, "hint"),
    ],
)
def test_a_result_that_is_read_after_the_padding_is_found(
    read: Callable[..., Tensor], severity: str
) -> None:
    (found,) = findings(PaddedLastStep(), read_tokens(read))
    assert found.severity == severity
    assert found.evidence["padded samples"] == pytest.approx(4 / 6, abs=1e-4)


@pytest.mark.parametrize(
    "program",
    [
        read_tokens(at_the_end),
        read_tokens(mean),
        read_tokens(final, packs=True),
        read_tokens(last, pads="left"),
        read_tokens(last, pads="none"),
        read_tokens(lambda o, _s, _l: sum((o[:, t] for t in range(7)), start=o[:, 0])),
    ],
    ids=["lengths", "mean", "packed", "left", "none", "loop"],
)
def test_results_that_are_read_at_tokens_are_not(program: Callable[[], None]) -> None:
    assert not findings(PaddedLastStep(), program)
