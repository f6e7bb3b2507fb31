import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
V, T = 16, 24


def sample_batch(n):
    """noisy second order sequences: x[t] = x[t-1] + x[t-2] mod V, with restarts"""
    x = torch.randint(0, V, (n, T + 1))
    for t in range(2, T + 1):
        nxt = (x[:, t - 1] + 3 * (x[:, t - 2] % 2) + 1) % V
        keep = torch.rand(n) < 0.92
        x[:, t] = torch.where(keep, nxt, x[:, t])
    return x


class CharLM(nn.Module):
    def __init__(self, d=48, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(V, d)
        self.pos = nn.Parameter(torch.randn(T, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, V)

    def forward(self, idx):
        t = idx.size(1)
        x = self.tok(idx) + self.pos[:t]
        x = self.encoder(x)
        return self.head(x)

    @torch.no_grad()
    def predict_next(self, idx):
        return self(idx)[:, -1].argmax(-1)


model = CharLM()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(1, 301):
    batch = sample_batch(32)
    x, y = batch[:, :-1], batch[:, 1:]
    logits = model(x)
    loss = F.cross_entropy(logits.reshape(-1, V), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")

model.eval()
test = sample_batch(400)
hits = (model.predict_next(test[:, :12]) == test[:, 12]).float().mean().item()
print("final next-token accuracy on prefixes", round(hits, 4))
