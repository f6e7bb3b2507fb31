import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyTransformer(nn.Module):
    def __init__(self, vocab=14, d=32, L=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(L, d)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True, norm_first=True), 2,
                                         enable_nested_tensor=False)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.enc(self.emb(x) + self.pos(torch.arange(x.size(1)))))


class Trainer:
    def __init__(self, lr=2e-3, steps=400, warmup=40):
        self.model = TinyTransformer()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.steps, self.warmup, self.lr = steps, warmup, lr
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, self.schedule)

    def schedule(self, step):
        if step < self.warmup:
            f = (step + 1) / self.warmup
        else:
            f = 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / (self.steps - self.warmup)))
        return f

    def batch(self, n=48):
        x = torch.randint(2, 14, (n, 12))
        y = x.sort(1).values
        return x, y

    def fit(self):
        for s in range(1, self.steps + 1):
            self.model.train()
            x, y = self.batch()
            loss = F.cross_entropy(self.model(x).transpose(1, 2), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.sched.step()
            if s % 80 == 0:
                print(f"step {s} loss {loss.item():.4f} acc {self.test():.4f}")
        print("final sort accuracy", round(self.test(), 4))

    @torch.no_grad()
    def test(self):
        self.model.eval()
        x, y = self.batch(300)
        return (self.model(x).argmax(-1) == y).float().mean().item()


torch.manual_seed(0)
torch.set_num_threads(1)
Trainer().fit()
