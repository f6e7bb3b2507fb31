import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout1 = nn.Dropout(0.1)
        self.fc1 = nn.Linear(32 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x.flatten(1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(args, model, loader, optimizer, scheduler, epoch):
    model.train()
    for i, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if i % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{i * len(data)}/{len(loader.dataset)}] Loss: {loss.item():.6f}")


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            correct += (model(data).argmax(1) == target).sum().item()
    return correct / len(loader.dataset)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--gamma", type=float, default=0.3)
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--log-interval", type=int, default=20)
    args = p.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(d.target)
    tr = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)
    te = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=200)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=2, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, tr, optimizer, scheduler, epoch)
        print(f"Test accuracy: {test(model, te):.4f}")
    print("final accuracy", round(test(model, te), 4))


if __name__ == "__main__":
    main()
