import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
text = ("in the beginning the river was small and the hill was green . every morning the farmer walked to the river "
        "and filled two buckets . every evening the farmer walked to the hill and watched the sun go down . ") * 10
chars = sorted(set(text))
ids = torch.tensor([chars.index(c) for c in text])
cut = int(len(ids) * 0.9)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = [a.view(B, T, self.h, -1).transpose(1, 2) for a in self.qkv(self.ln1(x)).chunk(3, -1)]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        return x + self.ff(self.ln2(x))


class LM(nn.Module):
    def __init__(self, V, d=48, T=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, d), nn.Embedding(T, d)
        self.blocks = nn.ModuleList([Block(d, 4) for _ in range(2)])
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, V, bias=False)
        nn.init.normal_(self.wte.weight, std=0.05)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, i):
        x = self.wte(i) + self.wpe.weight[:i.size(1)]
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln(x))


def batch(src, n=24, T=32):
    s = torch.randint(0, len(src) - T - 1, (n,))
    return torch.stack([src[i:i + T] for i in s]), torch.stack([src[i + 1:i + T + 1] for i in s])


model = LM(len(chars))
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
N, W = 250, 40
for step in range(N):
    lr = 3e-3 * (step / W if step < W else 0.5 * (1 + math.cos(math.pi * (step - W) / (N - W))))
    for g in opt.param_groups:
        g["lr"] = lr
    x, y = batch(ids[:cut])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    if step % 50 == 49:
        model.eval()
        with torch.no_grad():
            x, y = batch(ids[cut:], 16)
            vl = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
        model.train()
        print(f"step {step + 1} lr {lr:.5f} loss {loss.item():.4f} val {vl:.4f}")
print("final val loss", round(vl, 4))
