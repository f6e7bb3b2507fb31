import math
import torch
import torch.nn as nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.h, C // self.h).transpose(1, 2)
        k = k.view(B, T, self.h, C // self.h).transpose(1, 2)
        v = v.view(B, T, self.h, C // self.h).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        mask = torch.tril(torch.ones(T, T)).bool()
        att = att.masked_fill(~mask, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).reshape(B, T, C)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = CausalSelfAttention(d, h)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, T, d=48, h=4, n=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(T, d)
        self.blocks = nn.Sequential(*[Block(d, h) for _ in range(n)])
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        return self.head(self.ln_f(self.blocks(x)))


torch.manual_seed(1337)
torch.set_num_threads(1)
V, T = 20, 16


def get_batch(n):
    # repeat of a random prefix: the second half must look back
    a = torch.randint(0, V, (n, T // 2))
    return torch.cat([a, a, a[:, :1]], 1)


model = GPT(V, T)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, 451):
    s = get_batch(32)
    logits = model(s[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, V), s[:, 1:].reshape(-1))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 75 == 0:
        model.eval()
        with torch.no_grad():
            s = get_batch(100)
            acc = []
            for t in range(T // 2, T):
                acc.append((model(s[:, :t])[:, -1].argmax(-1) == s[:, t]).float().mean())
            acc = torch.stack(acc[1:]).mean().item()
        model.train()
        print(f"step {step}: train loss {loss.item():.4f}, copy accuracy {acc:.4f}")
print("final copy accuracy", round(acc, 4))
