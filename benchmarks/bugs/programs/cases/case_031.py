import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, DataLoader

torch.set_num_threads(1)
torch.manual_seed(21)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, x):
        return (x - self.mean) / self.std


class DigitSet(Dataset):
    def __init__(self, images, targets, transform=None):
        self.images, self.targets, self.transform = images, targets, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        x = torch.tensor(self.images[i], dtype=torch.float32).unsqueeze(0) / 16.0
        if self.transform is not None:
            x = self.transform(x)
        return x, int(self.targets[i])


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 12, 3)
        self.c2 = nn.Conv2d(12, 24, 3)
        self.f1 = nn.Linear(24 * 4, 60)
        self.f2 = nn.Linear(60, 10)

    def forward(self, x):
        x = torch.tanh(self.c1(x))
        x = F.avg_pool2d(torch.tanh(self.c2(x)), 2)
        return self.f2(torch.tanh(self.f1(x.flatten(1))))


d = load_digits()
norm = Normalize(0.3053, 0.15)
train_set = DigitSet(d.images[:1300], d.target[:1300], transform=norm)
val_set = DigitSet(d.images[1300:], d.target[1300:])
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
val_loader = DataLoader(val_set, batch_size=128)

model = LeNet()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)


def evaluate():
    model.eval()
    ok, n = 0, 0
    with torch.no_grad():
        for x, t in val_loader:
            ok += (model(x).argmax(1) == t).sum().item()
            n += len(t)
    return ok / n


for epoch in range(8):
    model.train()
    for it, (x, t) in enumerate(train_loader):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f} val_acc {evaluate():.4f}")
print("final val accuracy", round(evaluate(), 4))
