"""CTC: read sequences of symbols from noisy frames whose alignment is unknown."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

CASES = (
    "healthy",
    "probabilities_not_logs",
    "blank_is_a_label",
    "view_instead_of_transpose",
    "encoder_not_optimized",
    "variant_packed",
)
SYMBOLS, FEATURES, FRAMES, LONGEST = 6, 12, 40, 7
STEPS, BATCH = 160, 24


class Strokes:
    """Writes samples: every symbol is a short pattern, repeated over two to four frames."""

    def __init__(self, first: int) -> None:
        self.first = first  # the number of the first symbol
        self.patterns = torch.randn(SYMBOLS, 3, FEATURES)

    def batch(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return frames, frame counts, symbols and symbol counts."""
        frames = torch.zeros(count, FRAMES, FEATURES)
        sizes = torch.randint(3, LONGEST + 1, (count,))
        symbols = torch.randint(0, SYMBOLS, (count, LONGEST))
        lengths = torch.zeros(count, dtype=torch.long)
        widths, gaps = torch.randint(2, 5, (2, count, LONGEST)).tolist()
        for i in range(count):
            t = 1
            for k in range(int(sizes[i])):
                for w in range(widths[i][k]):
                    if t < FRAMES:
                        frames[i, t] = self.patterns[symbols[i, k], min(w, 2)]
                    t += 1
                t += gaps[i][k] - 2
            lengths[i] = min(t + 1, FRAMES)
        return frames + 0.5 * torch.randn_like(frames), lengths, symbols + self.first, sizes


class Reader(nn.Module):
    """A convolution, a GRU in both directions, and a linear layer to symbols and blank."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.conv = nn.Conv1d(FEATURES, 32, 3, padding=1)
        self.gru = nn.GRU(32, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, SYMBOLS + 1)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        x = torch.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        if self.case == "variant_packed":
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            x, _ = nn.utils.rnn.pad_packed_sequence(
                self.gru(packed)[0], batch_first=True, total_length=FRAMES
            )
        else:
            x, _ = self.gru(x)
        return self.head(x)


def distance(a: list[int], b: list[int]) -> int:
    """The edit distance of two sequences."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        new = [i]
        for j, right in enumerate(b, 1):
            new.append(min(new[-1] + 1, row[j] + 1, row[j - 1] + (left != right)))
        row = new
    return row[-1]


@torch.no_grad()
def error_rate(model: Reader, data: Strokes, blank: int) -> float:
    """Edit distance per symbol after greedy decoding."""
    model.eval()
    frames, lengths, symbols, sizes = data.batch(200)
    best = model(frames, lengths).argmax(-1)
    wrong = 0
    for i in range(len(best)):
        path = torch.unique_consecutive(best[i, : lengths[i]]).tolist()
        wrong += distance([s for s in path if s != blank], symbols[i, : sizes[i]].tolist())
    return wrong / int(sizes.sum())


def main(case: str) -> None:
    torch.manual_seed(0)
    data = Strokes(first=0 if case == "blank_is_a_label" else 1)
    model = Reader(case)
    trained = model.head if case == "encoder_not_optimized" else model
    optimizer = torch.optim.Adam(trained.parameters(), lr=4e-3)
    criterion = nn.CTCLoss(blank=0)
    for step in range(STEPS):
        frames, lengths, symbols, sizes = data.batch(BATCH)
        logits = model(frames, lengths)
        logs = logits.softmax(-1)
        if case != "probabilities_not_logs":
            logs = logits.log_softmax(-1)
        if case == "view_instead_of_transpose":
            logs = logs.reshape(FRAMES, BATCH, -1)
        else:
            logs = logs.transpose(0, 1)
        loss = criterion(logs, symbols, lengths, sizes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"quality (symbol error rate, lower is better): {error_rate(model, data, 0):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
