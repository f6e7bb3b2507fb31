import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)
d = load_digits()
X = torch.tensor(d.data, dtype=torch.float32) / 16
y = torch.tensor(d.target)
p = torch.randperm(len(X))
X, y = X[p], y[p]
noisy = y[:1400].clone()
flip = torch.rand(1400) < 0.35
noisy[flip] = torch.randint(0, 10, (int(flip.sum()),))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(64, 40), nn.Linear(40, 10)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.l2(self.drop(torch.relu(self.l1(x))))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=3e-3)
for ep in range(20):
    net.train()
    tot = 0
    for b in torch.randperm(1400).split(70):
        loss = F.cross_entropy(net(X[b]), noisy[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item() / 20
    if ep % 4 == 3:
        net.eval()
        with torch.no_grad():
            tr = (net(X[:1400]).argmax(1) == noisy).float().mean().item()
            te = (net(X[1400:]).argmax(1) == y[1400:]).float().mean().item()
        print(f"epoch {ep} loss {tot:.4f} noisy train acc {tr:.4f} clean test acc {te:.4f}")
print("final clean test acc", round(te, 4))
