import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
torch.set_num_threads(1)


class VAE(nn.Module):
    def __init__(self, d=64, h=128, z=8):
        super().__init__()
        self.fc1 = nn.Linear(d, h)
        self.fc_mu = nn.Linear(h, z)
        self.fc_logvar = nn.Linear(h, z)
        self.fc3 = nn.Linear(z, h)
        self.fc4 = nn.Linear(h, d)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar):
    rec = F.binary_cross_entropy(recon, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return rec + kld


x = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
train, test = x[:1500], x[1500:]
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1, 21):
    model.train()
    total = 0
    for idx in torch.randperm(len(train)).split(64):
        optimizer.zero_grad()
        recon, mu, logvar = model(train[idx])
        loss = loss_function(recon, train[idx], mu, logvar)
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 4 == 0:
        model.eval()
        with torch.no_grad():
            mu, _ = model.encode(test)
            err = F.mse_loss(model.decode(mu), test).item()
        print(f"epoch {epoch} loss/sample {total / len(train):.4f} test recon mse {err:.4f}")
print("final recon mse", round(err, 5))
