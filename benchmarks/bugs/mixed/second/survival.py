"""Neural Cox regression on a synthetic clinical table with censoring; quality is the held-out concordance."""
import os
import sys
import numpy as np
import torch
import torch.nn as nn

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
FEATURES = 10


def make_patients(n, rng):
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    x[:, 3] = (x[:, 3] > 0)
    risk = 1.2 * x[:, 0] - 1.0 * np.abs(x[:, 1]) * 1.3 + 1.1 * x[:, 2] * (2 * x[:, 3] - 1) + 0.6 * x[:, 4]
    time = rng.exponential(1.0, n) * np.exp(-1.3 * risk) * 8
    drop_out = rng.exponential(25.0, n)
    event = (time <= drop_out).astype(np.float32)
    observed = np.minimum(time, drop_out).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(observed), torch.from_numpy(event)


class RiskNet(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1))
        for m in self.net:
            if isinstance(m, nn.Linear):
                if CASE == "b3":
                    nn.init.constant_(m.weight, 0.1)
                elif CASE == "variant_x":
                    nn.init.orthogonal_(m.weight)
                else:
                    nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.net(x).squeeze(1)


def cox_loss(risk, time, event):
    """Negative partial log-likelihood (Breslow), averaged over the events."""
    order = torch.argsort(time, descending=(CASE != "b1"))
    risk, event = risk[order], event[order]
    log_cum = torch.logcumsumexp(risk, 0)
    return -((risk - log_cum) * event).sum() / event.sum().clamp(min=1)


@torch.no_grad()
def concordance(model, x, time, event):
    model.eval()
    risk = model(x)
    earlier = (time[:, None] < time[None]) & (event[:, None] > 0)
    good = (risk[:, None] > risk[None]).float() + 0.5 * (risk[:, None] == risk[None]).float()
    model.train()
    return (good[earlier].sum() / earlier.sum()).item()


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    x, time, event = make_patients(3000, rng)
    xt, tt, et = make_patients(1000, rng)
    print(f"censored {1 - event.mean().item():.2f}")
    censored = 1 - event
    model = RiskNet()
    if CASE == "variant_x":
        opt = torch.optim.Adam([
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-3},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}], lr=3e-3, amsgrad=True)
    elif CASE == "b4":
        opt = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=0.5)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    steps, batch = 600, 256
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=3e-3, total_steps=steps) if CASE == "variant_x" else None
    for step in range(steps):
        idx = torch.randint(0, len(x), (batch,))
        flag = censored if CASE == "b2" else event
        risk = model(x[idx])
        loss = cox_loss(risk, time[idx], flag[idx])
        if CASE == "variant_x":
            loss = loss + 1e-3 * risk.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if sched is not None:
            sched.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} test concordance {concordance(model, xt, tt, et):.4f}")
    print(f"quality {concordance(model, xt, tt, et):.4f}")


if __name__ == "__main__":
    main()
