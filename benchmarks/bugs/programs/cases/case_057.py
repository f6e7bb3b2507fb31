import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class PatchTransformer(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 2, 2)
        self.pos = nn.Parameter(torch.zeros(1, 16, d))
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(d, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.fc(self.enc(x).mean(1))


def main(accum=4, micro=16, epochs=6):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = load_digits()
    X, y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(d.target)
    net = PatchTransformer()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for ep in range(epochs):
        net.train()
        opt.zero_grad()
        for i, b in enumerate(torch.randperm(1280).split(micro)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(X[b])
            loss = F.cross_entropy(out.float(), y[b])
            (loss / accum).backward()
            if (i + 1) % accum == 0:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            acc = (net(X[1280:]).argmax(1) == y[1280:]).float().mean().item()
        print(f"epoch {ep} loss {loss.item():.4f} acc {acc:.4f}")
    print("final acc", round(acc, 4))


main()
