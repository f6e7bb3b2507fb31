import math
import torch
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.metrics import roc_auc_score

torch.manual_seed(0)
torch.set_num_threads(1)
X, y = make_classification(6000, 15, n_informative=9, weights=[0.96], class_sep=1.0, flip_y=0.0, random_state=9)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32)
prior = y[:4800].mean().item()


class Net(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.bn = nn.BatchNorm1d(d)
        self.l1, self.l2, self.l3 = nn.Linear(d, 48), nn.Linear(48, 24), nn.Linear(24, 1)
        nn.init.constant_(self.l3.bias, math.log(prior / (1 - prior)))

    def forward(self, x):
        x = torch.relu(self.l1(self.bn(x)))
        return self.l3(torch.relu(self.l2(x))).view(-1)


net = Net(15)
crit = nn.BCEWithLogitsLoss(pos_weight=torch.tensor((1 - prior) / prior))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
for ep in range(8):
    net.train()
    for b in torch.randperm(4800).split(96):
        loss = crit(net(X[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        s = net(X[4800:])
    auc = roc_auc_score(y[4800:].numpy(), s.numpy())
    print(f"epoch {ep} loss {loss.item():.4f} auc {auc:.4f} positives predicted {(s > 0).float().mean():.3f}")
print("final auc", round(auc, 4))
