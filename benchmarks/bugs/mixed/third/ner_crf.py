"""Named-entity tagging on generated sentences with a BiLSTM and a linear-chain CRF."""
import os
import random
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.set_num_threads(1)
CASE = sys.argv[1] if len(sys.argv) > 1 else ""
SEED = int(os.environ.get("SEED", 0))
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]
CUES = {"PER": (["mr", "dr", "said", "met"], ["smiled", "spoke"]),
        "LOC": (["in", "near", "from", "to"], ["valley", "harbour"]),
        "ORG": (["joined", "shares", "bought", "ceo"], ["plc", "profits"])}


def sentence(rng):
    words, tags = [], []
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(1, 4)):
            words.append("w%d" % rng.randint(0, 79))
            tags.append("O")
        kind = rng.choice(list(CUES))
        before, after = CUES[kind]
        use_before = rng.random() < 0.5
        if use_before:
            words.append(rng.choice(before))
            tags.append("O")
        for k in range(rng.randint(1, 3)):
            words.append("name%d" % rng.randint(0, 59))       # names are ambiguous
            tags.append(("B-" if k == 0 else "I-") + kind)
        if not use_before:
            words.append(rng.choice(after))
            tags.append("O")
    return words, tags


def build_vocab(sents):
    vocab = {"<pad>": 0, "<unk>": 1}
    for words, _ in sents:
        for w in words:
            vocab.setdefault(w, len(vocab))
    return vocab


def encode(sents, vocab):
    return [(torch.tensor([vocab.get(w, 1) for w in ws]), torch.tensor([TAGS.index(t) for t in ts]))
            for ws, ts in sents]


def collate(items):
    lengths = torch.tensor([len(x) for x, _ in items])
    x = pad_sequence([x for x, _ in items], batch_first=True)
    y = pad_sequence([y for _, y in items], batch_first=True)
    mask = torch.arange(x.shape[1])[None] < lengths[:, None]
    if CASE == "a1":
        order = lengths.argsort(descending=True)
        x, mask = x[order], mask[order]
    return x, y, mask


class CRF(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.trans = nn.Parameter(torch.randn(n, n) * 0.1)     # trans[i, j]: from i to j
        self.start = nn.Parameter(torch.zeros(n))

    def forward(self, emit, y, mask):
        m = mask.float()
        score = self.start[y[:, 0]] + emit[:, 0].gather(1, y[:, :1]).squeeze(1)
        alpha = self.start + emit[:, 0]
        trans = self.trans
        for t in range(1, emit.shape[1]):
            step = self.trans[y[:, t - 1], y[:, t]] + emit[:, t].gather(1, y[:, t:t + 1]).squeeze(1)
            score = score + step * m[:, t]
            nxt = torch.logsumexp(alpha[:, :, None] + trans[None], dim=1) + emit[:, t]
            alpha = torch.where(mask[:, t:t + 1], nxt, alpha)
        return (torch.logsumexp(alpha, 1) - score).mean()

    def decode(self, emit, mask):
        best, back = self.start + emit[:, 0], []
        for t in range(1, emit.shape[1]):
            val, idx = (best[:, :, None] + self.trans[None]).max(1)
            keep = mask[:, t:t + 1]
            back.append(torch.where(keep, idx, torch.arange(emit.shape[2])[None]))
            best = torch.where(keep, val + emit[:, t], best)
        path = [best.argmax(1)]
        for idx in reversed(back):
            path.append(idx.gather(1, path[-1][:, None]).squeeze(1))
        return torch.stack(path[::-1], 1)


class Tagger(nn.Module):
    def __init__(self, vocab_size, dim=32, hidden=32):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.drop = nn.Dropout(0.2)
        self.rnn = nn.LSTM(dim, hidden, bidirectional=True, batch_first=CASE != "a4")
        self.out = nn.Linear(2 * hidden, len(TAGS))
        self.crf = CRF(len(TAGS))

    def emissions(self, x):
        h, _ = self.rnn(self.drop(self.emb(x)))
        return self.out(h)

    def forward(self, x, y, mask):
        return self.crf(self.emissions(x), y, mask)


def spans(tags):
    out, start = set(), None
    for i, t in enumerate(list(tags) + ["O"]):
        if start is not None and not (t == "I-" + start[1]):
            out.add((start[0], i, start[1]))
            start = None
        if t.startswith("B-"):
            start = (i, t[2:])
    return out


@torch.no_grad()
def span_f1(model, items):
    model.eval()
    tp = n_pred = n_true = 0
    for i in range(0, len(items), 64):
        chunk = items[i:i + 64]
        lengths = torch.tensor([len(a) for a, _ in chunk])
        x = pad_sequence([a for a, _ in chunk], batch_first=True)
        mask = torch.arange(x.shape[1])[None] < lengths[:, None]
        path = model.crf.decode(model.emissions(x), mask)
        for k, (_, y) in enumerate(chunk):
            true = spans([TAGS[j] for j in y.tolist()])
            pred = spans([TAGS[j] for j in path[k, :len(y)].tolist()])
            tp, n_pred, n_true = tp + len(true & pred), n_pred + len(pred), n_true + len(true)
    model.train()
    return 2 * tp / max(1, n_pred + n_true)


def main():
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    train_s, test_s = [sentence(rng) for _ in range(1200)], [sentence(rng) for _ in range(200)]
    vocab = build_vocab(train_s)
    train = encode(train_s, vocab)
    test = encode(test_s, build_vocab(test_s) if CASE == "a3" else vocab)
    model = Tagger(len(vocab))
    accum = 1
    if CASE == "variant_x":
        accum = 2
        model.emb.weight.requires_grad_(False)                 # fixed random word vectors
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=1e-3)
    for step in range(300):
        loss = model(*collate(rng.sample(train, 32 // accum)))
        (loss / accum).backward()
        if (step + 1) % accum == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            if CASE == "a2":
                opt.zero_grad()
            opt.step()
            opt.zero_grad()
        if step % 75 == 74:
            print("step %d  loss %.3f  held-out F1 %.3f" % (step + 1, loss.item(), span_f1(model, test)))
    print("final held-out span F1 %.4f" % span_f1(model, test))


if __name__ == "__main__":
    main()
