import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)


def make_net():
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 128), nn.ReLU(),
                         nn.Linear(128, 10))


d = load_digits()
X = torch.tensor(d.data, dtype=torch.float32) / 8 - 1
Y = torch.tensor(d.target)
Xtr, Xte, Yte = X[:1300], X[1300:], Y[1300:]
Ytr = Y[:1300].clone()
Ytr[torch.rand(1300) > 0.1] = -1
student = make_net()
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
opt = torch.optim.Adam(student.parameters(), lr=2e-3)
labelled = torch.where(Ytr >= 0)[0]
for step in range(1, 401):
    student.train()
    teacher.train()
    b = torch.cat([labelled[torch.randint(len(labelled), (16,))], torch.randint(0, 1300, (64,))])
    xb, yb = Xtr[b], Ytr[b]
    out = student(xb + 0.2 * torch.randn_like(xb))
    with torch.no_grad():
        ref = teacher(xb + 0.2 * torch.randn_like(xb)).softmax(1)
    sup = F.cross_entropy(out, yb, ignore_index=-1)
    w = 5.0 * math.exp(-5 * (1 - min(1, step / 200)) ** 2)
    cons = ((out.softmax(1) - ref) ** 2).mean()
    loss = sup + w * cons
    opt.zero_grad()
    loss.backward()
    opt.step()
    m = min(0.98, 1 - 1 / (step + 1))
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.mul_(m).add_(s, alpha=1 - m)
        for t, s in zip(teacher.buffers(), student.buffers()):
            t.copy_(s)
    if step % 80 == 0:
        teacher.eval()
        with torch.no_grad():
            acc = (teacher(Xte).argmax(1) == Yte).float().mean().item()
        print(f"step {step} sup {sup.item():.4f} cons {cons.item():.5f} teacher acc {acc:.4f}")
print("final teacher acc", round(acc, 4))
