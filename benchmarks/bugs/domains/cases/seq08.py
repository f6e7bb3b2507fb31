import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def build_data(n, length, vocab, tags, seed):
    g = torch.Generator().manual_seed(seed)
    emit = torch.randint(tags, (vocab,), generator=torch.Generator().manual_seed(100))
    w = torch.randint(1, vocab, (n, length), generator=g)
    base = emit[w]
    left = torch.cat([torch.zeros(n, 1, dtype=torch.long), base[:, :-1]], 1)
    y = torch.where(left == 0, (base + 2) % tags, base)
    return TensorDataset(w, y)


class LSTMTagger(nn.Module):
    def __init__(self, vocab, tags, emb=32, hidden=48):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, emb)
        self.lstm = nn.LSTM(emb, hidden, num_layers=1, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * hidden, tags)

    def forward(self, sentence):
        lstm_out, _ = self.lstm(self.word_embeddings(sentence))
        return self.hidden2tag(lstm_out)


def accuracy(model, loader):
    model.eval()
    good = n = 0
    with torch.no_grad():
        for w, y in loader:
            good += (model(w).argmax(-1) == y).sum().item()
            n += y.numel()
    model.train()
    return good / n


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--lr", type=float, default=1.0)
    p.add_argument("--batch-size", type=int, default=32)
    return p.parse_args([])


def main():
    args = parse()
    torch.manual_seed(21)
    train = DataLoader(build_data(900, 14, 60, 5, 1), batch_size=args.batch_size, shuffle=True)
    dev = DataLoader(build_data(200, 14, 60, 5, 2), batch_size=100)
    model = LSTMTagger(60, 5)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    best = 0.0
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        total = 0.0
        for w, y in train:
            scores = model(w)
            loss = criterion(scores.reshape(-1, scores.size(-1)), y.reshape(-1))
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        best = accuracy(model, dev)
        print(f"epoch {epoch} loss {total / len(train):.4f} dev {best:.3f}")
    return best


if __name__ == "__main__":
    print(main())
