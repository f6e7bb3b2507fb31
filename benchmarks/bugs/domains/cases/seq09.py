"""Sequence classification with a top-1 mixture of experts, bf16 autocast, label smoothing and a balance loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, d, n_exp, hidden):
        super().__init__()
        self.router = nn.Linear(d, n_exp, bias=False)
        self.w1 = nn.Parameter(torch.randn(n_exp, d, hidden) * d ** -0.5)
        self.w2 = nn.Parameter(torch.randn(n_exp, hidden, d) * hidden ** -0.5)
        self.n_exp = n_exp

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        probs = self.router(flat.float()).softmax(-1)
        gate, idx = probs.max(-1)
        out = torch.zeros_like(flat)
        for e in range(self.n_exp):
            sel = (idx == e).nonzero(as_tuple=True)[0]
            if sel.numel():
                h = F.gelu(flat[sel] @ self.w1[e].to(flat.dtype)) @ self.w2[e].to(flat.dtype)
                out = out.index_add(0, sel, (h * gate[sel, None]).to(out.dtype))
        frac = F.one_hot(idx, self.n_exp).float().mean(0)
        self.aux = self.n_exp * (frac * probs.mean(0)).sum()
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.moe = MoE(d, 4, 64)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.moe(self.n2(x))


class Classifier(nn.Module):
    def __init__(self, vocab=30, d=48, n_cls=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.randn(1, 15, d) * 0.02)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.layers = nn.ModuleList([Layer(d)])
        self.head = nn.Linear(d, n_cls)

    def forward(self, x):
        h = torch.cat([self.cls.expand(len(x), -1, -1), self.emb(x)], 1) + self.pos
        for l in self.layers:
            h = l(h)
        return self.head(h[:, 0]), sum(l.moe.aux for l in self.layers)


def sample(n, g):
    x = torch.randint(4, 30, (n, 14), generator=g)
    y = torch.randint(4, (n,), generator=g)
    for k in range(3):
        pos = torch.randint(14, (n,), generator=g)
        x[torch.arange(n), pos] = y
    return x, y


def main():
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(4)
    model = Classifier()
    opt = torch.optim.NAdam(model.parameters(), lr=1e-3)
    for step in range(90):
        x, y = sample(32, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, aux = model(x)
        loss = F.cross_entropy(logits.float(), y, label_smoothing=0.1) + 0.01 * aux
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(step, loss.item())
    model.eval()
    with torch.no_grad():
        x, y = sample(300, g)
        return (model(x)[0].argmax(-1) == y).float().mean().item()


if __name__ == "__main__":
    print(main())
