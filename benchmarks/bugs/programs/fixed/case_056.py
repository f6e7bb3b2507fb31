import torch
from torch import nn
from sklearn.datasets import load_digits


class TanhNet(nn.Module):
    def __init__(self, sizes=(64, 128, 128, 128, 10)):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.reset()

    def reset(self):
        for lin in self.linears:
            nn.init.xavier_normal_(lin.weight)
            nn.init.zeros_(lin.bias)

    def forward(self, x):
        for lin in self.linears[:-1]:
            x = torch.tanh(lin(x))
        return self.linears[-1](x)


torch.manual_seed(0)
torch.set_num_threads(1)
X, y = load_digits(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32) / 8 - 1
y = torch.tensor(y)
g = torch.randperm(len(X))
tr, te = g[:1300], g[1300:]
net = TanhNet()
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
ce = nn.CrossEntropyLoss()
for epoch in range(15):
    losses = []
    for b in tr[torch.randperm(1300)].split(50):
        opt.zero_grad()
        out = ce(net(X[b]), y[b])
        out.backward()
        opt.step()
        losses.append(out.item())
    with torch.no_grad():
        acc = (net(X[te]).argmax(1) == y[te]).float().mean().item()
    if epoch % 3 == 2:
        print("epoch", epoch, "mean loss", round(sum(losses) / len(losses), 4), "acc", round(acc, 4))
print("final acc", round(acc, 4))
