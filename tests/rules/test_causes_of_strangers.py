"""Kinds of bugs in other people's code, each next to a healthy run without findings."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comgra_decl.rules import Finding, diagnose
from tests.support.shortened import shortened
from tests.support.traced import traced

NODES = {
    "all": {"select": "**", "capture": ["output", "output_grad"], "values": True},
    "weights": {"select": "**", "capture": ["parameter", "parameter_grad"]},
}
Loss = Callable[[nn.Module], Tensor]


def found(root: Path, training: Callable[[], object], **spec: Any) -> dict[str, Finding]:
    """Returns the findings of a training run, by rule."""
    torch.manual_seed(0)
    findings = diagnose(traced(root, NODES, training, histogram={"bins": 64}, **spec)).findings
    return {finding.rule: finding for finding in findings}


def mlp(features: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, out))


def fit(
    model: nn.Module,
    loss_of: Loss,
    *,
    steps: int = 20,
    optimizer: torch.optim.Optimizer | None = None,
    between: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        between()
        optimizer.step()
        after()


# -- data --------------------------------------------------------------------------------------

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def with_target(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([x[:, 1:], 2 * y[:, None] - 1], 1), y


def with_codes_in_targets(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.where(torch.rand(len(y)) < 0.05, -199.0, y)


def with_codes_in_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    codes = (torch.rand(x.shape) < 0.05) & (torch.arange(x.shape[1]) == 2)
    return torch.where(codes, -99.0, x), y


def with_large_column(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * torch.tensor([1.0, 1, 1, 5000, 1]), y


def unchanged(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def regression(change: Change, model: nn.Module) -> Tensor:
    x = torch.randn(32, 5)
    x, y = change(x, x.sum(1) + 0.3 * torch.randn(32))
    return F.mse_loss(model(x)[:, 0], y)


DATA_RULES = {"target_among_inputs", "placeholder_values", "uneven_columns"}


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        pytest.param(with_target, {"target_among_inputs"}, marks=pytest.mark.slow),
        (with_codes_in_targets, {"placeholder_values"}),
        pytest.param(with_codes_in_inputs, {"placeholder_values"}, marks=pytest.mark.slow),
        pytest.param(with_large_column, {"uneven_columns"}, marks=pytest.mark.slow),
        (unchanged, set()),
    ],
)
def test_columns_of_inputs_and_targets(change: Change, rules: set[str], tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: fit(mlp(5, 1), partial(regression, change)))
    assert findings.keys() & DATA_RULES == rules
    if change is with_target:
        assert findings["target_among_inputs"].evidence["element"] == "[4]"
    if change is with_codes_in_inputs:
        assert findings["placeholder_values"].evidence["value"] == -99
    if change is with_large_column:
        assert findings["uneven_columns"].evidence["column"] == 3


def rows_out_of_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y[torch.randperm(len(y))]


@pytest.mark.parametrize("change", [rows_out_of_order, unchanged])
def test_targets_that_belong_to_other_rows(change: Change, tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: fit(mlp(5, 1), partial(regression, change), steps=150))
    finding = findings.get("no_better_than_constant")
    if change is unchanged:
        assert finding is None
    else:
        assert finding is not None
        assert float(finding.evidence["constant"]) == pytest.approx(5.09, rel=0.1)  # its variance


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.slow
def test_binary_targets_that_have_nothing_to_do_with_inputs(known: bool, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 5)
        y = (x[:, 0] > 0.5) if known else torch.rand(32) < 0.3
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], y.float())

    findings = found(tmp_path, lambda: fit(mlp(5, 1), loss_of, steps=150))
    assert ("no_better_than_constant" in findings) is not known


@pytest.mark.parametrize("in_place", [False, True])
def test_noise_that_is_added_to_the_data_set(in_place: bool, tmp_path: Path) -> None:
    def training() -> None:
        data = torch.randn(320, 5)
        labels = (data[:, 0] > 0).long()
        batches = iter([*range(0, 320, 32)] * 12)

        def loss_of(model: nn.Module) -> Tensor:
            at = next(batches)
            x, noise = data[at : at + 32], 0.3 * torch.randn(32, 5)
            x = x.add_(noise) if in_place else x + noise
            return F.cross_entropy(model(x), labels[at : at + 32])

        fit(mlp(5, 3), loss_of, steps=120)

    assert ("input_drift" in found(tmp_path, training)) is in_place


@pytest.mark.parametrize("same", [False, True])
def test_two_views_of_each_sample(same: bool, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 5)
        one = x + 0.1 * torch.randn(32, 5)
        two = one.clone() if same else x + 0.1 * torch.randn(32, 5)
        a, b = (F.normalize(model(view), dim=1) for view in (one, two))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(32))

    assert ("identical_views" in found(tmp_path, lambda: fit(mlp(5, 8), loss_of))) is same


# -- sequences ---------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A recurrent network with one output per token."""

    def __init__(self, *, both: bool = False, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = nn.GRU(8, 8, batch_first=batch_first, bidirectional=both)
        self.out = nn.Linear(16 if both else 8, 11)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rnn(self.embed(x))[0])
        return logits


