import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
U, I, K = 200, 1200, 4
tu, ti = torch.randn(U, K), torch.randn(I, K) * 0.8
pop = 1.0 / (torch.arange(I).float() + 5)


def draw(n):
    u = torch.randint(0, U, (n,))
    i = torch.multinomial(pop, n, replacement=True)
    r = (tu[u] * ti[i]).sum(1) + 0.2 * torch.randn(n)
    return u, i, r


class MF(nn.Module):
    def __init__(self, k=8):
        super().__init__()
        self.user, self.item = nn.Embedding(U, k, sparse=True), nn.Embedding(I, k, sparse=True)
        self.ub, self.ib = nn.Embedding(U, 1, sparse=True), nn.Embedding(I, 1, sparse=True)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.3)
        for e in (self.ub, self.ib):
            nn.init.zeros_(e.weight)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + self.ub(u).squeeze(1) + self.ib(i).squeeze(1)


u, i, r = draw(20000)
ut, it_, rt = draw(3000)
m = MF()
opt = torch.optim.SparseAdam(list(m.parameters()), lr=1e-2)
step = 0
for ep in range(4):
    m.train()
    for b in torch.randperm(20000).split(200):
        loss = F.mse_loss(m(u[b], i[b]), r[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    m.eval()
    with torch.no_grad():
        mse = F.mse_loss(m(ut, it_), rt).item()
    print(f"epoch {ep} step {step} loss {loss.item():.4f} test mse {mse:.4f} (variance {rt.var():.3f})")
print("final test mse", round(mse, 4))
