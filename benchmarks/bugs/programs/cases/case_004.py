import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

torch.manual_seed(0)
torch.set_num_threads(1)


def make(n):
    rows = []
    for _ in range(n):
        L = int(torch.randint(4, 25, (1,)))
        w = torch.randint(1, 50, (L,))
        t = torch.zeros(L, dtype=torch.long)
        for i in range(1, L):
            if w[i - 1] < 5:
                t[i] = 1 + int(w[i] % 2)
        rows.append((w, t))
    return rows


def collate(b):
    b.sort(key=lambda r: -len(r[0]))
    w, t = zip(*b)
    return pad_sequence(w, True, 0), pad_sequence(t, True, -100), torch.tensor([len(x) for x in w])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 24, padding_idx=0)
        self.drop = nn.Dropout(0.2)
        self.rnn = nn.LSTM(24, 32, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(64, 3)

    def forward(self, w, lens):
        p = pack_padded_sequence(self.drop(self.emb(w)), lens, batch_first=True)
        h, _ = pad_packed_sequence(self.rnn(p)[0], batch_first=True, total_length=w.size(1))
        return self.fc(self.drop(h))


train, valid = DataLoader(make(900), 30, shuffle=True, collate_fn=collate), DataLoader(make(200), 50, collate_fn=collate)
m = Tagger()
opt = torch.optim.Adam(m.parameters(), lr=5e-3)
for ep in range(8):
    m.train()
    for w, t, l in train:
        loss = F.cross_entropy(m(w, l).flatten(0, 1), t.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
    m.eval()
    tp = fp = fn = 0
    with torch.no_grad():
        for w, t, l in valid:
            p = m(w, l).argmax(-1)
            ok = t != -100
            tp += ((p == t) & (t > 0)).sum().item()
            fp += ((p != t) & (p > 0) & ok).sum().item()
            fn += ((p != t) & (t > 0)).sum().item()
    f1 = 2 * tp / max(1, 2 * tp + fp + fn)
    print(f"epoch {ep} loss {loss.item():.4f} f1 {f1:.4f}")
print("final f1", round(f1, 4))
