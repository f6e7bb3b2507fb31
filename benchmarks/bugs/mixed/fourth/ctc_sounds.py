"""Speech-like recognition: convolution + bidirectional GRU + CTC on synthetic utterances."""
import math
import os
import sys

import numpy as np
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
torch.set_num_threads(1)

SYMBOLS, BANDS = 8, 12


def utterances(n, rng):
    """Each symbol is a glide between two formants, 5 to 8 frames long, in noise."""
    data = []
    bands = np.arange(BANDS)
    for _ in range(n):
        symbols = rng.integers(0, SYMBOLS, rng.integers(3, 7))
        frames = [np.zeros((2, BANDS))]
        for s in symbols:
            length = rng.integers(5, 9)
            u = np.linspace(0, 1, length)[:, None]
            start, end = 1 + 1.4 * (s % 4), 1 + 1.4 * ((s * 3 + 1) % 8)
            low = np.exp(-0.5 * (bands - (start + (end - start) * u)) ** 2)
            high = np.exp(-0.5 * (bands - (7 + (s // 4) * 3)) ** 2)
            frames += [low + high, np.zeros((rng.integers(1, 3), BANDS))]
        x = np.concatenate(frames)
        x = x + 0.25 * rng.standard_normal(x.shape)
        labels = symbols if CASE == "case_b" else symbols + 1
        data.append((torch.tensor(x, dtype=torch.float32), torch.tensor(labels)))
    return data


def collate(items):
    lengths = torch.tensor([len(x) for x, _ in items])
    target_lengths = torch.tensor([len(y) for _, y in items])
    x = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    y = nn.utils.rnn.pad_sequence([y for _, y in items], batch_first=True)
    lengths, order = lengths.sort(descending=True)
    x = x[order]
    if CASE != "case_d":
        y, target_lengths = y[order], target_lengths[order]
    return x, lengths, y, target_lengths


class Recognizer(nn.Module):
    def __init__(self, channels=48, hidden=48):
        super().__init__()
        self.front = nn.Conv1d(BANDS, channels, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm1d(channels)
        self.gru = nn.GRU(channels, hidden, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(2 * hidden, SYMBOLS + 1)

    def forward(self, x, lengths):
        h = torch.relu(self.norm(self.front(x.transpose(1, 2))))
        if CASE == "case_c":
            h = h.reshape(h.shape[0], h.shape[2], h.shape[1])
        else:
            h = h.transpose(1, 2)
        lengths = (lengths + 1) // 2
        packed = pack_padded_sequence(h, lengths, batch_first=True)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.classify(h), lengths


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@torch.no_grad()
def token_error_rate(model, data):
    model.eval()
    errors = total = 0
    for x, y in data:
        path = model(x[None], torch.tensor([len(x)]))[0][0].argmax(-1)
        symbols = [s for s in torch.unique_consecutive(path).tolist() if s != 0]
        errors += edit_distance(symbols, y.tolist())
        total += len(y)
    model.train()
    return errors / total


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = utterances(1500, rng), utterances(150, rng)
    model = Recognizer()
    steps = 240
    if CASE == "variant_x":
        model.front.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    schedule = lambda s: 1.0
    if CASE == "variant_x":
        schedule = lambda s: min(1, (s + 1) / 30) * 0.5 * (1 + math.cos(math.pi * s / steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    for step in range(steps):
        x, lengths, y, target_lengths = collate([train[i] for i in rng.integers(0, len(train), 32)])
        if CASE == "variant_x":
            start = rng.integers(0, x.shape[1] - 3)
            x[:, start:start + 2] = 0
        logits, out_lengths = model(x, lengths)
        log_probs = logits.transpose(0, 1).log_softmax(1 if CASE == "case_a" else 2)
        loss = criterion(log_probs, y, out_lengths, target_lengths)
        optimizer.zero_grad()
        loss.backward()
        if CASE == "variant_x":
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 60 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} ter {token_error_rate(model, test):.3f}")
    print(f"final ter {token_error_rate(model, test):.4f}")


if __name__ == "__main__":
    main()
