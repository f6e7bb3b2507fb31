"""A character LSTM that learns the words and the word order of a small made-up language."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CASES = (
    "healthy",
    "labels_not_shifted",
    "batch_first_forgotten",
    "lstm_not_optimized",
    "flattened_in_other_order",
    "variant_tbptt",
)
LETTERS = "abcdefghijklmnopqrst "
STEPS, BATCH, LENGTH = 300, 24, 40


def make_text(words: int) -> Tensor:
    """Write random words; each word may only be followed by one of three others."""
    lexicon = [
        "".join(LETTERS[i] for i in torch.randint(0, 20, (int(n),)).tolist())
        for n in torch.randint(3, 7, (30,))
    ]
    followers = torch.randint(0, 30, (30, 3))
    word, text = 0, []
    for choice in torch.randint(0, 3, (words,)).tolist():
        text.extend(LETTERS.index(letter) for letter in lexicon[word] + " ")
        word = int(followers[word, choice])
    return torch.tensor(text)


class CharModel(nn.Module):
    """Embedding, one LSTM, and a linear layer to the letters."""

    def __init__(self, case: str, size: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 32)
        self.lstm = nn.LSTM(32, size, batch_first=case != "batch_first_forgotten")
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(size, len(LETTERS))

    def forward(
        self, letters: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.embedding(letters), state)
        return self.head(self.dropout(out)), state


def random_chunks(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs and the letters that follow them, from random places."""
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
    chunk = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return chunk[:, :-1], chunk[:, 1:]


def following_chunks(streams: Tensor, step: int) -> tuple[Tensor, Tensor, bool]:
    """Return the next piece of each stream, and whether the streams start anew."""
    pieces = (streams.shape[1] - 1) // LENGTH
    start = step % pieces * LENGTH
    chunk = streams[:, start : start + LENGTH + 1]
    return chunk[:, :-1], chunk[:, 1:], step % pieces == 0


@torch.no_grad()
def accuracy(model: CharModel, text: Tensor) -> float:
    """How often the most probable letter is the next one, on unseen text."""
    model.eval()
    right = []
    for _ in range(10):
        inputs, following = random_chunks(text)
        right.append((model(inputs)[0].argmax(-1) == following).float().mean())
    model.train()
    return float(torch.stack(right).mean())


def main(case: str) -> None:
    torch.manual_seed(0)
    text = make_text(9000)
    split = len(text) * 9 // 10
    train, test = text[:split], text[split:]
    model = CharModel(case)
    tbptt = case == "variant_tbptt"
    trained = list(model.parameters())
    if case == "lstm_not_optimized":
        trained = [*model.embedding.parameters(), *model.head.parameters()]
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    streams = train[: len(train) // BATCH * BATCH].view(BATCH, -1)
    state: tuple[Tensor, Tensor] | None = None
    for step in range(STEPS):
        if tbptt:
            inputs, targets, fresh = following_chunks(streams, step)
            state = None if fresh or state is None else (state[0].detach(), state[1].detach())
            logits, state = model(inputs, state)
        else:
            inputs, targets = random_chunks(train)
            logits, _ = model(inputs)
        if case == "labels_not_shifted":
            targets = inputs
        if case == "flattened_in_other_order":
            logits = logits.transpose(0, 1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if tbptt:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    print(f"quality (accuracy of the next letter): {accuracy(model, test):.3f}")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "healthy"
    assert chosen in CASES, CASES
    main(chosen)
