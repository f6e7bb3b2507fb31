import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(3)
torch.set_num_threads(1)
VOCAB, PAD = 30, 0


def make_corpus(n):
    """label: which of the 4 marker tokens appeared last"""
    seqs, labels = [], []
    for _ in range(n):
        L = int(torch.randint(4, 12, (1,))) if torch.rand(1) < 0.93 else 70
        s = torch.randint(6, VOCAB, (L,))
        k = torch.randint(0, 4, (3,))
        pos = torch.randperm(L)[:3].sort().values
        s[pos] = k + 1
        seqs.append(s)
        labels.append(int(k[2]))
    return seqs, torch.tensor(labels)


class GRUClassifier(nn.Module):
    def __init__(self, d=24, h=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.gru = nn.GRU(d, h, batch_first=True)
        self.fc = nn.Linear(h, 4)

    def forward(self, tokens, lengths):
        out, _ = self.gru(self.emb(tokens))
        last = out[:, -1]
        return self.fc(last)


seqs, labels = make_corpus(1200)
tseqs, tlabels = make_corpus(300)


def collate(ids, seqs, labels):
    ss = [seqs[i] for i in ids]
    return pad_sequence(ss, batch_first=True, padding_value=PAD), torch.tensor([len(s) for s in ss]), labels[ids]


model = GRUClassifier()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(7):
    model.train()
    for ids in torch.randperm(len(seqs)).split(40):
        x, ln, y = collate(ids, seqs, labels)
        loss = nn.functional.cross_entropy(model(x, ln), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        x, ln, y = collate(torch.arange(len(tseqs)), tseqs, tlabels)
        acc = (model(x, ln).argmax(1) == y).float().mean().item()
    print("epoch", epoch, "loss %.4f" % loss.item(), "test acc %.4f" % acc)
print("final test acc %.4f" % acc)
