"""Recurrent nets, attention, transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.collection import Collection

SEQUENCES = Collection()
_BATCH, _LENGTH, _WIDTH = 4, 6, 8


def _tokens() -> Tensor:
    return torch.randn(_BATCH, _LENGTH, _WIDTH)


def _recurrent(net: nn.Module) -> Program:
    return usual(net, lambda m: m(_tokens())[0].square().mean())


SEQUENCES["rnn"] = lambda: _recurrent(nn.RNN(_WIDTH, 8, 2, batch_first=True, dropout=0.2))
SEQUENCES["gru"] = lambda: _recurrent(nn.GRU(_WIDTH, 8, 2, batch_first=True, dropout=0.2))
SEQUENCES["lstm"] = lambda: _recurrent(nn.LSTM(_WIDTH, 8, 2, batch_first=True, dropout=0.2))
SEQUENCES["lstm-time-first"] = lambda: _recurrent(nn.LSTM(_WIDTH, 8))
SEQUENCES["lstm-both-ways"] = lambda: _recurrent(nn.LSTM(_WIDTH, 8, bidirectional=True))
SEQUENCES["lstm-projected"] = lambda: _recurrent(nn.LSTM(_WIDTH, 8, proj_size=4))


@SEQUENCES
def lstm_packed() -> Program:
    """Packed sequences of different lengths, sorted or not."""

    def loss(net: nn.Module) -> Tensor:
        lengths = torch.randint(1, _LENGTH + 1, (_BATCH,))
        packed = rnn.pack_padded_sequence(_tokens(), lengths, True, enforce_sorted=False)
        out, _ = net(packed)
        return rnn.pad_packed_sequence(out, batch_first=True)[0].square().mean()

    return usual(nn.LSTM(_WIDTH, 8, batch_first=True), loss)


class _Cells(nn.Module):
    def __init__(self, kind: type[nn.Module], steps: int) -> None:
        super().__init__()
        self.cell, self.steps = kind(_WIDTH, 8), steps
        self.read = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for number in range(self.steps):
            state = self.cell(x[:, number % x.shape[1]], state)
        return self.read(state[0] if isinstance(state, tuple) else state)


def _cells(kind: type[nn.Module], steps: int) -> Program:
    return usual(_Cells(kind, steps), lambda m: m(_tokens()).square().mean())


SEQUENCES["rnn-cell"] = lambda: _cells(nn.RNNCell, 6)
SEQUENCES["gru-cell"] = lambda: _cells(nn.GRUCell, 6)
SEQUENCES["lstm-cell"] = lambda: _cells(nn.LSTMCell, 6)
SEQUENCES["lstm-cell-300-calls"] = lambda: _cells(nn.LSTMCell, 300)


class _Attends(nn.Module):
    def __init__(self, *, weights: bool, batch_first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            _WIDTH, 2, dropout=0.1, batch_first=batch_first, add_bias_kv=weights
        )
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=self.weights)
        return x + mixed if weights is None else x + mixed + weights.mean()


def _attends(*, weights: bool, batch_first: bool = True) -> Program:
    model = _Attends(weights=weights, batch_first=batch_first)
    return usual(model, lambda m: m(_tokens()).square().mean())


SEQUENCES["attention"] = lambda: _attends(weights=False)
SEQUENCES["attention-weights"] = lambda: _attends(weights=True)
SEQUENCES["attention-time-first"] = lambda: _attends(weights=True, batch_first=False)


def _layer(**options: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(_WIDTH, 2, 16, batch_first=True, **options)


@SEQUENCES
def encoder() -> Program:
    """A transformer encoder, evaluated by its native kernel."""
    model = nn.TransformerEncoder(_layer(), 2)
    return usual(model, lambda m: m(_tokens()).square().mean())


@SEQUENCES
def encoder_norm_first() -> Program:
    """Norms before the branches, for which torch has no nested fast path."""
    model = nn.TransformerEncoder(_layer(norm_first=True), 2, enable_nested_tensor=False)
    return usual(model, lambda m: m(_tokens()).square().mean())


@SEQUENCES
def encoder_padded() -> Program:
    """With a padding mask: evaluated by the native kernel on nested tensors."""
    mask = torch.arange(_LENGTH) >= torch.tensor([[6], [3], [5], [6]])

    def loss(net: nn.Module) -> Tensor:
        return net(_tokens(), src_key_padding_mask=mask).square().mean()

    return usual(nn.TransformerEncoder(_layer(), 2), loss)


class _OnFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(_layer(), 2).requires_grad_(False)
        self.head = nn.Linear(_WIDTH, 3)

    def train(self, mode: bool = True) -> _OnFrozen:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@SEQUENCES
def encoder_frozen() -> Program:
    """A frozen encoder, kept in evaluation mode and on its native kernel while the head trains."""
    return usual(_OnFrozen(), lambda m: m(_tokens()).square().mean())


class _Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(_WIDTH, 2, 16, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)


@SEQUENCES
def decoder() -> Program:
    """A causal decoder attending to a memory."""
    return usual(_Decodes(), lambda m: m(_tokens(), _tokens()).square().mean())


@SEQUENCES
def transformer() -> Program:
    """An encoder and a decoder."""
    model = nn.Transformer(_WIDTH, 2, 1, 1, 16, batch_first=True)
    return usual(model, lambda m: m(_tokens(), _tokens()).square().mean())


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        chance = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@SEQUENCES
def gpt() -> Program:
    """Fused causal attention with dropout; embedding and head are tied."""
    return usual(_Gpt(), lambda m: m(torch.randint(20, (_BATCH, _LENGTH + 1))))


class _Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(20, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(_WIDTH, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words[:, :-1]) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:].flatten())


class _Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.halt = _Block(), nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = self.block(x)
            if float(self.halt(x).sigmoid().mean()) > 0.6:
                break
        return x


@SEQUENCES
def universal_transformer() -> Program:
    """Repeats one block; the data determine how often."""
    return usual(_Universal(), lambda m: m(_tokens()).square().mean())


class _Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(_WIDTH, _WIDTH, 2, dilation=2**i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for i, conv in enumerate(self.convs):
            x = x + conv(F.pad(x, (2**i, 0))).relu()
        return x.transpose(1, 2)


@SEQUENCES
def temporal_convolution() -> Program:
    """Dilated causal convolutions, padded by hand."""
    return usual(_Causal(), lambda m: m(_tokens()).square().mean())


class _StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.rate = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Parameter(torch.rand(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        step, value, gate = self.project(x).chunk(3, -1)
        decay = torch.exp(-F.softplus(step) * self.rate)
        state, states = x.new_zeros(x.shape[0], _WIDTH), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + value[:, t]
            states.append(state)
        return torch.stack(states, 1) * gate.sigmoid()


@SEQUENCES
def state_space() -> Program:
    """A selective state-space layer, scanned in Python."""
    return usual(_StateSpace(), lambda m: m(_tokens()).square().mean())


@SEQUENCES
def lstm_remembering() -> Program:
    """A state that is detached and passed from step to step."""
    net, kept = nn.LSTM(_WIDTH, 8, batch_first=True), dict[str, tuple[Tensor, ...] | None]()

    def loss(model: nn.Module) -> Tensor:
        out, state = model(_tokens(), kept.get("state"))
        kept["state"] = tuple(part.detach() for part in state)
        return out.square().mean()

    return usual(net, loss)
