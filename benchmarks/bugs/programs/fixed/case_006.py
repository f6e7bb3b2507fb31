import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(3)


class BasicBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x):
        out = self.act(self.conv1(x))
        out = self.conv2(out)
        return self.act(out + x)


class DeepNet(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*[BasicBlock(width) for _ in range(depth)])
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(width * 4, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = self.blocks(x)
        return self.head(self.pool(x).flatten(1))


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
labels = torch.tensor(digits.target)
perm = torch.randperm(len(images))
tr, te = perm[:1400], perm[1400:]
loader = DataLoader(TensorDataset(images[tr], labels[tr]), batch_size=args.batch_size, shuffle=True)

net = DeepNet(args.depth, args.width)
opt = torch.optim.Adam(net.parameters(), lr=args.lr)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    net.train()
    running = 0
    for xb, yb in loader:
        opt.zero_grad()
        loss = loss_fn(net(xb), yb)
        loss.backward()
        opt.step()
        running += loss.item()
    net.eval()
    with torch.no_grad():
        acc = (net(images[te]).argmax(-1) == labels[te]).float().mean().item()
    print(f"[{epoch}] train loss {running / len(loader):.3f}  acc {acc:.3f}")
print("final accuracy", round(acc, 4))
