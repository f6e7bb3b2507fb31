import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)
V = 40


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.rnn = nn.GRU(d, d, batch_first=True)

    def forward(self, x):
        return self.rnn(self.emb(x))[0]


class LM(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.enc, self.out = enc, nn.Linear(32, V)

    def forward(self, x):
        return self.out(self.enc(x))


class SentimentModel(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.encoder = enc
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 2))

    def forward(self, x):
        with torch.no_grad():
            h = self.encoder(x)
        return self.head(h.mean(1))


def chain(n, T=15):
    x = torch.randint(0, V, (n, T))
    for t in range(1, T):
        go = torch.rand(n) < 0.5
        x[:, t] = torch.where(go, (x[:, t - 1] * 3 + 1) % V, x[:, t])
    return x


def reviews(n):
    x = chain(n)
    score = ((x % 7 == 2).float() - (x % 5 == 1).float()).sum(1) + 0.8 * (x[:, 1:] < x[:, :-1]).float().mean(1) - 0.4
    return x, (score > 0).long()


enc = Encoder()
lm = LM(enc)
opt = torch.optim.Adam(lm.parameters(), lr=3e-3)
for step in range(120):
    x = chain(48)
    loss = F.cross_entropy(lm(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("lm loss", round(loss.item(), 4))

xtr, ytr = reviews(1500)
xte, yte = reviews(500)
model = SentimentModel(enc)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(8):
    model.train()
    for b in torch.randperm(1500).split(50):
        loss = F.cross_entropy(model(xtr[b]), ytr[b])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    model.eval()
    with torch.no_grad():
        acc = (model(xte).argmax(1) == yte).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} val acc {acc:.4f}")
print(f"final val acc {acc:.4f}")
