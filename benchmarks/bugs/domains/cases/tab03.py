import numpy as np
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


def claims(n, seed):
    """Insurance claim counts with exposure."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(18, 80, n)
    power = rng.integers(4, 12, n)
    region = rng.integers(0, 8, n)
    exposure = rng.uniform(0.3, 1.0, n)
    reg_eff = np.array([0.0, 0.4, -0.3, 0.8, -0.6, 0.2, 0.5, -0.9])
    lograte = 0.6 + 1.2 * np.exp(-(age - 18) / 8) + 0.15 * (power - 8) + reg_eff[region]
    y = rng.poisson(np.exp(lograte) * exposure)
    cont = np.stack([(age - 49) / 18, (power - 7.5) / 2.3], 1)
    return (torch.tensor(cont, dtype=torch.float32), torch.tensor(region), torch.tensor(exposure, dtype=torch.float32),
            torch.tensor(y, dtype=torch.float32))


class RateModel(nn.Module):
    def __init__(self, n_regions=8):
        super().__init__()
        self.region = nn.Embedding(n_regions, 4)
        self.mlp = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, cont, region):
        return self.mlp(torch.cat([cont, self.region(region)], 1)).squeeze(1)


def deviance(model, data):
    cont, region, exposure, y = data
    model.eval()
    with torch.no_grad():
        mu = torch.exp(model(cont, region)) * exposure
    model.train()
    term = torch.where(y > 0, y * torch.log(y.clamp(min=1) / mu), torch.zeros_like(y))
    return (2 * (term - (y - mu))).mean().item()


def main():
    torch.manual_seed(5)
    train, test = claims(3200, 1), claims(1500, 2)
    loader = DataLoader(TensorDataset(*train), batch_size=128, shuffle=True)
    model = RateModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = StepLR(optimizer, step_size=8, gamma=0.1)
    loss_fn = nn.PoissonNLLLoss(log_input=True)
    for epoch in range(10):
        for cont, region, exposure, y in loader:
            log_mu = model(cont, region) + torch.log(exposure)
            loss = loss_fn(log_mu, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.4f} test deviance {deviance(model, test):.4f}")
    return deviance(model, test)


if __name__ == "__main__":
    print(main())