def next_token(model: nn.Module, *, shift: int = 1) -> Tensor:
    tokens = torch.randint(0, 11, (16, 13))
    x, y = tokens[:, :-1], tokens[:, shift : 12 + shift]
    return F.cross_entropy(model(x).reshape(-1, 11), y.reshape(-1))


SEQUENCE_RULES = {"target_among_inputs", "future_visible", "wrong_positions"}


@pytest.mark.parametrize(
    ("shift", "both", "rules"),
    [
        (1, False, set()),
        (0, False, {"target_among_inputs"}),
        (1, True, {"future_visible"}),
    ],
)
@pytest.mark.slow
def test_targets_of_a_language_model(
    shift: int, both: bool, rules: set[str], tmp_path: Path
) -> None:
    training = partial(fit, Tagger(both=both), partial(next_token, shift=shift))
    assert found(tmp_path, training).keys() & SEQUENCE_RULES == rules


@pytest.mark.parametrize(
    ("shifted", "both", "rules"),
    [
        (False, False, {"target_among_inputs"}),
        (True, False, set()),
        (True, True, {"future_visible"}),
    ],
)
@pytest.mark.slow
def test_targets_taken_from_the_input_of_a_language_model(
    shifted: bool, both: bool, rules: set[str], tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randint(0, 11, (16, 13))
        logits = model(x)
        if not shifted:
            return F.cross_entropy(logits.flatten(0, 1), x.flatten())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    findings = found(tmp_path, partial(fit, Tagger(both=both), loss))
    assert findings.keys() & SEQUENCE_RULES == rules


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.slow
def test_a_language_model_that_runs_over_the_batch(batch_first: bool, tmp_path: Path) -> None:
    findings = found(tmp_path, partial(fit, Tagger(batch_first=batch_first), next_token))
    assert ("batch_as_time" in findings) is not batch_first


class Attention(nn.Module):
    """Self-attention with four heads, implemented in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed, self.out = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.project = nn.Linear(16, 48)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        batch, length, width = hidden.shape
        if self.way.startswith("layer"):
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            hidden = self.layer(hidden, mask if self.way == "layer" else None)
            logits: Tensor = self.out(hidden)
            return logits
        q, k, v = self.project(hidden).reshape(batch, length, 3, 4, 4).unbind(2)
        if self.way != "over heads":
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.way.startswith("by hand"):
            later = torch.ones(length, length).triu(1).bool()
            hidden_from = {"by hand": later, "by hand, reversed": later.T}.get(self.way)
            scores = q @ k.transpose(-1, -2) / 2
            if hidden_from is not None:
                scores = scores.masked_fill(hidden_from, -torch.inf)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.way == "fused")
        if self.way != "over heads":
            mixed = mixed.transpose(1, 2)
        mixed = mixed.reshape(batch, length, width)
        predicted: Tensor = self.out(hidden + mixed)
        return predicted


@pytest.mark.parametrize(
    ("way", "rules"),
    [
        ("fused", set()),
        ("fused, open", {"future_visible"}),
        ("by hand", set()),
        ("by hand, open", {"future_visible"}),
        ("by hand, reversed", {"future_visible"}),
        ("layer", set()),
        ("layer, open", {"future_visible"}),
        ("over heads", {"wrong_positions"}),
    ],
)
@pytest.mark.slow
def test_what_attention_sees(way: str, rules: set[str], tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: fit(Attention(way), next_token, steps=5))
    assert findings.keys() & SEQUENCE_RULES == rules


class Masked(nn.Module):
    """Attention over padded sequences."""

    def __init__(self, way: str, *, inverted: bool) -> None:
        super().__init__()
        self.way, self.inverted = way, inverted
        self.embed, self.out = nn.Embedding(11, 16), nn.Linear(16, 3)
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, ignored = self.embed(x), (x != 0) if self.inverted else (x == 0)
        if self.way == "module":
            h = h + self.attend(h, h, h, key_padding_mask=ignored)[0]
        else:
            one, mask = h[:, None], ~ignored[:, None, None, :]
            h = h + F.scaled_dot_product_attention(one, one, one, attn_mask=mask)[:, 0]
        logits: Tensor = self.out(h.mean(1))
        return logits


def padded(*shape: int) -> Tensor:
    """Tokens from 1 to 10, followed by zeros from a random position on."""
    tokens, lengths = torch.randint(1, 11, shape), torch.randint(3, shape[1] - 2, (shape[0],))
    return tokens.masked_fill(torch.arange(shape[1]) >= lengths[:, None], 0)


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("way", [pytest.param("module", marks=pytest.mark.slow), "function"])
def test_padding_masks(way: str, inverted: bool, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(padded(16, 12)), torch.randint(0, 3, (16,)))

    findings = found(tmp_path, lambda: fit(Masked(way, inverted=inverted), loss_of, steps=5))
    assert ("wrong_positions" in findings) is inverted


@pytest.mark.slow
def test_an_inverted_padding_mask_is_no_missing_causal_mask(tmp_path: Path) -> None:
    def training() -> None:
        embed, out = nn.Embedding(11, 16), nn.Linear(16, 11)
        model = nn.ModuleDict({"embed": embed, "out": out})

        class Decoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, x: Tensor) -> Tensor:
                h = embed(x)
                later = torch.ones(12, 12).triu(1).bool()
                hidden = later | (x != 0)[:, None]  # everything but padding
                weights = (h @ h.transpose(1, 2)).masked_fill(hidden, -1e9).softmax(-1)
                logits: Tensor = out(h + weights @ h)
                return logits

        def loss(network: nn.Module) -> Tensor:
            x = padded(16, 13)
            return F.cross_entropy(network(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

        fit(Decoder(), loss)

    findings = found(tmp_path, training)
    assert findings.keys() & SEQUENCE_RULES == {"wrong_positions"}
    assert "inverted" in findings["wrong_positions"].message


@pytest.mark.parametrize("ignored", [False, True])
def test_padding_in_the_loss(ignored: bool, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        tokens = padded(16, 13)
        logits = model(tokens[:, :-1]).reshape(-1, 11)
        skip = 0 if ignored else -100
        return F.cross_entropy(logits, tokens[:, 1:].reshape(-1), ignore_index=skip)

    findings = found(tmp_path, lambda: fit(Tagger(), loss_of))
    assert ("padding_in_loss" in findings) is not ignored


class Reader(nn.Module):
    """A recurrent network that reads [batch, time, features]."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 8, batch_first=batch_first), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rnn(x)[0][:, -1])
        return logits


class Positions(nn.Module):
    """Adds a table of positions [32, 1, features] to sequences."""

    def __init__(self, *, by_time: bool) -> None:
        super().__init__()
        self.table, self.by_time = nn.Buffer(torch.randn(32, 1, 3)), by_time

    def forward(self, x: Tensor) -> Tensor:
        if self.by_time:
            return x + self.table[: x.size(1)].transpose(0, 1)
        return x + self.table[: x.size(0)]


def waves(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(16, 7, 3)), torch.randint(0, 4, (16,)))


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_recurrent_network_that_runs_over_the_batch(batch_first: bool, tmp_path: Path) -> None:
    findings = found(tmp_path, lambda: fit(Reader(batch_first=batch_first), waves, steps=3))
    assert ("batch_as_time" in findings) is not batch_first


