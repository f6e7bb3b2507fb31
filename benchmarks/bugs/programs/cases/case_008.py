import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.linspace(-3, 3, 300).unsqueeze(1)
y = torch.sin(2 * x) + 0.3 * x + 0.1 * torch.randn_like(x)
xv = torch.linspace(-3, 3, 201).unsqueeze(1)
yv = torch.sin(2 * xv) + 0.3 * xv


class CurveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.h1, self.h2, self.o = nn.Linear(1, 24), nn.Linear(24, 24), nn.Linear(24, 1)

    def forward(self, t):
        return self.o(torch.tanh(self.h2(torch.tanh(self.h1(t)))))


model = CurveNet()
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, history_size=20, line_search_fn="strong_wolfe")


def closure():
    opt.zero_grad()
    loss = ((model(x) - y) ** 2).mean() + 1e-5 * sum((p ** 2).sum() for p in model.parameters())
    loss.backward()
    return loss


for i in range(100):
    loss = opt.step(closure)
    if i % 20 == 19:
        with torch.no_grad():
            v = ((model(xv) - yv) ** 2).mean().item()
        print(f"outer {i + 1} loss {loss.item():.5f} val mse {v:.5f}")
print("final val mse", round(v, 5))
