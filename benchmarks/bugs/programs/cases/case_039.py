import torch
from torch import nn
from sklearn.datasets import load_digits


class ConvBN(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout, eps=1e-5, momentum=0.001)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(ConvBN(1, 16), ConvBN(16, 32, 2), ConvBN(32, 32), ConvBN(32, 64, 2))
        self.classifier = nn.Linear(64, 10)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Trainer:
    def __init__(self, model, lr=0.05):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        self.loss_fn = nn.CrossEntropyLoss()

    def fit_epoch(self, x, y, bs=64):
        self.model.train()
        tot = 0.0
        for idx in torch.randperm(len(x)).split(bs):
            self.opt.zero_grad()
            loss = self.loss_fn(self.model(x[idx]), y[idx])
            loss.backward()
            self.opt.step()
            tot += loss.item() * len(idx)
        return tot / len(x)

    @torch.no_grad()
    def evaluate(self, x, y):
        self.model.eval()
        logits = self.model(x)
        return self.loss_fn(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(5)
    torch.set_num_threads(1)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(d.target)
    p = torch.randperm(len(x))
    xtr, ytr, xte, yte = x[p[:1300]], y[p[:1300]], x[p[1300:]], y[p[1300:]]
    t = Trainer(Net())
    for ep in range(8):
        tl = t.fit_epoch(xtr, ytr)
        vl, va = t.evaluate(xte, yte)
        print("epoch %d train_loss %.4f val_loss %.4f val_acc %.4f" % (ep, tl, vl, va))
    print("final val acc %.4f" % va)