@pytest.mark.slow
def test_attention_over_time_returns_weights_that_are_no_sequences(tmp_path: Path) -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend, self.out = nn.MultiheadAttention(8, 2), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            logits: Tensor = self.out(self.attend(x, x, x)[0].mean(0))
            return logits

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 10, 8)), torch.randint(0, 4, (16,)))

    assert "batch_as_time" not in found(tmp_path, lambda: fit(TimeFirst(), loss, steps=3))


@pytest.mark.slow
def test_agents_that_attend_to_each_other_at_each_time(tmp_path: Path) -> None:
    class Agents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(20, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            agents = x.unflatten(2, (5, 4))
            mixed = F.scaled_dot_product_attention(agents, agents, agents).flatten(2)
            logits: Tensor = self.out(self.rnn(mixed)[0][:, -1])
            return logits

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(16, 12, 20)), torch.randint(0, 4, (16,)))

    assert "wrong_positions" not in found(tmp_path, lambda: fit(Agents(), loss, steps=3))


@pytest.mark.slow
def test_positions_that_count_samples(tmp_path: Path) -> None:
    model = nn.Sequential(Positions(by_time=False), Reader(batch_first=True))
    finding = found(tmp_path, lambda: fit(model, waves, steps=3))["batch_as_time"]
    assert finding.evidence["shape"] == "[16, 7, 3]"


