"""Digit-string recogniser on synthetic filterbank frames, trained with CTC."""
import numpy as np
import torch
from torch import nn

N_DIGITS, N_MELS = 10, 16
TEMPLATES = np.random.RandomState(5).randn(N_DIGITS, N_MELS).astype("float32") * 1.5


def utterance(rs):
    labels = rs.randint(0, N_DIGITS, size=rs.randint(3, 7))
    frames = []
    for d in labels:
        frames += [np.zeros(N_MELS, "float32")] * rs.randint(1, 3)
        frames += [TEMPLATES[d] * rs.uniform(0.7, 1.3)] * rs.randint(3, 6)
    frames += [np.zeros(N_MELS, "float32")] * 2
    x = np.stack(frames) + 0.4 * rs.randn(len(frames), N_MELS)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(labels, dtype=torch.long)


class Utterances(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        rs = np.random.RandomState(seed)
        self.items = [utterance(rs) for _ in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pad_batch(items):
    xs, ys = zip(*items)
    xl = torch.tensor([len(x) for x in xs])
    yl = torch.tensor([len(y) for y in ys])
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), xl, torch.cat(ys), yl


class Recogniser(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(N_MELS, hidden, 3, padding=1), nn.ReLU(),
                                   nn.Conv1d(hidden, hidden, 3, padding=1), nn.ReLU())
        self.rnn = nn.GRU(hidden, hidden // 2, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(hidden, N_DIGITS + 1)

    def forward(self, x):
        z = self.front(x.transpose(1, 2)).transpose(1, 2)
        z, _ = self.rnn(z)
        return self.classifier(z).log_softmax(-1)


def collapse(path, blank):
    out, prev = [], None
    for p in path:
        if p != prev and p != blank:
            out.append(p)
        prev = p
    return out


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def error_rate(model, loader, blank):
    model.eval()
    errs = total = 0
    with torch.no_grad():
        for x, xl, y, yl in loader:
            paths = model(x).argmax(-1)
            for p, n, t in zip(paths, xl, torch.split(y, yl.tolist())):
                hyp = collapse(p[:n].tolist(), blank)
                errs += edit_distance(hyp, t.tolist())
                total += len(t)
    model.train()
    return errs / total


def main():
    torch.manual_seed(3)
    train = torch.utils.data.DataLoader(Utterances(600, 0), batch_size=24, shuffle=True, collate_fn=pad_batch)
    test = torch.utils.data.DataLoader(Utterances(150, 1), batch_size=50, collate_fn=pad_batch)
    model = Recogniser()
    ctc = nn.CTCLoss(blank=0)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(6):
        running = 0.0
        for x, xl, y, yl in train:
            logp = model(x).transpose(0, 1)
            loss = ctc(logp, y, xl, yl)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            running += loss.item()
        print(f"epoch {epoch}: ctc {running / len(train):.3f}")
    return error_rate(model, test, ctc.blank)


if __name__ == "__main__":
    print(main())
