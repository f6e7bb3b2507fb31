import torch
import torch.nn as nn
import torch.nn.functional as F


class Memory(nn.Module):
    def __init__(self, n_sym, hidden=48):
        super().__init__()
        self.hidden = hidden
        self.emb = nn.Embedding(n_sym, 16)
        self.cell = nn.GRUCell(16, hidden)
        self.readout = nn.Linear(hidden, n_sym)

    def forward(self, seq):
        h = torch.zeros(seq.size(0), self.hidden)
        e = self.emb(seq)
        for t in range(seq.size(1)):
            h = self.cell(e[:, t], h.detach())
        return self.readout(h)


def recall_batch(n, n_sym=8, delay=9):
    """first symbol must be recalled at the end, everything in between is filler"""
    first = torch.randint(1, n_sym, (n, 1))
    second = torch.randint(1, n_sym, (n, 1))
    filler = torch.zeros(n, delay, dtype=torch.long)
    seq = torch.cat([first, second, filler], 1)
    return seq, (first.squeeze(1) * 3 + second.squeeze(1)) % n_sym


def run():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Memory(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(501):
        seq, target = recall_batch(64)
        loss = F.cross_entropy(model(seq), target)
        optimizer.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        if step % 100 == 0:
            with torch.no_grad():
                s, t = recall_batch(500)
                acc = (model(s).argmax(1) == t).float().mean().item()
            print(f"{step:4d} loss {loss.item():.4f} grad norm {gn.item():.3f} acc {acc:.3f}")
    print("final accuracy", round(acc, 4))


run()