class Messages(nn.Module):
    """One round of messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent, self.head = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        received = torch.zeros(len(x), 8).index_add(0, edges[1], self.sent(x)[edges[0]])
        logits: Tensor = self.head(torch.relu(self.own(x) + received))
        return logits


@pytest.mark.slow
def test_a_graph_that_is_padded_with_nodes(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        edges = torch.randint(0, 20, (2, 60))
        logits = model(torch.randn(64, 5), edges)[:20]
        return F.cross_entropy(logits, torch.randint(0, 3, (20,)))

    assert "unreached_nodes" not in found(tmp_path, partial(fit, Messages(), loss))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.slow
def test_edges_of_batched_graphs(shifted: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module) -> Tensor:
        sizes = torch.randint(4, 9, (6,)).tolist()
        graphs, before = [], 0
        for size in sizes:
            graphs.append(torch.randint(0, size, (2, 3 * size)) + before * shifted)
            before += size
        x = torch.randn(before, 5)
        return F.cross_entropy(model(x, torch.cat(graphs, 1)), torch.randint(0, 3, (before,)))

    findings = found(tmp_path, partial(fit, Messages(), loss))
    assert ("unreached_nodes" in findings) is not shifted
    if not shifted:
        share = findings["unreached_nodes"].evidence["share"]
        assert isinstance(share, float)
        assert share < 0.35  # 8 of at least 24 nodes


# -- optimizers and settings -------------------------------------------------------------------


def sums(model: nn.Module) -> Tensor:
    x = torch.randn(32, 5)
    return F.mse_loss(model(x)[:, 0], x.sum(1))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "warms up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: min(1, n / 50)),
    "rises": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [60], gamma=10),
    "decays at once": lambda o: torch.optim.lr_scheduler.StepLR(o, 4, gamma=0.5),
    "warms up for ever": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 5000),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 150),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 40),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [60, 100], gamma=0.1),
}


@pytest.mark.parametrize("name", shortened(SCHEDULES, tried=2))
def test_schedules(name: str, tmp_path: Path) -> None:
    model = mlp(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = SCHEDULES[name](optimizer)

    def training() -> None:
        for _ in range(150):
            fit(model, sums, steps=1, optimizer=optimizer)
            schedule.step()

    wrong = name in ("decays at once", "warms up for ever", "rises")
    assert ("learning_rate_schedule" in found(tmp_path, training)) is wrong


@pytest.mark.parametrize(("decay", "strong"), [(1.0, True), (0.01, False)])
def test_weight_decay(decay: float, strong: bool, tmp_path: Path) -> None:
    model = mlp(5, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=decay)
    findings = found(tmp_path, lambda: fit(model, sums, optimizer=optimizer))
    assert ("strong_decay" in findings) is strong


@pytest.mark.parametrize(("norm", "tiny"), [(1e-3, True), (0.5, False)])
def test_clipping(norm: float, tiny: bool, tmp_path: Path) -> None:
    model = mlp(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], norm)
    findings = found(tmp_path, lambda: fit(model, sums, optimizer=optimizer, between=clip))
    assert ("tiny_clipping" in findings) is tiny


@pytest.mark.parametrize(("rate", "lost"), [(1e-5, True), (3e-2, False)])
def test_updates_of_weights_in_half_precision(rate: float, lost: bool, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 5).bfloat16()
        return F.mse_loss(model(x)[:, 0], x.sum(1))

    model = mlp(5, 1).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    findings = found(tmp_path, lambda: fit(model, loss_of, optimizer=optimizer))
    assert ("lost_updates" in findings) is lost


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.slow
def test_optimizers_of_a_generator_and_a_discriminator(both: bool, tmp_path: Path) -> None:
    def training() -> None:
        generator, judge = mlp(4, 2), mlp(2, 1)
        held = [*judge.parameters(), *(generator.parameters() if both else ())]
        first = torch.optim.Adam(generator.parameters(), 1e-3)
        second = torch.optim.Adam(held, 1e-3)
        score = F.binary_cross_entropy_with_logits
        for _ in range(10):
            second.zero_grad()
            fake = judge(generator(torch.randn(16, 4)))
            real = judge(torch.randn(16, 2))
            (score(real, torch.ones(16, 1)) + score(fake, torch.zeros(16, 1))).backward()
            second.step()
            first.zero_grad()
            score(judge(generator(torch.randn(16, 4))), torch.ones(16, 1)).backward()
            first.step()

    assert ("competing_optimizers" in found(tmp_path, training)) is both


@pytest.mark.parametrize("loaded", [False, True])
def test_frozen_layers_whose_weights_were_not_loaded(loaded: bool, tmp_path: Path) -> None:
    body = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    if loaded:
        for parameter in body.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    head = nn.Linear(32, 1)
    optimizer = torch.optim.Adam(head.parameters(), 0.01)
    model = nn.Sequential(body.requires_grad_(False), head)
    findings = found(tmp_path, lambda: fit(model, sums, optimizer=optimizer))
    assert ("random_frozen" in findings) is not loaded


@pytest.mark.slow
def test_layers_that_are_frozen_after_training_are_no_random_layers(tmp_path: Path) -> None:
    body = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(32, 1))

    def training() -> None:
        fit(model, sums)
        body.requires_grad_(False)
        fit(model, sums, optimizer=torch.optim.Adam(model[1].parameters(), 0.01))

    findings = found(tmp_path, training)
    assert not {"random_frozen", "small_update"} & set(findings)


@pytest.mark.slow
def test_an_averaged_copy_of_a_model_is_no_random_layer(tmp_path: Path) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 8))

    online, target, predictor = network(), network().requires_grad_(False), nn.Linear(8, 8)
    parameters = [*online.parameters(), *predictor.parameters()]
    optimizer = torch.optim.Adam(parameters, 0.01)

    def training() -> None:
        for _ in range(60):
            x = torch.randn(32, 5)
            optimizer.zero_grad()
            nn.functional.mse_loss(predictor(online(x)), target(x)).backward()
            optimizer.step()
            with torch.no_grad():
                for copy, original in zip(target.parameters(), online.parameters(), strict=True):
                    copy.lerp_(original, 0.05)

    assert "random_frozen" not in found(tmp_path, training)


@pytest.mark.parametrize("momentum", [0.1, 0.99])
def test_the_momentum_of_a_batch_norm(momentum: float, tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 1)
    )
    assert ("batch_norm_momentum" in found(tmp_path, lambda: fit(model, sums))) is (momentum > 0.5)


@pytest.mark.parametrize(("every", "copied"), [(0, True), (0, False), (10, True)])
@pytest.mark.slow
def test_a_target_network(every: int, copied: bool, tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 2)
        target = deepcopy(model) if copied else mlp(4, 2)
        steps = iter(range(120))

        def loss_of(model: nn.Module) -> Tensor:
            if every and next(steps) % every == 0:
                target.load_state_dict(model.state_dict())
            state, action = torch.randn(32, 4), torch.randint(0, 2, (32, 1))
            with torch.no_grad():
                value = state.sum(1) + 0.9 * target(torch.randn(32, 4)).amax(1)
            return F.smooth_l1_loss(model(state).gather(1, action)[:, 0], value)

        fit(model, loss_of, steps=120)

    assert ("lagging_copy" in found(tmp_path, training)) is (every == 0)


@pytest.mark.parametrize(
    ("way", "reversed_"), [("load", True), ("lerp", True), ("load", False), ("clip", False)]
)
@pytest.mark.slow
def test_weights_copied_in_the_wrong_direction(way: str, reversed_: bool, tmp_path: Path) -> None:
    online, target = mlp(4, 2), mlp(4, 2)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), 0.01)

    @torch.no_grad()
    def after(step: int) -> None:
        to, of = (online, target) if reversed_ else (target, online)
        if way == "load" and step % 10 == 9:
            to.load_state_dict(of.state_dict())
        for mine, its in zip(to.parameters(), of.parameters(), strict=True):
            if way == "lerp":
                mine.lerp_(its, 0.95)
            elif way == "clip":
                its.clamp_(-0.5, 0.5)
                mine.lerp_(its, 0.05)

    def training() -> None:
        for step in range(120):
            state, action = torch.randn(32, 4), torch.randint(0, 2, (32, 1))
            with torch.no_grad():
                value = state.sum(1) + 0.9 * target(torch.randn(32, 4)).amax(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(online(state).gather(1, action)[:, 0], value).backward()
            optimizer.step()
            after(step)

    lagging = found(tmp_path, training).get("lagging_copy")
    assert (lagging is not None and "wrong direction" in lagging.message) is reversed_


# -- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.slow
def test_the_weights_of_classes(inverted: bool, tmp_path: Path) -> None:
    weights = torch.tensor([4.0, 1.0, 0.2] if inverted else [0.2, 1.0, 4.0])

    def loss_of(model: nn.Module) -> Tensor:
        y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 32, replacement=True)
        return F.cross_entropy(model(torch.randn(32, 5) + y[:, None]), y, weight=weights)

    findings = found(tmp_path, lambda: fit(mlp(5, 3), loss_of))
    assert ("inverted_weights" in findings) is inverted


@pytest.mark.parametrize("divided", [False, True])
def test_the_temperature_of_similarities(divided: bool, tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 5)
        a, b = (F.normalize(model(x + 0.1 * torch.randn(32, 5)), dim=1) for _ in range(2))
        likeness = a @ b.T
        return F.cross_entropy(likeness / 0.07 if divided else likeness * 0.07, torch.arange(32))

    findings = found(tmp_path, lambda: fit(mlp(5, 8), loss_of, steps=60))
    assert ("flat_logits" in findings) is not divided


# -- series, alignments and weights ----------------------------------------------------------------


class Series(nn.Module):
    """Convolutions over time, padded on the left, or on both sides and thus seeing the future."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.first, self.last = nn.Conv1d(2, 16, 3), nn.Conv1d(16, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        sides = (2, 0) if self.causal else (1, 1)
        hidden = torch.tanh(self.first(F.pad(x.transpose(1, 2), sides)))
        out: Tensor = self.last(F.pad(hidden, sides)).transpose(1, 2)
        return out


