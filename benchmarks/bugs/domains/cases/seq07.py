"""Delayed recall with a GRU; the gap grows in stages, so the loss jumps at each stage."""
import torch
import torch.nn as nn
import torch.nn.functional as F

SYMS = 8
STAGES = [(2, 90), (5, 60), (9, 70), (14, 80)]


class Recall(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(SYMS + 2, 24)
        self.gru = nn.GRU(24, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, SYMS)
        with torch.no_grad():
            self.gru.bias_ih_l0[hidden:2 * hidden].fill_(2.0)

    def forward(self, x):
        h, _ = self.gru(self.embed(x))
        return self.readout(h)


def episode(n, gap, g):
    key = torch.randint(SYMS, (n, 2), generator=g)
    noise = torch.full((n, gap), SYMS)
    cue = torch.full((n, 2), SYMS + 1)
    x = torch.cat([key, noise, cue], 1)
    y = torch.zeros_like(x)
    m = torch.zeros(x.shape)
    y[:, -2:] = key
    m[:, -2:] = 1.0
    return x, y, m


def main():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(2)
    net = Recall()
    opt = torch.optim.RMSprop(net.parameters(), lr=4e-3, alpha=0.95)
    for gap, steps in STAGES:
        for s in range(steps):
            x, y, m = episode(64, gap, g)
            ce = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")
            loss = (ce * m).sum() / m.sum()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
        print(f"gap {gap}: {loss.item():.4f}")
    net.eval()
    with torch.no_grad():
        x, y, m = episode(500, 14, torch.Generator().manual_seed(9))
        return (net(x).argmax(-1) == y)[m.bool()].float().mean().item()


if __name__ == "__main__":
    print(main())
