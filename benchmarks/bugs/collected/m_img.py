import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from common import case, seed_all, digits, acc


def img_digits(seed=0):
    X, y, Xv, yv = digits(seed)
    return X.view(-1, 1, 8, 8), y, Xv.view(-1, 1, 8, 8), yv


def make_seg(n, seed, size=16):
    """Images with one bright-ish disc on a noisy background, mask of the disc."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = torch.rand(n, 2, generator=g) * (size - 6) + 3
    r = 2 + 2.0 * torch.rand(n, generator=g)
    d = ((yy[None] - c[:, 0, None, None]) ** 2 + (xx[None] - c[:, 1, None, None]) ** 2).sqrt()
    m = (d < r[:, None, None]).float()[:, None]
    return 0.8 * m + 0.4 * torch.randn(n, 1, size, size, generator=g), m


def iou(prob, m):
    p = prob > 0.5
    m = m > 0.5
    return ((p & m).sum() / (p | m).sum().clamp(min=1)).item()


class SmallSeg(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.d1 = nn.Sequential(nn.Conv2d(1, w, 3, padding=1), nn.BatchNorm2d(w), nn.ReLU())
        self.d2 = nn.Sequential(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), nn.BatchNorm2d(2 * w), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(2 * w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, 1, 1))

    def forward(self, x):
        a = self.d1(x)
        b = self.up(self.d2(a))
        return self.out(torch.cat([a, b], 1))


# ---- img_01
class CNN1(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(128, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


@case("img_01")
def img_01(log):
    seed_all(1)
    X, y, Xv, yv = img_digits()
    model = CNN1()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    dl = DataLoader(TensorDataset(X, y), batch_size=48, shuffle=True)
    sch = torch.optim.lr_scheduler.MultiStepLR(opt, [5, 7], 0.2)
    for ep in range(8):
        model.train()
        for xb, yb in dl:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sch.step()
        model.eval()
        with torch.no_grad():
            o = model(Xv)
            log("val_loss", F.cross_entropy(o, yv).item())
            log("val_acc", acc(o, yv))
    return acc(o, yv)


# ---- img_02
class DeepCNN(nn.Module):
    def __init__(self, w=16, n=8):
        super().__init__()
        layers, c = [], 1
        for k in range(n):
            layers += [nn.Conv2d(c, w, 3, padding=1, bias=False), nn.BatchNorm2d(w), nn.ReLU()]
            c = w
            if k == 3:
                layers.append(nn.MaxPool2d(2))
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 10))

    def forward(self, x):
        return self.net(x)


def validate2(model, Xv, yv):
    model.eval()
    with torch.no_grad():
        return acc(model(Xv), yv)


@case("img_02")
def img_02(log):
    seed_all(2)
    X, y, Xv, yv = img_digits()
    model = DeepCNN()
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log("val_acc", validate2(model, Xv, yv))  # sanity check of the validation loop
    for step in range(160):
        i = torch.randint(0, len(X), (48,))
        loss = F.cross_entropy(model(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 19:
            log("val_acc", validate2(model, Xv, yv))
    return validate2(model, Xv, yv)


# ---- img_03
def make_rgb(n, seed):
    """NHWC colour images of a small square at a random place; class = its colour (6 hues)."""
    g = torch.Generator().manual_seed(seed)
    hues = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])
    y = torch.randint(0, 6, (n,), generator=g)
    x = 0.25 * torch.randn(n, 12, 12, 3, generator=g)
    for k in range(n):
        r, c = torch.randint(0, 9, (2,), generator=g).tolist()
        x[k, r:r + 3, c:c + 4] += (0.4 + 0.6 * torch.rand(1, generator=g)) * hues[y[k]]
    return x, y


@case("img_03")
def img_03(log):
    seed_all(3)
    X, y = make_rgb(1500, 0)
    Xv, yv = make_rgb(400, 1)
    X, Xv = X.reshape(-1, 3, 12, 12), Xv.reshape(-1, 3, 12, 12)
    net = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 6))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    for step in range(250):
        i = torch.randint(0, len(X), (32,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_04
class Pics(Dataset):
    def __init__(self, x, y, transform=None):
        self.x, self.y, self.transform = x, y, transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.transform:
            x = self.transform(x)
        return x, self.y[i]


@case("img_04")
def img_04(log):
    seed_all(4)
    X, y, Xv, yv = img_digits()
    X, Xv = X * 255, Xv * 255
    tf = lambda im: (im / 255 - 0.3) / 0.35
    train_dl = DataLoader(Pics(X, y, tf), batch_size=64, shuffle=True)
    val_dl = DataLoader(Pics(Xv, yv), batch_size=200)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def evaluate():
        net.eval()
        with torch.no_grad():
            o = torch.cat([net(a) for a, _ in val_dl])
        net.train()
        log("val_acc", acc(o, yv))
        return F.cross_entropy(o, yv).item()

    for ep in range(8):
        for xb, yb in train_dl:
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        log("val_loss", evaluate())
    return -evaluate()


# ---- img_05
@case("img_05")
def img_05(log):
    seed_all(5)
    X, M = make_seg(500, 0)
    Xv, Mv = make_seg(120, 1)
    net = SmallSeg()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(160):
        i = torch.randint(0, len(X), (16,))
        img, mask = X[i], M[i]
        if torch.rand(1) < 0.5:
            img = img.flip(-1)
        if torch.rand(1) < 0.5:
            img = img.flip(-2)
        loss = F.binary_cross_entropy_with_logits(net(img), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            net.eval()
            with torch.no_grad():
                log("val_iou", iou(net(Xv).sigmoid(), Mv))
            net.train()
    net.eval()
    with torch.no_grad():
        return iou(net(Xv).sigmoid(), Mv)


# ---- img_06
@case("img_06")
def img_06(log):
    seed_all(6)
    X, M = make_seg(510, 2)
    Xv, Mv = make_seg(120, 3)
    net = SmallSeg()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=1e-2)
    bce = nn.BCEWithLogitsLoss()

    def dice(logits, m):
        p = torch.sigmoid(logits).flatten(1)
        m = m.flatten(1)
        return 1 - ((2 * (p * m).sum(1) + 1) / (p.sum(1) + m.sum(1) + 1)).mean()

    dl = DataLoader(TensorDataset(X, M), batch_size=16, shuffle=True)
    for ep in range(5):
        net.train()
        for im, m in dl:
            if torch.rand(1) < 0.5:
                im, m = im.flip(-1), m.flip(-1)
            out = net(im)
            loss = bce(out, m) + dice(out, m)
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            log("val_loss", (bce(net(Xv), Mv) + dice(net(Xv), Mv)).item())
            s = iou(net(Xv).sigmoid(), Mv)
            log("val_iou", s)
    return s


# ---- img_07
def soft_dice(pred, target, eps=1.0):
    pred, target = pred.reshape(len(pred), -1), target.reshape(len(target), -1)
    inter = (pred * target).sum(1)
    return (1 - (2 * inter + eps) / (pred.sum(1) + target.sum(1) + eps)).mean()


@case("img_07")
def img_07(log):
    seed_all(7)
    X, M = make_seg(500, 4)
    Xv, Mv = make_seg(120, 5)
    net = SmallSeg()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(160):
        i = torch.randint(0, len(X), (16,))
        out = net(X[i])
        loss = soft_dice(out, M[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            net.eval()
            with torch.no_grad():
                o = net(Xv)
                log("val_loss", soft_dice(o, Mv).item())
                log("val_iou", iou(o.sigmoid(), Mv))
            net.train()
    net.eval()
    with torch.no_grad():
        return iou(net(Xv).sigmoid(), Mv)


# ---- img_08
class PlainDeep(nn.Module):
    def __init__(self, w=16, depth=10):
        super().__init__()
        self.stem = nn.Conv2d(1, w, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(w, w, 3, padding=1) for _ in range(depth)])
        self.fc = nn.Linear(w * 4, 10)
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(m.weight, 0.0, 0.02)
                nn.init.zeros_(m.bias)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        for c in self.convs:
            x = F.relu(c(x))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


@case("img_08")
def img_08(log):
    seed_all(8)
    X, y, Xv, yv = img_digits()
    net = PlainDeep()
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    for step in range(220):
        i = torch.randint(0, len(X), (48,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_09
class Res9(nn.Module):
    def __init__(self, ci, co, s):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(ci, co, 3, s, 1, bias=False), nn.BatchNorm2d(co)
        self.c2, self.b2 = nn.Conv2d(co, co, 3, 1, 1, bias=False), nn.BatchNorm2d(co)
        self.skip = nn.Identity() if ci == co and s == 1 else nn.Conv2d(ci, co, 1, s, bias=False)
        nn.init.zeros_(self.b2.weight)

    def forward(self, x):
        h = F.relu(self.b1(self.c1(x)), inplace=True)
        return F.relu(self.b2(self.c2(h)) + self.skip(x))


@case("img_09")
def img_09(log):
    seed_all(9)
    X, y, Xv, yv = img_digits(3)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Res9(16, 16, 1), Res9(16, 32, 2), Res9(32, 32, 1),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    total = 170
    lr = lambda s: (s + 1) / 15 if s < 15 else 0.5 * (1 + math.cos(math.pi * (s - 15) / (total - 15)))
    sch = torch.optim.lr_scheduler.LambdaLR(opt, lr)
    crit = nn.CrossEntropyLoss(label_smoothing=0.1)
    for step in range(total):
        net.train()
        i = torch.randint(0, len(X), (40,))
        loss = crit(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sch.step()
        if step % 25 == 0:
            net.eval()
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    net.eval()
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_10
class Stacked(nn.Module):
    def __init__(self, n_in=64, h=24, depth=3, n_out=10):
        super().__init__()
        self.layers = [nn.Linear(n_in if k == 0 else h, h) for k in range(depth)]
        self.head = nn.Linear(h, n_out)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@case("img_10")
def img_10(log):
    seed_all(10)
    X, y, Xv, yv = img_digits()
    net = Stacked()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in range(300):
        i = torch.randint(0, len(X), (48,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_11
@case("img_11")
def img_11(log):
    seed_all(11)
    X, y, Xv, yv = img_digits()
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.5)
    dl = DataLoader(TensorDataset(X, y), batch_size=64, shuffle=True)
    for ep in range(10):
        for xb, yb in dl:
            opt.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            opt.step()
            scheduler.step()
        with torch.no_grad():
            log("val_loss", F.cross_entropy(net(Xv), yv).item())
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_12
@case("img_12")
def img_12(log):
    seed_all(12)
    X, y, Xv, yv = img_digits()
    order = torch.argsort(y, stable=True)  # files are read folder by folder
    X, y = X[order], y[order]
    net = CNN1()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(X, y), batch_size=32)
    for ep in range(5):
        net.train()
        for xb, yb in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            log("val_acc", acc(net(Xv), yv))
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_13
@case("img_13")
def img_13(log):
    """Small unbalanced subset, growing batch size, EMA weights used for evaluation."""
    seed_all(13)
    X, y, Xv, yv = img_digits(5)
    keep = torch.rand(len(X)) < torch.where(y < 3, torch.tensor(1.0), torch.tensor(0.35))
    X, y = X[keep], y[keep]
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(220):
        i = torch.randint(0, len(X), (16 if step < 80 else 32 if step < 160 else 64,))
        loss = F.cross_entropy(net(X[i] + 0.1 * torch.randn(len(i), 1, 8, 8)), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(net)
        if step % 25 == 0:
            with torch.no_grad():
                log("ema_val_acc", acc(ema(Xv), yv))
    with torch.no_grad():
        return acc(ema(Xv), yv)


# ---- img_14
class Drop14(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.f1, self.f2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.relu(self.c2(x)).flatten(1)
        x = F.dropout(x, p=0.5)
        x = F.dropout(F.relu(self.f1(x)), p=0.5)
        return self.f2(x)


@case("img_14")
def img_14(log):
    seed_all(14)
    X, y, Xv, yv = img_digits()
    Xv, X = Xv + 0.25 * torch.randn_like(Xv), X + 0.25 * torch.randn_like(X)
    net = Drop14()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(220):
        net.train()
        i = torch.randint(0, len(X), (48,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            net.eval()
            with torch.no_grad():
                log("val_acc", acc(net(Xv), yv))
    net.eval()
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_15
class Wide15(nn.Module):
    def __init__(self, keep=0.9):
        super().__init__()
        self.f1, self.f2, self.f3 = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.drop = nn.Dropout(keep)

    def forward(self, x):
        x = self.drop(F.relu(self.f1(x.flatten(1))))
        x = self.drop(F.relu(self.f2(x)))
        return self.f3(x)


@case("img_15")
def img_15(log):
    seed_all(15)
    X, y, Xv, yv = img_digits()
    net = Wide15()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(300):
        net.train()
        i = torch.randint(0, len(X), (48,))
        loss = F.cross_entropy(net(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            net.eval()
            with torch.no_grad():
                log("val_loss", F.cross_entropy(net(Xv), yv).item())
    net.eval()
    with torch.no_grad():
        return acc(net(Xv), yv)


# ---- img_16
@case("img_16")
def img_16(log):
    seed_all(16)
    X, y, Xv, yv = img_digits()
    raw = (X * 255).to(torch.uint8)
    raw_v = (Xv * 255).to(torch.uint8)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def brighten(img):
        b = torch.randint(60, 140, (len(img), 1, 1, 1), dtype=torch.uint8)
        return (img + b).clamp(0, 255)

    for step in range(220):
        i = torch.randint(0, len(X), (48,))
        img = brighten(raw[i]).float() / 255
        loss = F.cross_entropy(net(img), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            with torch.no_grad():
                log("val_acc", acc(net((raw_v.float() + 100).clamp(max=255) / 255), yv))
    with torch.no_grad():
        return acc(net((raw_v.float() + 100).clamp(max=255) / 255), yv)