@pytest.mark.parametrize(("causal", "shift", "rules"), [(True, 1, 0), (False, 1, 1), (False, 2, 0)])
@pytest.mark.slow
def test_a_forecast_that_sees_the_next_value(
    causal: bool, shift: int, rules: int, tmp_path: Path
) -> None:
    def forecast(model: nn.Module) -> Tensor:
        series = torch.randn(8, 20, 2).cumsum(1)
        length = 20 - shift
        return F.mse_loss(model(series[:, :length]), series[:, shift:])

    training = partial(fit, Series(causal=causal), forecast, steps=12)
    findings = found(tmp_path, training, perturbations=True)
    assert len(findings.keys() & {"future_visible"}) == rules


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lowest", [0, 1])
def test_a_label_that_is_the_blank(lowest: int, padded: bool, tmp_path: Path) -> None:
    class Letters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(x)
            return logits.log_softmax(-1)

    def loss(model: nn.Module) -> Tensor:
        lengths = torch.tensor([2, 3, 4])
        labels = torch.randint(lowest, 7, (3, 4))
        labels[0, 0] = lowest
        rows = labels * (torch.arange(4) < lengths[:, None])  # zeros as padding
        whole = torch.cat([row[:n] for row, n in zip(labels, lengths, strict=True)])
        targets = rows if padded else whole
        return F.ctc_loss(model(torch.randn(12, 3, 5)), targets, torch.full((3,), 12), lengths)

    findings = found(tmp_path, partial(fit, Letters(), loss))
    assert ("blank_in_targets" in findings) == (lowest == 0)


