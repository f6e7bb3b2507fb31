"""BERT-style pretraining on a small artificial language."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args:
    vocab: int = 32
    length: int = 18
    d_model: int = 48
    heads: int = 4
    layers: int = 2
    mask_prob: float = 0.15
    batch: int = 48
    steps: int = 200
    lr: float = 3e-3


class Language:
    """Sentences are agreement pairs: the second half repeats the first half through a fixed dictionary."""

    def __init__(self, args, seed):
        self.args = args
        self.g = torch.Generator().manual_seed(seed)
        self.dictionary = 2 + torch.randperm(args.vocab - 2, generator=torch.Generator().manual_seed(55))

    def batch(self, n):
        half = self.args.length // 2
        a = torch.randint(2, self.args.vocab, (n, half), generator=self.g)
        return torch.cat([a, self.dictionary[a - 2]], 1)


class MaskedCollator:
    def __init__(self, args, seed):
        self.p, self.vocab = args.mask_prob, args.vocab
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, tokens):
        labels = tokens.clone()
        selected = torch.rand(tokens.shape, generator=self.g) < self.p
        labels[selected] = -100
        inputs = tokens.clone()
        inputs[selected] = 1
        return inputs, labels, selected


class MiniBert(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.word = nn.Embedding(a.vocab, a.d_model)
        self.position = nn.Embedding(a.length, a.d_model)
        enc = nn.TransformerEncoderLayer(a.d_model, a.heads, 2 * a.d_model, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(enc, a.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(a.d_model)
        self.lm_head = nn.Linear(a.d_model, a.vocab)

    def forward(self, ids):
        h = self.word(ids) + self.position(torch.arange(ids.size(1)))
        return self.lm_head(self.norm(self.encoder(h)))


def main():
    args = Args()
    torch.manual_seed(12)
    lang, collate = Language(args, 1), MaskedCollator(args, 2)
    model = MiniBert(args)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 20) * (1 - 0.9 * s / args.steps))
    for step in range(args.steps):
        inputs, labels, _ = collate(lang.batch(args.batch))
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, args.vocab), labels.view(-1), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 50 == 0:
            print(f"step {step} mlm {loss.item():.4f}")
    model.eval()
    tokens = Language(args, 9).batch(300)
    inputs, _, selected = MaskedCollator(args, 10)(tokens)
    with torch.no_grad():
        pred = model(inputs).argmax(-1)
    return (pred == tokens)[selected].float().mean().item()


if __name__ == "__main__":
    print(main())
