import argparse
import torch
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=400)
ap.add_argument("--lr", type=float, default=5e-3)
ap.add_argument("--hidden", type=int, default=64)
args = ap.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
V, SOS, L = 12, 10, 5


class Encoder(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.emb = nn.Embedding(V, 24)
        self.rnn = nn.GRU(24, h, batch_first=True)

    def forward(self, src):
        _, h = self.rnn(self.emb(src))
        return h


class Decoder(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.emb = nn.Embedding(V, 24)
        self.rnn = nn.GRU(24, h, batch_first=True)
        self.out = nn.Linear(h, V)

    def forward(self, tgt, hidden):
        o, hidden = self.rnn(self.emb(tgt), hidden)
        return self.out(o), hidden


class Seq2Seq(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.encoder, self.decoder, self.h = Encoder(h), Decoder(h), h

    def forward(self, src, tgt_in):
        hidden = self.encoder(src)
        hidden = torch.zeros(1, src.size(0), self.h)
        logits, _ = self.decoder(tgt_in, hidden)
        return logits

    @torch.no_grad()
    def translate(self, src):
        hidden = self.encoder(src)
        tok = torch.full((len(src), 1), SOS)
        res = []
        for _ in range(L):
            logits, hidden = self.decoder(tok, hidden)
            tok = logits.argmax(-1)
            res.append(tok)
        return torch.cat(res, 1)


def batch(n):
    src = torch.randint(0, 10, (n, L))
    tgt = src.flip(1)
    tgt_in = torch.cat([torch.full((n, 1), SOS), tgt[:, :-1]], 1)
    return src, tgt_in, tgt


model = Seq2Seq(args.hidden)
opt = torch.optim.Adam(model.parameters(), lr=args.lr)
loss_fn = nn.CrossEntropyLoss()
for it in range(1, args.steps + 1):
    src, ti, to = batch(64)
    loss = loss_fn(model(src, ti).transpose(1, 2), to)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if it % 80 == 0:
        model.eval()
        s, _, t = batch(200)
        acc = (model.translate(s) == t).float().mean().item()
        model.train()
        print(f"iter {it} loss {loss.item():.4f} token accuracy {acc:.4f}")
print(f"final token accuracy {acc:.4f}")
