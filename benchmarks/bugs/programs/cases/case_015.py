import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)


class AddingRNN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.rnn = nn.RNN(2, hidden, nonlinearity="relu", batch_first=True)
        nn.init.normal_(self.rnn.weight_hh_l0, std=0.35)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.01)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        out, h = self.rnn(x)
        return self.fc(h[0])


def adding_problem(n, T=24):
    v = torch.rand(n, T)
    m = torch.zeros(n, T)
    for i in range(n):
        a = torch.randint(0, T // 2, (1,))
        b = torch.randint(T // 2, T, (1,))
        m[i, a] = 1
        m[i, b] = 1
    return torch.stack([v, m], -1), (v * m).sum(1, keepdim=True)


X, Y = adding_problem(2000)
XV, YV = adding_problem(300)
model = AddingRNN()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(15):
    model.train()
    for idx in torch.randperm(len(X)).split(50):
        loss = ((model(X[idx]) - Y[idx]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        v = ((model(XV) - YV) ** 2).mean().item()
    print(f"epoch {epoch} train {loss.item():.5g} valid mse {v:.5g}")
print("final valid mse", v)
