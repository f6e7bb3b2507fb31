"""Forecast many seasonal series with dilated causal convolutions."""

from __future__ import annotations

import copy
import itertools
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "window_reaches_into_target",
    "reads_first_position",
    "loss_broadcasts",
    "relu_on_output",
    "variant_ema_huber_noise",
)
WINDOW, AHEAD = 32, 4
STEPS, BATCH = 300, 64


def make_series(count: int = 60, length: int = 400) -> Tensor:
    """Sums of two seasons, a slow walk and noise, around levels in the thousands."""
    t = torch.arange(length)[None]
    period = torch.randint(8, 15, (count, 1))
    phase = 6.28 * torch.rand(count, 1)
    season = torch.sin(6.28 * t / period + phase) + 0.5 * torch.sin(6.28 * t / 24 + phase)
    walk = 0.08 * torch.randn(count, length).cumsum(1)
    series = season + walk + 0.1 * torch.randn(count, length)
    return 3000 + 900 * series


class Forecaster(nn.Module):
    """Causal convolutions with growing dilation; reads the last position."""

    def __init__(self, case: str, size: int = 32) -> None:
        super().__init__()
        self.position = 0 if case == "reads_first_position" else -1
        sizes = [1, size, size, size]
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, 3, dilation=2**i) for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        self.hidden = nn.Linear(size, size)
        self.out = nn.Linear(size, 1)
        self.last: nn.Module = nn.ReLU() if case == "relu_on_output" else nn.Identity()

    def forward(self, window: Tensor) -> Tensor:
        x = window[:, None]
        for i, conv in enumerate(self.convs):
            x = torch.relu(conv(F.pad(x, (2 * 2**i, 0))))
        return self.last(self.out(torch.relu(self.hidden(x[:, :, self.position]))))


def sample(series: Tensor, first: int, last: int, count: int, shift: int) -> tuple[Tensor, Tensor]:
    """Windows and the value AHEAD steps after their end; `shift` moves the window."""
    rows = torch.randint(0, len(series), (count,))
    ends = torch.randint(first + WINDOW, last - AHEAD, (count,))
    columns = ends[:, None] + torch.arange(-WINDOW, 0) + shift
    return series[rows[:, None], columns], series[rows, ends + AHEAD - 1]


@torch.no_grad()
def error(model: Forecaster, series: Tensor) -> float:
    """The mean absolute error on the last quarter, in standard deviations."""
    model.eval()
    windows, target = sample(series, 300, 400, 1000, 0)
    miss = model(windows)[:, 0] - target
    model.train()
    return float(miss.abs().mean())


def main(case: str) -> None:
    torch.manual_seed(0)
    series = make_series()
    train = series[:, :300]
    series = (series - train.mean()) / train.std()
    model = Forecaster(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    special = case == "variant_ema_huber_noise"
    average = copy.deepcopy(model).requires_grad_(False)
    shift = AHEAD if case == "window_reaches_into_target" else 0
    for step in range(STEPS):
        windows, target = sample(series, 0, 300, BATCH, shift)
        if special:
            windows = windows + 0.03 * torch.randn_like(windows)
        predicted = model(windows)
        target = target if case == "loss_broadcasts" else target[:, None]
        loss = F.huber_loss(predicted, target) if special else F.mse_loss(predicted, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if special:
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.03)
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    final = average if special else model
    print(f"quality (absolute error, lower is better): {error(final, series):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
