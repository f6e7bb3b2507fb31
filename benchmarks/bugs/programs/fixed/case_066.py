import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class EMA:
    def __init__(self, model, decay):
        self.shadow = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.shadow.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)


class ConvMixer(nn.Module):
    def __init__(self, w=24):
        super().__init__()
        self.stem = nn.Conv2d(1, w, 2, 2)
        self.dw = nn.Conv2d(w, w, 3, padding=1, groups=w)
        self.pw = nn.Conv2d(w, w, 1)
        self.head = nn.Linear(w * 16, 10)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = x + F.gelu(self.dw(x))
        x = F.gelu(self.pw(x))
        return self.head(x.flatten(1))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y = torch.tensor(d.target)
    model = ConvMixer()
    ema = EMA(model, decay=0.98)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    for step in range(1, 241):
        model.train()
        b = torch.randint(0, 1400, (64,))
        loss = F.cross_entropy(model(x[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
        if step % 40 == 0:
            with torch.no_grad():
                acc = (ema.shadow(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} ema acc {acc:.4f}")
    print("final ema acc", round(acc, 4))


main()
