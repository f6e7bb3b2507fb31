import torch
from torch import nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, vocab, d_model=32, nhead=4, layers=2, n_classes=3, max_len=20, pad=0):
        super().__init__()
        self.pad = pad
        self.embed = nn.Embedding(vocab, d_model, padding_idx=pad)
        self.pos = nn.Embedding(max_len, d_model)
        self.cls = nn.Parameter(torch.zeros(1, 1, d_model))
        layer = nn.TransformerEncoderLayer(d_model, nhead, 64, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.fc = nn.Linear(d_model, n_classes)

    def forward(self, tokens):
        real = tokens != self.pad
        x = self.embed(tokens) + self.pos(torch.arange(tokens.size(1)))
        mask = real
        x = self.enc(x, src_key_padding_mask=mask)
        return self.fc(x[:, 0])


def data(n, vocab=25, max_len=20):
    x = torch.zeros(n, max_len, dtype=torch.long)
    y = torch.zeros(n, dtype=torch.long)
    for i in range(n):
        L = int(torch.randint(6, max_len - 1, (1,)))
        s = torch.randint(2, vocab, (L,))
        a = (s < 8).sum()
        b = (s >= 18).sum()
        y[i] = 0 if a > b else (1 if a < b else 2)
        x[i, 0] = 1
        x[i, 1:L + 1] = s
    return x, y


if __name__ == "__main__":
    torch.manual_seed(8)
    torch.set_num_threads(1)
    X, Y = data(1500)
    XV, YV = data(400)
    net = Encoder(25)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(9):
        net.train()
        for b in torch.randperm(len(X)).split(50):
            loss = F.cross_entropy(net(X[b]), Y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            acc = (net(XV).argmax(1) == YV).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.3f} val acc {acc:.3f}")
    print(f"final val acc {acc:.4f}")
