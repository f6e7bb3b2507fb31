"""POS-like tagger: sparse word embeddings (SparseAdam) plus packed BiLSTM (Adam), ignore_index for padding."""
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

VOCAB, TAGS, IGN = 800, 6, -100
g0 = torch.Generator().manual_seed(42)
WORD_CLASS = torch.randint(TAGS, (VOCAB,), generator=g0)


def sentence(g):
    n = int(torch.randint(3, 18, (1,), generator=g))
    u = torch.rand(n, generator=g)
    w = (u ** 2 * (VOCAB - 1)).long() + 1
    w.clamp_(1, VOCAB - 1)
    c = WORD_CLASS[w]
    prev = torch.cat([torch.zeros(1, dtype=torch.long), c[:-1]])
    tags = torch.where(prev % 2 == 1, (c + 1) % TAGS, c)
    return w, tags


class Tagger(nn.Module):
    def __init__(self, dim=32, hid=32):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim, sparse=True)
        self.lstm = nn.LSTM(dim, hid, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(2 * hid, TAGS)

    def forward(self, w, lens):
        x = pack_padded_sequence(self.words(w), lens, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(x)[0], batch_first=True, total_length=w.size(1))
        return self.out(self.drop(h))


def get_batch(g, n):
    ws, ts = zip(*[sentence(g) for _ in range(n)])
    lens = torch.tensor([len(w) for w in ws])
    return pad_sequence(ws, batch_first=True), pad_sequence(ts, batch_first=True, padding_value=IGN), lens


def main():
    torch.manual_seed(1)
    model = Tagger()
    sparse_opt = torch.optim.SparseAdam(list(model.words.parameters()), lr=1e-2)
    dense_opt = torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("words")], lr=5e-3)
    crit = nn.CrossEntropyLoss(ignore_index=IGN)
    g = torch.Generator().manual_seed(5)
    for step in range(260):
        w, t, lens = get_batch(g, 32)
        logits = model(w, lens)
        loss = crit(logits.transpose(1, 2), t)
        sparse_opt.zero_grad()
        dense_opt.zero_grad()
        loss.backward()
        sparse_opt.step()
        dense_opt.step()
        if step % 65 == 0:
            print(step, loss.item())
    model.eval()
    w, t, lens = get_batch(torch.Generator().manual_seed(77), 300)
    with torch.no_grad():
        pred = model(w, lens).argmax(-1)
    return (pred == t)[t != IGN].float().mean().item()


if __name__ == "__main__":
    print(main())
