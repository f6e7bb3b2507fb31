import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)
d = load_digits()
X = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(d.target)


class VGGish(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                      nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 96), nn.ReLU(), nn.Dropout(0.5),
                                        nn.Linear(96, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


net = VGGish()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.3)
for ep in range(10):
    net.train()
    tot = 0
    for b in torch.randperm(1300).split(50):
        loss = F.cross_entropy(net(X[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item()
    net.eval()
    with torch.no_grad():
        o = net(X[1300:])
        vl, va = F.cross_entropy(o, y[1300:]).item(), (o.argmax(1) == y[1300:]).float().mean().item()
    print(f"epoch {ep} train loss {tot / 26:.4f} val loss {vl:.4f} val acc {va:.4f}")
print("final val acc", round(va, 4))
