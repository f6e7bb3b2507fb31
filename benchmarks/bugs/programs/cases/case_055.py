import random
import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
V, SOS, L = 14, 13, 6


class Seq2Seq(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.enc = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * d, d)
        self.cell = nn.GRUCell(2 * d, d)
        self.key = nn.Linear(2 * d, d)
        self.out = nn.Linear(2 * d, V)

    def forward(self, src, tgt=None, tf=0.0):
        H, h = self.enc(self.emb(src))
        keys = self.key(H)
        s = torch.tanh(self.bridge(torch.cat([h[0], h[1]], 1)))
        tok = torch.full((len(src),), SOS)
        ctx = keys.mean(1)
        logits = []
        for t in range(L):
            s = self.cell(torch.cat([self.emb(tok), ctx], 1), s)
            w = torch.softmax((keys @ s.unsqueeze(2)).squeeze(2) / keys.size(-1) ** 0.5, 1)
            ctx = (w.unsqueeze(2) * keys).sum(1)
            o = self.out(torch.cat([s, ctx], 1))
            logits.append(o)
            tok = tgt[:, t] if tgt is not None and random.random() < tf else o.argmax(1)
        return torch.stack(logits, 1)


def batch(n):
    s = torch.randint(0, 13, (n, L))
    return s, (s.flip(1) + 1) % 13


net = Seq2Seq()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
for step in range(1, 401):
    net.train()
    s, t = batch(48)
    tf = max(0.3, 1 - step / 400)
    loss = F.cross_entropy(net(s, t, tf).flatten(0, 1), t.flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if step % 80 == 0:
        net.eval()
        with torch.no_grad():
            s, t = batch(300)
            acc = (net(s).argmax(-1) == t).float().mean().item()
        print(f"step {step} tf {tf:.2f} loss {loss.item():.4f} free-running acc {acc:.4f}")
print("final token acc", round(acc, 4))
