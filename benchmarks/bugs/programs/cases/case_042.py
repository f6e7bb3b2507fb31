import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)
d = load_digits()
rng = np.random.RandomState(0)
train_x, train_y, test_x, test_y = [], [], [], []
for c in range(10):  # one folder per class
    rows = rng.permutation(np.where(d.target == c)[0])
    train_x += [d.images[i] for i in rows[:140]]
    train_y += [c] * 140
    test_x += [d.images[i] for i in rows[140:]]
    test_y += [c] * (len(rows) - 140)


def tensors(x, y):
    return TensorDataset(torch.tensor(np.array(x), dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(y))


train_loader = DataLoader(tensors(train_x, train_y), batch_size=28)
test_loader = DataLoader(tensors(test_x, test_y), batch_size=128)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1, stride=2)
        self.fc = nn.Linear(24 * 16, 10)

    def forward(self, x):
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
for epoch in range(8):
    net.train()
    for x, y in train_loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    hit = 0
    with torch.no_grad():
        for x, y in test_loader:
            hit += (net(x).argmax(1) == y).sum().item()
    print(f"epoch {epoch} last loss {loss.item():.4f} test acc {hit / len(test_y):.4f}")
print("final test acc", round(hit / len(test_y), 4))