@pytest.mark.parametrize(
    ("share", "weight", "reported"),
    [
        pytest.param(0.1, 9.0, False, marks=pytest.mark.slow),
        pytest.param(0.1, 0.11, True, marks=pytest.mark.slow),
        (0.9, 9.0, True),
        (0.9, 0.11, False),
        pytest.param(0.5, 0.1, False, marks=pytest.mark.slow),
    ],
)
def test_a_positive_weight_that_favours_the_frequent_class(
    share: float, weight: float, reported: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        y = (torch.rand(32) < share).float()
        logits = model(torch.randn(32, 4) + y[:, None]).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, y, pos_weight=torch.tensor([weight]))

    findings = found(tmp_path, partial(fit, nn.Sequential(nn.Linear(4, 1)), loss, steps=12))
    assert ("inverted_weights" in findings) == reported


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.slow
def test_positive_weights_of_several_labels(inverted: bool, tmp_path: Path) -> None:
    shares = torch.tensor([0.05, 0.1, 0.15])
    weights = shares / (1 - shares) if inverted else (1 - shares) / shares

    def loss(model: nn.Module) -> Tensor:
        y = (torch.rand(32, 3) < shares).float()
        logits = model(torch.randn(32, 4) + y.sum(1, keepdim=True))
        return F.binary_cross_entropy_with_logits(logits, y, pos_weight=weights)

    findings = found(tmp_path, partial(fit, nn.Sequential(nn.Linear(4, 3)), loss, steps=12))
    assert ("inverted_weights" in findings) == inverted


@pytest.mark.slow
def test_another_optimizer_begins_with_a_rate_of_its_own(tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 1)
        data = torch.randn(32, 4)

        def loss(_: nn.Module) -> Tensor:
            return F.mse_loss(model(data), data[:, :1] * data[:, 1:2])

        fit(model, loss, steps=30, optimizer=torch.optim.Adam(model.parameters(), 1e-3))
        last = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(model, loss, steps=30, optimizer=last)

    assert "learning_rate_schedule" not in found(tmp_path, training)


@pytest.mark.slow
def test_a_warm_up_ends_with_its_optimizer(tmp_path: Path) -> None:
    def training() -> None:
        model = mlp(4, 1)

        def loss(_: nn.Module) -> Tensor:
            x = torch.randn(32, 4)
            return F.mse_loss(model(x), x[:, :1] * x[:, 1:2])

        first = torch.optim.Adam(model.parameters(), 0.1)
        warm = torch.optim.lr_scheduler.LinearLR(first, 0.01, total_iters=30)
        fit(model, loss, steps=30, optimizer=first, after=warm.step)
        fit(model, loss, steps=30, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))

    assert "learning_rate_schedule" not in found(tmp_path, training)


