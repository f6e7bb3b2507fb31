"""Masked-token pretraining, then low-rank adaptation to a new domain."""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, MASK, LEN = 24, 24, 14


TABLES = torch.randint(VOCAB, (2, 8, LEN), generator=torch.Generator().manual_seed(31))


def domain(n, g, which):
    topic = torch.randint(8, (n,), generator=g)
    seq = TABLES[which][topic]
    noise = torch.rand(n, LEN, generator=g) < 0.1
    return torch.where(noise, torch.randint(VOCAB, (n, LEN), generator=g), seq)


def mask_tokens(x, g, p=0.25):
    m = torch.rand(x.shape, generator=g) < p
    return torch.where(m, torch.full_like(x, MASK), x), torch.where(m, x, torch.full_like(x, -100))


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        h = self.ln1(x)
        B, T, C = h.shape
        split = lambda t: t.view(B, T, 4, C // 4).transpose(1, 2)
        a = F.scaled_dot_product_attention(split(self.q(h)), split(self.k(h)), split(self.v(h)))
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Encoder(nn.Module):
    def __init__(self, d=48, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB + 1, d)
        self.pos = nn.Parameter(0.02 * torch.randn(1, LEN, d))
        self.layers = nn.ModuleList(Layer(d) for _ in range(layers))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, x):
        h = self.tok(x) + self.pos
        for l in self.layers:
            h = l(h)
        return self.head(h)


class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.zeros(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def add_lora(model):
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("q", "k", "v", "o", "up", "down"):
            setattr(layer, name, LoRALinear(getattr(layer, name)))
    return [p for n, p in model.named_parameters() if "lora_" in n]


def fit(model, params, which, steps, lr, g, tag):
    opt = torch.optim.AdamW(params, lr=lr, weight_decay=0.01)
    for s in range(steps):
        x, y = mask_tokens(domain(32, g, which), g)
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 50 == 0:
            print(f"{tag} {s} {loss.item():.4f}")


def main():
    torch.manual_seed(11)
    g = torch.Generator().manual_seed(11)
    model = Encoder()
    fit(model, model.parameters(), 0, 130, 3e-3, g, "pretrain")
    adapters = add_lora(model)
    fit(model, adapters, 1, 150, 5e-3, g, "adapt")
    model.eval()
    x, y = mask_tokens(domain(300, g, 1), g)
    with torch.no_grad():
        pred = model(x).argmax(-1)
    return (pred == y)[y >= 0].float().mean().item()


if __name__ == "__main__":
    print(main())
