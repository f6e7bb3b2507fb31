import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def synth_text(n, seed):
    words = ["ba", "dok", "mi", "tre", "lun", "sapo", "kel", "ur"]
    follow = {i: [(i * 3 + 1) % 8, (i * 5 + 2) % 8] for i in range(8)}
    g = torch.Generator().manual_seed(seed)
    cur, s = 0, []
    while len(s) < n:
        s.extend(words[cur] + " ")
        cur = follow[cur][int(torch.randint(2, (1,), generator=g))]
    return "".join(s[:n])


class CharData(Dataset):
    def __init__(self, text, stoi, block):
        self.ids = torch.tensor([stoi[c] for c in text])
        self.block = block

    def __len__(self):
        return len(self.ids) - self.block - 1

    def __getitem__(self, i):
        chunk = self.ids[i:i + self.block]
        x = chunk.clone()
        y = chunk.clone()
        return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self, d, h, block):
        super().__init__()
        self.h = h
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).bool())

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in (q, k, v))
        att = q @ k.transpose(-2, -1) / (k.size(-1) ** 0.5)
        att = att.masked_fill(~self.bias[:T, :T], float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))


class TinyGPT(nn.Module):
    def __init__(self, vocab, d=48, h=4, layers=2, block=32, p=0.1):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(1, block, d))
        self.layers = nn.ModuleList(
            nn.ModuleDict(dict(ln1=nn.LayerNorm(d), attn=CausalSelfAttention(d, h, block), ln2=nn.LayerNorm(d),
                               mlp=nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d), nn.Dropout(p))))
            for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab)

    def forward(self, idx):
        x = self.tok(idx) + self.pos[:, :idx.size(1)]
        for l in self.layers:
            x = x + l["attn"](l["ln1"](x))
            x = x + l["mlp"](l["ln2"](x))
        return self.lm_head(self.ln_f(x))


@torch.no_grad()
def next_char_accuracy(model, ids, block):
    model.eval()
    starts = torch.arange(0, len(ids) - block - 1, 17)
    ctx = torch.stack([ids[s:s + block] for s in starts.tolist()])
    nxt = torch.stack([ids[s + block] for s in starts.tolist()])
    pred = model(ctx)[:, -1].argmax(-1)
    model.train()
    return (pred == nxt).float().mean().item()


def main():
    torch.manual_seed(11)
    text = synth_text(9000, 1)
    stoi = {c: i for i, c in enumerate(sorted(set(text)))}
    ds = CharData(text, stoi, 32)
    held = torch.tensor([stoi[c] for c in synth_text(2500, 2)])
    loader = DataLoader(ds, batch_size=32, shuffle=True)
    model = TinyGPT(len(stoi))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    it = 0
    for epoch in range(10):
        for x, y in loader:
            logits = model(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            it += 1
            if it % 50 == 0:
                print(f"step {it} loss {loss.item():.4f}")
            if it >= 200:
                break
        if it >= 200:
            break
    return next_char_accuracy(model, held, 32)


if __name__ == "__main__":
    print(main())