class Listed(nn.Module):
    """Embeddings in a plain list, or in a ModuleList."""

    def __init__(self, kind: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.embeds = kind([nn.Embedding(5, 3), nn.Embedding(7, 3)])
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([e(x[:, i]) for i, e in enumerate(self.embeds)], 1))
        return out


@pytest.mark.parametrize(
    ("kind", "held", "reported"),
    shortened(
        [(list, False, True), (list, True, False), (nn.ModuleList, False, False)],
        tried=2,
        several=True,
    ),
)
def test_modules_in_a_plain_list(
    kind: Callable[[list[nn.Module]], Any], held: bool, reported: bool, tmp_path: Path
) -> None:
    model = Listed(kind)
    others = [p for e in model.embeds for p in e.parameters()] if held else []
    optimizer = torch.optim.Adam([*model.parameters(), *others], 0.01)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randint(0, 5, (16, 2))
        return F.mse_loss(model(x), (x[:, :1] - x[:, 1:]).float())

    findings = found(tmp_path, partial(fit, model, loss, steps=8, optimizer=optimizer))
    assert ("unregistered_parameter" in findings) == reported


@pytest.mark.slow
def test_parameters_of_a_model_that_is_not_selected_are_registered(tmp_path: Path) -> None:
    model = mlp(4, 1)
    optimizer = torch.optim.Adam(model[2].parameters(), 0.01)  # only the head

    def loss(_: nn.Module) -> Tensor:
        return model(torch.randn(8, 4)).square().mean()

    training = partial(fit, model, loss, steps=8, optimizer=optimizer)
    nodes = {"some": {"select": "2", "capture": ["output"]}}
    run = traced(tmp_path, nodes, training)
    assert "unregistered_parameter" not in {f.rule for f in diagnose(run).findings}


