"""Sequence tagging: BiGRU over padded sentences; some words are ambiguous and need both neighbours."""
import os
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
VOCAB, TAGS, PAD, IGNORE = 80, 6, 0, -100


def make_sentences(n, rng):
    sents = []
    for _ in range(n):
        length = rng.integers(5, 19)
        words = rng.integers(1, VOCAB, size=length)
        tags = np.zeros(length, dtype=np.int64)
        for i, w in enumerate(words):
            if w < 40:                      # unambiguous words
                tags[i] = w % TAGS
            elif w < 60:                    # decided by the word on the right
                right = words[i + 1] if i + 1 < length else 1
                tags[i] = (w + (right % 2) * 3) % TAGS
            else:                           # decided by the word on the left
                left = words[i - 1] if i > 0 else 1
                tags[i] = (w + (left % 2) * 2) % TAGS
        sents.append((words, tags))
    return sents


def collate(batch):
    lengths = torch.tensor([len(w) for w, _ in batch])
    longest = int(lengths.max())
    x = torch.full((len(batch), longest), PAD)
    y = torch.full((len(batch), longest), IGNORE)
    for i, (w, t) in enumerate(batch):
        x[i, :len(w)] = torch.from_numpy(w)
        y[i, :len(t)] = torch.from_numpy(t)
    lengths, order = lengths.sort(descending=True, stable=True)
    x = x[order]
    if CASE != "b3":
        y = y[order]
    return x, y, lengths


class Tagger(nn.Module):
    def __init__(self, emb=32, hidden=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, emb, padding_idx=PAD)
        self.drop = nn.Dropout(0.1)
        self.rnn = nn.GRU(emb, hidden, bidirectional=True, batch_first=(CASE != "b1"))
        self.head = nn.Linear(2 * hidden, TAGS)

    def forward(self, x, lengths):
        h = self.drop(self.emb(x))
        if CASE == "b1":
            h, _ = self.rnn(h)
        else:
            packed = pack_padded_sequence(h, lengths, batch_first=True)
            h, _ = self.rnn(packed)
            h, _ = pad_packed_sequence(h, batch_first=True, total_length=x.size(1))
        return self.head(self.drop(h))


def tag_loss(logits, y, smoothing=0.0):
    b, n, c = logits.shape
    if CASE == "b2":
        return F.cross_entropy(logits.reshape(b, c, n), y, ignore_index=IGNORE)
    return F.cross_entropy(logits.permute(0, 2, 1), y, ignore_index=IGNORE, label_smoothing=smoothing)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    right = total = 0
    for i in range(0, len(data), 64):
        chunk = sorted(data[i:i + 64], key=lambda s: -len(s[0]))
        x, y, lengths = collate(chunk)
        pred = model(x, lengths).argmax(-1)
        keep = y != IGNORE
        right += (pred[keep] == y[keep]).sum().item()
        total += keep.sum().item()
    model.train()
    return right / total


def main():
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, test = make_sentences(2400, rng), make_sentences(400, rng)
    model = Tagger()
    smoothing = 0.0
    if CASE == "b4":
        opt = torch.optim.Adam([{"params": model.emb.parameters()}], lr=3e-3, betas=(0.9, 0.98))
    elif CASE == "variant_x":
        smoothing = 0.05
        opt = torch.optim.AdamW([
            {"params": model.emb.parameters(), "lr": 1e-2},
            {"params": [*model.rnn.parameters(), *model.head.parameters()], "lr": 4e-3}], weight_decay=1e-3)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    step = 0
    for epoch in range(9):
        order = rng.permutation(len(train))
        for i in range(0, len(order), 48):
            x, y, lengths = collate([train[j] for j in order[i:i + 48]])
            loss = tag_loss(model(x, lengths), y, smoothing)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 if CASE == "variant_x" else 5.0)
            opt.step()
            step += 1
        print(f"epoch {epoch} step {step} loss {loss.item():.4f} test acc {evaluate(model, test):.4f}")
    print(f"quality {evaluate(model, test):.4f}")


if __name__ == "__main__":
    main()
