import torch
import torch.nn as nn

torch.manual_seed(13)
torch.set_num_threads(1)


class SeqClassifier(nn.Module):
    def __init__(self, n_features, hidden, n_classes):
        super().__init__()
        self.lstm = nn.LSTM(n_features, hidden, num_layers=1, batch_first=True)
        self.fc = nn.Linear(hidden, n_classes)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


def waves(n, length=30):
    t = torch.arange(length).float()
    label = torch.randint(0, 4, (n,))
    freq = torch.tensor([0.2, 0.4, 0.7, 1.1])[label].unsqueeze(1)
    phase = torch.rand(n, 1) * 6.28
    base = torch.sin(freq * t + phase)
    ch2 = torch.cos(freq * t + phase) * (0.5 + torch.rand(n, 1))
    x = torch.stack([base, ch2], -1) + 0.2 * torch.randn(n, length, 2)
    return x, label


def main():
    xtr, ytr = waves(1024)
    xte, yte = waves(320)
    model = SeqClassifier(2, 40, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(14):
        model.train()
        total = 0
        for idx in torch.randperm(len(xtr)).split(64):
            loss = criterion(model(xtr[idx]), ytr[idx])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
        model.eval()
        correct = 0
        with torch.no_grad():
            for xb, yb in zip(xte.split(64), yte.split(64)):
                correct += (model(xb).argmax(1) == yb).sum().item()
        print(f"Epoch {epoch + 1}: loss={total / 16:.4f} val_acc={correct / len(xte):.4f}")
    print("final val_acc", correct / len(xte))


main()