def points_of_a_grid() -> Loss:
    """Collocation points that stay the same."""
    points = torch.linspace(0, 1, 16)[:, None].requires_grad_()

    def residual(model: nn.Module) -> Tensor:
        u = model(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        return (slope - points.cos()).square().mean() + u[0].square().sum()

    return residual


def adversarial_noise() -> Loss:
    """Noise that is new in each step and has the gradient of two losses."""

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(16, 1)
        noise = torch.zeros(16, 1, requires_grad=True)
        for _ in range(2):
            (model(x + noise) - x.cos()).square().mean().backward()
        assert noise.grad is not None
        return (model(x + 0.1 * noise.grad.sign() + 0 * noise) - x.cos()).square().mean()

    return loss


def updated_by_hand() -> Loss:
    """A scale that the program updates itself."""
    scale = torch.ones(1, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        if scale.grad is not None:
            scale.data -= 0.01 * scale.grad
            scale.grad = None
        x = torch.randn(16, 1)
        return (scale * model(x) - x.cos()).square().mean()

    return loss


@pytest.mark.parametrize("make", [points_of_a_grid, adversarial_noise, updated_by_hand])
@pytest.mark.slow
def test_other_tensors_with_gradients_are_not_unregistered(
    make: Callable[[], Loss], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    assert "unregistered_parameter" not in found(tmp_path, partial(fit, model, make(), steps=8))


@pytest.mark.parametrize(
    ("moves", "views", "rules"),
    [
        ("slowly", 2, set()),
        ("never", 2, {"lagging_copy"}),
        ("slowly", 1, {"identical_views"}),
        # without a teacher, a second call may serve a penalty
        pytest.param("as one", 1, set(), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_symmetric_self_distillation(
    moves: str, views: int, rules: set[str], tmp_path: Path
) -> None:
    def training() -> None:
        online, predictor = mlp(4, 3), mlp(3, 3)
        teacher = online if moves == "as one" else deepcopy(online).requires_grad_(False)
        parameters = [*online.parameters(), *predictor.parameters()]
        optimizer = torch.optim.Adam(parameters, 0.01)
        for _ in range(110):
            one = torch.randn(16, 4)
            two = one if views == 1 else one + 0.1 * torch.randn(16, 4)
            optimizer.zero_grad()
            loss = F.mse_loss(predictor(online(one)), teacher(two).detach())
            (loss + F.mse_loss(predictor(online(two)), teacher(one).detach())).backward()
            optimizer.step()
            if moves == "slowly":
                with torch.no_grad():
                    for old, new in zip(teacher.parameters(), online.parameters(), strict=True):
                        old.lerp_(new, 0.1)

    assert found(tmp_path, training).keys() & {"lagging_copy", "identical_views"} == rules


# -- roots and contrastive targets -------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "same", "expected"),
    [
        (torch.sqrt, True, True),
        pytest.param(lambda squared: squared**0.5, True, True, marks=pytest.mark.slow),
        pytest.param(torch.sqrt, False, False, marks=pytest.mark.slow),
        (lambda squared: (squared + 1e-6).sqrt(), True, False),
        pytest.param(lambda squared: squared.pow(2), True, False, marks=pytest.mark.slow),
    ],
)
def test_the_root_of_a_distance_of_zero(
    root: Callable[[Tensor], Tensor], same: bool, expected: bool, tmp_path: Path
) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        one, two = torch.randn(16, 5), torch.randn(16, 5)
        if same:
            two[3] = one[3]  # a pair of a sample with itself
        return root((model(one) - model(two)).square().sum(1)).square().mean()

    findings = found(tmp_path, lambda: fit(mlp(5, 4), loss_of))
    assert ("root_of_zero" in findings) is expected
    if expected:
        assert findings["root_of_zero"].evidence["zeros"] == 1
        assert findings["nonfinite"].because is not None


@pytest.mark.parametrize(
    ("target", "masked", "expected"),
    [
        ("self", False, True),
        pytest.param("other", False, False, marks=pytest.mark.slow),
        ("other", True, False),
    ],
)
@pytest.mark.parametrize(  # False: the batch is no dimension of the logits
    "at_once", shortened([True, False], tried=1)
)
def test_contrastive_targets_on_the_diagonal(
    at_once: bool, target: str, masked: bool, expected: bool, tmp_path: Path
) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(12, 5)
        views = x, x + 0.1 * torch.randn(12, 5)
        z = model(torch.cat(views)) if at_once else torch.cat([model(view) for view in views])
        z = F.normalize(z, dim=1)
        similarity = z @ z.T / 0.2
        if masked:
            similarity = similarity.masked_fill(torch.eye(24, dtype=torch.bool), -1e9)
        own = torch.arange(24)
        return F.cross_entropy(similarity, own if target == "self" else own.roll(12))

    findings = found(tmp_path, lambda: fit(mlp(5, 4), loss_of))
    assert ("self_as_target" in findings) is expected
    if expected:
        assert findings["self_as_target"].evidence["logit"] == pytest.approx(5, rel=1e-3)  # 1 / 0.2


@pytest.mark.slow
def test_two_views_are_compared_on_the_diagonal(tmp_path: Path) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(12, 5)
        a, b = (F.normalize(model(x + 0.1 * torch.randn(12, 5)), dim=1) for _ in range(2))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(12))

    assert "self_as_target" not in found(tmp_path, lambda: fit(mlp(5, 4), loss_of))


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        (lambda z: F.normalize(z, dim=1) @ F.normalize(z, dim=1).T * 0.1, True),
        pytest.param(
            lambda z: F.normalize(z, dim=1) @ F.normalize(z, dim=1).T / 0.1,
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda z: F.normalize(z, dim=1) @ F.normalize(z, dim=1).T * 10,
            False,
            marks=pytest.mark.slow,
        ),
        (lambda z: z @ z.T * 0.35, False),  # scores of dot products, as in attention
    ],
)
def test_similarities_times_the_temperature(
    scaled: Callable[[Tensor], Tensor], expected: bool, tmp_path: Path
) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(12, 5)
        z = model(torch.cat([x, x + 0.1 * torch.randn(12, 5)]))
        similarity = scaled(z).masked_fill(torch.eye(24, dtype=torch.bool), -1e9)
        return F.cross_entropy(similarity, torch.arange(24).roll(12))

    findings = found(tmp_path, lambda: fit(mlp(5, 4), loss_of))
    assert ("temperature_multiplied" in findings) is expected
    if expected:
        assert findings["temperature_multiplied"].evidence["factor"] == 0.1


class Dropping(nn.Module):
    """Dropout behind a rectifier that is called as a function, with nearly all units dead."""

    def __init__(self, share: float, rectified: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 1)
        self.dropout, self.rectified = nn.Dropout(share), rectified
        if rectified:
            nn.init.constant_(self.first.bias, -2.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.last(self.dropout(torch.relu(out) if self.rectified else out))


@pytest.mark.parametrize(
    ("share", "rectified", "reported"), [(0.3, True, False), (0.95, False, True)]
)
@pytest.mark.slow
def test_dropout_is_not_blamed_for_what_a_rectifier_removes(
    share: float, rectified: bool, reported: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(32, 4)
        return F.mse_loss(model(x), x[:, :1])

    findings = found(tmp_path, partial(fit, Dropping(share, rectified), loss, steps=12))
    assert ("heavy_dropout" in findings) is reported
