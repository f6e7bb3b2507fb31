import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Backbone(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 4, n_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def run_epoch(model, opt, x, y, bs=32):
    model.train()
    for b in torch.randperm(len(x)).split(bs):
        loss = F.cross_entropy(model(x[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    low, high = y < 5, y >= 5
    model = Backbone(5)
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(4):
        l = run_epoch(model, pre, x[low], y[low])
    print(f"pretraining loss {l:.4f} acc {accuracy(model, x[low], y[low]):.4f}")

    # adapt to the other digits
    xt, yt = x[high], y[high] - 5
    xtr, ytr, xte, yte = xt[:600], yt[:600], xt[600:], yt[600:]
    model.fc = nn.Linear(128, 5)
    optimizer = torch.optim.Adam([{"params": [p for n, p in model.named_parameters() if "fc" not in n], "lr": 1e-5},
                                  {"params": model.fc.parameters(), "lr": 2e-3}])
    for ep in range(10):
        l = run_epoch(model, optimizer, xtr, ytr)
        if ep % 2 == 1:
            print(f"finetune epoch {ep} loss {l:.4f} acc {accuracy(model, xte, yte):.4f}")
    print("final accuracy", round(accuracy(model, xte, yte), 4))


main()
