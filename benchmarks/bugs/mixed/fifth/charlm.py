"""Stateful character language model (LSTM, truncated back-propagation) on generated kitchen notes."""
import math, os, random, sys
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
THINGS = ["onion", "carrot", "butter", "pepper", "garlic", "lentils", "rice", "ginger", "tomato", "flour"]
VERBS = ["chop", "fry", "boil", "grate", "rinse", "roast"]
TAILS = ["until soft", "for {n} minutes", "with salt", "in the large pan", "then set aside"]


def note(r):
    a, b = r.sample(THINGS, 2)
    lines = [f"take {r.randint(2, 9)} {a} and some {b}."]
    for _ in range(r.randint(2, 4)):
        tail = r.choice(TAILS).format(n=r.choice([5, 10, 15]))
        lines.append(f"{r.choice(VERBS)} the {r.choice([a, b])} {tail}.")
    return " ".join(lines) + f" serve {a} over {b}.\n"


def corpus(n, seed):
    r = random.Random(seed)
    return "".join(note(r) for _ in range(n))


def batchify(ids, rows):
    n = ids.numel() // rows
    ids = ids[:n * rows]
    if CASE == "columns":
        return ids.view(n, rows)
    return ids.view(rows, n).t().contiguous()          # (time, rows)


class NoteModel(nn.Module):
    def __init__(self, vocab, dim=96):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=1)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(dim, vocab)
        if CASE == "variant_x":
            self.out.weight = self.embed.weight
            nn.init.uniform_(self.embed.weight, -0.1, 0.1)
            with torch.no_grad():
                self.lstm.bias_ih_l0[dim:2 * dim].fill_(1.0)

    def forward(self, x, state):
        h, state = self.lstm(self.drop(self.embed(x)), state)
        logits = self.out(self.drop(h))
        if CASE == "probs_head":
            logits = logits.softmax(dim=-1)
        return logits, state


@torch.no_grad()
def bits_per_char(model, data, span=50):
    model.eval()
    state, total, count = None, 0.0, 0
    for i in range(0, data.size(0) - 1, span):
        x, y = data[i:i + span], data[i + 1:i + 1 + span]
        x = x[:y.size(0)]
        logits, state = model(x, state)
        total += F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1), reduction="sum").item()
        count += y.numel()
    model.train()
    return total / count / math.log(2)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    text, held = corpus(2200, 10 + SEED), corpus(100, 900 + SEED)
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    encode = lambda s: torch.tensor([stoi[c] for c in s])
    train = batchify(encode(text), 24)
    valid = encode(held)
    valid = valid[:valid.numel() // 10 * 10].view(10, -1).t()
    model = NoteModel(len(chars))
    if CASE == "variant_x":
        opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=1e-4)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    span, steps, step, state, pos = 40, 300, 0, None, 0
    while step < steps:
        if pos + span + 1 > train.size(0):
            pos, state = 0, None
        x, y = train[pos:pos + span], train[pos + 1:pos + 1 + span]
        if CASE == "next_span":
            y = train[pos:pos + span]
        pos += span
        if state is not None:
            state = tuple(s.detach() for s in state)
        logits, state = model(x, state)
        if CASE == "flat_order":
            loss = F.cross_entropy(logits.transpose(0, 1).reshape(-1, logits.size(-1)), y.reshape(-1))
        else:
            loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        if step % 75 == 0:
            print(f"step {step} train loss {loss.item():.3f} valid bpc {bits_per_char(model, valid):.3f}")
    print("quality", round(bits_per_char(model, valid), 4))


if __name__ == "__main__":
    main()
