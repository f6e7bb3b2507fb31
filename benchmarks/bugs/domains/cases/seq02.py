"""Small GPT: tied embedding/head, zero-init residual projections, warm-up + cosine, gradient accumulation."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

V, D, H, L, T = 40, 48, 4, 2, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        for lin in (self.proj, self.fc2):
            nn.init.zeros_(lin.weight)
            nn.init.zeros_(lin.bias)

    def forward(self, x):
        B, N, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, N, D))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(T, D)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.blocks:
            x = b(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(V, (V, 2), generator=torch.Generator().manual_seed(0))
    out = [1, 2]
    coin = (torch.rand(n, generator=g) < 0.12).tolist()
    rnd = torch.randint(V, (n,), generator=g).tolist()
    for i in range(n):
        out.append(rnd[i] if coin[i] else table[out[-1]][(out[-2]) % 2].item())
    return torch.tensor(out)


def batch(data, n, g):
    ix = torch.randint(len(data) - T - 1, (n,), generator=g)
    s = torch.stack([data[i:i + T + 1] for i in ix.tolist()])
    return s[:, :-1], s[:, 1:]


def main():
    torch.manual_seed(0)
    train, val = corpus(12000, 1), corpus(3000, 2)
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": other, "weight_decay": 0.0}], lr=4e-3, betas=(0.9, 0.95))
    steps, warm, accum = 150, 20, 2
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: (s + 1) / warm if s < warm else 0.05 + 0.475 * (1 + math.cos(math.pi * (s - warm) / (steps - warm))))
    g = torch.Generator().manual_seed(3)
    for it in range(steps):
        opt.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(accum):
            loss = model(*batch(train, 16, g)) / accum
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if it % 50 == 0:
            print(f"iter {it} loss {total:.3f}")
    model.eval()
    with torch.no_grad():
        x, y = batch(val, 64, g)
        return (model(x).argmax(-1) == y)[:, 4:].float().mean().item()


if __name__ == "__main__":
    print(main())
