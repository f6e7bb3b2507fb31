"""More training programs in many styles: `python -m tests.record.further_programs NAME SECONDS`.

Fourteen are healthy, although their memory grows up to a cap, their data comes in odd ways, or
they evaluate for long. In five, memory grows without end; in four, the model waits for its data; in
four, the host waits for the device; and in four, what delivers the data hangs. They know nothing of
comgra_decl, and were written from the documentation, before their author had read the rules.
"""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import math
import os
import queue
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from tests.record.ordinary_programs import clock, log

T = TypeVar("T")


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def clusters(number: int, width: int = 32, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Points around one centre per class."""
    labels = torch.arange(number) % classes
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(1))
    return centres[labels] + torch.randn(number, width), labels


# -- healthy -----------------------------------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """An endless stream that is split among the workers."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        generator = torch.Generator().manual_seed(7 if info is None else info.id)
        while True:
            x = torch.randn(16, generator=generator)
            yield x, x[:4].sum()[None].tanh()


def stream(seconds: float) -> None:
    """An endless `IterableDataset` with two workers, and a schedule by steps."""
    model = mlp(16, 256, 256, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
    loader = DataLoader(Stream(), batch_size=256, num_workers=2, prefetch_factor=4)
    until = time.monotonic() + seconds
    for step, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            log(f"{step} {loss.item():.4f} {schedule.get_last_lr()[0]:.1e}")
        if time.monotonic() > until:
            break


def accumulate(seconds: float) -> None:
    """Eight micro-batches per step under autocast, clipping, and a one-cycle schedule."""
    model = nn.Sequential(
        nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 5)
    )
    x, y = clusters(4096)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100_000)
    meter = 0.0
    for _ in clock(seconds):
        for number, (data, label) in enumerate(loader, 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(data), label) / 8
            loss.backward()
            meter += loss.item()
            if number % 8 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    log(f"meter {meter:.3f}")


def patient(seconds: float) -> None:
    """A long evaluation after each epoch, early stopping, and the best weights in memory."""
    model = nn.Sequential(nn.Conv1d(1, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(8), nn.Flatten(),
                          nn.Linear(128, 5))  # fmt: skip
    x, y = clusters(1024, 64)
    train = DataLoader(TensorDataset(x[:, None], y), batch_size=32, shuffle=True)
    held = DataLoader(TensorDataset(x[:, None].repeat(30, 1, 1), y.repeat(30)), batch_size=4)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    best: dict[str, Any] = {"accuracy": 0.0}
    history: list[dict[str, float]] = []
    for epoch in clock(seconds):
        model.train()
        losses = []
        for data, label in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        hits = 0
        with torch.inference_mode():
            for data, label in held:
                hits += int((model(data).argmax(-1) == label).sum())
        accuracy = hits / len(x) / 30
        history.append({"loss": float(torch.stack(losses).mean()), "accuracy": accuracy})
        if accuracy > best["accuracy"]:
            best = {"accuracy": accuracy, "epoch": epoch}
            best["weights"] = copy.deepcopy(model.state_dict())


def endless(loader: Iterable[T]) -> Iterator[T]:
    """Yield batches forever."""
    while True:
        yield from loader


def iterations(seconds: float) -> None:
    """Counts iterations instead of epochs, takes batches by `next`, and prints a moving mean."""
    x, y = clusters(2000)
    batches = endless(DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True, drop_last=True))
    model = mlp(32, 200, 100, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    curve: list[float] = []
    for step in clock(seconds):
        data, label = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), label, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
        if step % 100 == 99:
            log(f"{step}: {np.mean(curve[-100:]):.4f}")


class Callback:
    """What a trainer calls after each step and epoch."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def on_step(self, logs: dict[str, float]) -> None:
        """Count."""
        self.seen.update(logs.keys())


class Module(nn.Module):
    """A module with the methods of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(32, 128, 64), nn.Linear(64, 5)
        self.outputs: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.encoder(x)))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.outputs.append({"loss": loss.detach(), "scores": scores.detach(), "labels": y})
        return loss

    def on_epoch_end(self) -> float:
        """Return the accuracy of the epoch, and forget its outputs."""
        scores = torch.cat([each["scores"] for each in self.outputs])
        labels = torch.cat([each["labels"] for each in self.outputs])
        self.outputs.clear()
        return float((scores.argmax(1) == labels).float().mean())


class Fit:
    """A trainer with callbacks."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def __call__(self, module: Module, loader: DataLoader[Any], seconds: float) -> None:
        optimizer = torch.optim.Adam(module.parameters())
        for _ in clock(seconds):
            for batch in loader:
                optimizer.zero_grad()
                loss = module.training_step(batch)
                loss.backward()
                optimizer.step()
                for callback in self.callbacks:
                    callback.on_step({"loss": float(loss)})
            self.metrics["accuracy"].append(module.on_epoch_end())


def trainer(seconds: float) -> None:
    """Outputs of an epoch are kept and cleared, as in Lightning."""
    data = TensorDataset(*clusters(6400))
    Fit([Callback()])(Module(), DataLoader(data, batch_size=32, shuffle=True), seconds)


def cached(seconds: float) -> None:
    """The features of a frozen trunk are computed once per sample and kept, detached."""
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 32, 3, 2)).eval()
    pictures, labels = torch.randn(1200, 3, 40, 40), torch.arange(1200) % 5
    pictures += labels[:, None, None, None] / 4
    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 81, 5))
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    features: dict[int, Tensor] = {}
    for _ in clock(seconds):
        for index in torch.randperm(1200).split(16):
            rows = []
            for at in index.tolist():
                if at not in features:
                    with torch.no_grad():
                        features[at] = trunk(pictures[at : at + 1])[0]
                rows.append(features[at])
            optimizer.zero_grad()
            F.cross_entropy(head(torch.stack(rows)), labels[index]).backward()
            optimizer.step()


def policy(seconds: float) -> None:
    """Policy gradients: rollouts of eight environments, advantages, and four epochs on each."""
    actor, critic = mlp(6, 64, 3), mlp(6, 64, 1)
    both = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(both, lr=3e-4, eps=1e-5)
    state = torch.randn(8, 6)
    returns: list[float] = []
    for _ in clock(seconds):
        states, actions = torch.zeros(32, 8, 6), torch.zeros(32, 8, dtype=torch.long)
        logs, rewards, values = torch.zeros(32, 8), torch.zeros(32, 8), torch.zeros(33, 8)
        for t in range(32):
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=actor(state))
                actions[t] = choice.sample()
                logs[t], values[t] = choice.log_prob(actions[t]), critic(state)[:, 0]
            states[t] = state
            rewards[t] = (actions[t] == state[:, :3].argmax(1)).float()
            state = 0.9 * state + 0.5 * torch.randn(8, 6)
        with torch.no_grad():
            values[32] = critic(state)[:, 0]
        advantages, last = torch.zeros(32, 8), torch.zeros(8)
        for t in reversed(range(32)):
            last = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.94 * last
            advantages[t] = last
        wanted = advantages + values[:32]
        for _epoch in range(4):
            for index in torch.randperm(256).split(64):
                now = torch.distributions.Categorical(logits=actor(states.view(-1, 6)[index]))
                ratio = (now.log_prob(actions.view(-1)[index]) - logs.view(-1)[index]).exp()
                gain = advantages.view(-1)[index]
                kept = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                value = critic(states.view(-1, 6)[index])[:, 0]
                error = F.mse_loss(value, wanted.view(-1)[index])
                loss = -kept + 0.5 * error - 0.01 * now.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(both, 0.5)
                optimizer.step()
        returns.append(float(rewards.mean()))


def replay(seconds: float) -> None:
    """A replay buffer (a list of frames) that fills up to about 90 MB during the first half."""
    model = nn.Sequential(nn.Flatten(), mlp(3 * 24 * 24, 64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    buffer: list[tuple[Tensor, int, float]] = []
    began, capacity, place = time.monotonic(), 13_000, 0
    for _ in clock(seconds):
        share = min(1.0, 2 * (time.monotonic() - began) / seconds)
        while len(buffer) < 64 or len(buffer) < share * capacity:
            action = random.randrange(4)
            buffer.append((torch.randn(3, 24, 24) + action, action, random.random()))
        if len(buffer) >= capacity:
            buffer[place] = (torch.randn(3, 24, 24) + 1, 1, random.random())
            place = (place + 1) % capacity
        rows = random.sample(buffer, 32)
        frames = torch.stack([row[0] for row in rows])
        actions = torch.tensor([row[1] for row in rows])
        values = model(frames).gather(1, actions[:, None])[:, 0]
        loss = F.huber_loss(values, torch.tensor([row[2] for row in rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Contrast(nn.Module):
    """Momentum contrast: two encoders, and a queue of keys as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = mlp(32, 128, 32), mlp(32, 128, 32)
        self.slow.load_state_dict(self.online.state_dict())
        self.slow.requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(4096, 32), dim=1))
        self.at = 0

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        q = F.normalize(self.online(one), dim=1)
        with torch.no_grad():
            for old, new in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                old.lerp_(new, 0.01)
            k = F.normalize(self.slow(two), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], dim=1)
        self.queue[self.at : self.at + len(k)] = k
        self.at = (self.at + len(k)) % len(self.queue)
        return F.cross_entropy(scores / 0.2, torch.zeros(len(q), dtype=torch.long))


def contrast(seconds: float) -> None:
    """Two noisy views of each sample, and a queue of negatives."""
    x, _ = clusters(4096)
    model = Contrast()
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.03, momentum=0.9)
    for step in clock(seconds):
        rows = x[torch.randint(len(x), (128,))]
        loss = model(rows + 0.3 * torch.randn_like(rows), rows + 0.3 * torch.randn_like(rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            log(f"{step} {float(loss):.3f}")


def diffusion(seconds: float) -> None:
    """Denoising at random times, an averaged copy, and samples that are drawn now and then."""
    steps = 50
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, steps), 0)
    model = mlp(17, 256, 256, 16)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    galleries: list[np.ndarray[Any, Any]] = []
    for number in clock(seconds):
        clean = torch.randn(128, 1).sign() + 0.1 * torch.randn(128, 16)
        t = torch.randint(0, steps, (128,))
        noise = torch.randn_like(clean)
        noisy = kept[t, None].sqrt() * clean + (1 - kept[t, None]).sqrt() * noise
        loss = (model(torch.cat([noisy, t[:, None] / steps], 1)) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.005)
        if number % 500 == 499:
            x = torch.randn(16, 16)
            with torch.no_grad():
                for back in reversed(range(steps)):
                    guess = average(torch.cat([x, torch.full((16, 1), back / steps)], 1))
                    x = x - 0.1 * guess
            galleries.append(x.numpy())


def triplets(seconds: float) -> None:
    """Hard negatives from the embeddings of all samples, which are computed anew in each epoch."""
    x, y = clusters(3000)
    model = mlp(32, 128, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in clock(seconds):
        model.eval()
        with torch.no_grad():
            everything = torch.cat([model(rows) for rows in x.split(500)])
        model.train()
        for index in torch.randperm(len(x)).split(60):
            apart = torch.cdist(everything[index], everything)
            apart[y[index][:, None] == y[None]] = math.inf
            near = torch.stack([(y == label).nonzero()[0, 0] for label in y[index].tolist()])
            anchor, same, other = model(x[index]), model(x[near]), model(x[apart.argmin(1)])
            loss = F.triplet_margin_loss(anchor, same, other, margin=0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def physics(seconds: float) -> None:
    """Second derivatives by `autograd.grad` in the loss, and points drawn in each step."""
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(),
                          nn.Linear(48, 1))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    errors = defaultdict(list)
    for step in clock(seconds):
        xt = torch.rand(256, 2, requires_grad=True)
        u = model(xt)
        (first,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), xt, create_graph=True)
        inside = (first[:, 1] - 0.1 * second[:, 0]).square().mean()
        start = torch.rand(64, 1)
        guess = model(torch.cat([start, torch.zeros_like(start)], 1))
        initial = (guess - torch.sin(math.pi * start)).square().mean()
        optimizer.zero_grad()
        (inside + 10 * initial).backward()
        optimizer.step()
        if step % 20 == 0:
            errors["inside"].append(inside.item())
            errors["initial"].append(initial.item())


def meta(seconds: float) -> None:
    """Inner steps by `functional_call` on tasks, and one outer step."""
    model = mlp(1, 40, 40, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in clock(seconds):
        optimizer.zero_grad()
        outer = torch.zeros(())
        for _task in range(4):
            shift, x = 3 * torch.rand(()), 4 * torch.rand(20, 1) - 2
            y = torch.sin(x + shift)
            fast: dict[str, Tensor] = dict(model.named_parameters())
            for _inner in range(2):
                inner = F.mse_loss(torch.func.functional_call(model, fast, (x[:10],)), y[:10])
                slopes = torch.autograd.grad(inner, [*fast.values()], create_graph=True)
                pairs = zip(fast.items(), slopes, strict=True)
                fast = {name: value - 0.05 * slope for (name, value), slope in pairs}
            guess = torch.func.functional_call(model, fast, (x[10:],))
            outer = outer + F.mse_loss(guess, y[10:])
        outer.backward()
        optimizer.step()
        if step % 10 == 0:
            log(f"{step} {outer.item() / 4:.3f}")


def sentences(seconds: float) -> None:
    """Sentences of unequal lengths, packed for a GRU, with a confusion matrix per epoch."""
    lengths = [random.randint(3, 40) for _ in range(1500)]
    rows = [torch.randint(1, 50, (length,)) for length in lengths]
    labels = torch.tensor([int(row.sum()) % 2 for row in rows])
    embed, gru, head = nn.Embedding(50, 32, padding_idx=0), nn.GRU(32, 64), nn.Linear(64, 2)
    parts = nn.ModuleList([embed, gru, head])
    optimizer = torch.optim.Adagrad(parts.parameters(), lr=0.01)

    def collate(index: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        picked = [rows[at] for at in index]
        return pad_sequence(picked), torch.tensor([len(row) for row in picked]), labels[index]

    loader = DataLoader(range(1500), batch_size=32, shuffle=True, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    for _ in clock(seconds):
        confusion = torch.zeros(2, 2, dtype=torch.long)
        for tokens, counts, wanted in loader:
            packed = pack_padded_sequence(embed(tokens), counts, enforce_sorted=False)
            _, last = gru(packed)
            scores = head(last[-1])
            loss = F.cross_entropy(scores, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for truth, guess in zip(wanted, scores.argmax(1), strict=True):
                confusion[truth, guess] += 1
        log(f"{confusion.tolist()}")


HEALTHY = (stream, accumulate, patient, iterations, trainer, cached, policy, replay, contrast,
           diffusion, triplets, physics, meta, sentences)  # fmt: skip


# -- memory grows without end ------------------------------------------------------------------


def leak_sum(seconds: float) -> None:
    """The loss of each evaluated batch is added to a tensor, with its graph."""
    model = mlp(256, 512, 512, 10)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = clusters(4000, 256, 10)
    validation = torch.zeros(())
    for step in clock(seconds):
        index = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        if step % 4 == 0:
            index = torch.randint(len(x), (128,))
            validation = validation + F.cross_entropy(model(x[index]), y[index])


class Prototypes(nn.Module):
    """Compares with all embeddings that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(64, 128, 256)
        self.bank = torch.zeros(1, 256)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.encoder(x)
        near = self.bank[-2000:].mean(0)
        self.bank = torch.cat([self.bank, embedded.detach()])
        return embedded - near


def leak_bank(seconds: float) -> None:
    """A bank of embeddings gets longer in each step, although only its end is used."""
    model = Prototypes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in clock(seconds):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()


class Memo:
    """Keeps what it has computed. In a stream, no sample comes twice."""

    def __init__(self) -> None:
        self.known: dict[str, Tensor] = {}

    def __call__(self, keys: list[str], rows: Tensor) -> Tensor:
        for key, row in zip(keys, rows, strict=True):
            if key not in self.known:
                self.known[key] = torch.fft.rfft(row, n=4096).abs()[:1024]
        return torch.stack([self.known[key] for key in keys])


MEMO = Memo()


def leak_memo(seconds: float) -> None:
    """The features of each sample of a stream are kept in an object of the module."""
    model = mlp(1024, 64, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in clock(seconds):
        rows = torch.randn(32, 512)
        inputs = MEMO([f"{step}/{number}" for number in range(32)], rows)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), (rows.mean(1) > 0).long()).backward()
        optimizer.step()


def leak_hook(seconds: float) -> None:
    """A forward hook for a plot of activations has been left on the model."""
    model = mlp(64, 256, 256, 4)
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda *called: seen.append(called[-1].detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = clusters(2000, 64, 4)
    for _ in clock(seconds):
        for index in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()


def leak_arrays(seconds: float) -> None:
    """The outputs of all steps are kept as arrays, for a metric at the very end."""
    model = nn.Sequential(nn.Conv1d(4, 32, 9, padding=4), nn.ReLU(), nn.Conv1d(32, 1, 9, padding=4))
    optimizer = torch.optim.Adam(model.parameters())
    predictions, targets = [], []
    for _ in clock(seconds):
        x = torch.randn(16, 4, 1024)
        y = x.cumsum(-1)[:, :1] / 30
        out = model(x)
        optimizer.zero_grad()
        F.l1_loss(out, y).backward()
        optimizer.step()
        predictions.append(out.detach().numpy())
        targets.append(y.numpy())
    log(f"{np.corrcoef(np.concatenate(predictions).ravel(), np.concatenate(targets).ravel())}")


LEAKS = (leak_sum, leak_bank, leak_memo, leak_hook, leak_arrays)


# -- the model waits for its data --------------------------------------------------------------


class Lines(IterableDataset[tuple[Tensor, int]]):
    """Reads compressed lines of JSON, and turns them into counts of letters."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        with gzip.open(self.file, "rt") as lines:
            for line in lines:
                row = json.loads(line)
                words = re.findall(r"[a-z]+", row["text"].lower())
                counts = Counter(letter for word in words for letter in word)
                yield torch.tensor([counts[c] / 100 for c in "abcdefghij"]), row["label"]


def starve_lines(seconds: float) -> None:
    """Text is read and counted in the main process."""
    file = Path("texts.jsonl.gz")
    with gzip.open(file, "wt") as lines:
        for number in range(400):
            text = " ".join(random.choice(("abba", "cede", "fig", "high")) for _ in range(400))
            lines.write(json.dumps({"text": text, "label": number % 2}) + "\n")
    model = mlp(10, 32, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in clock(seconds):
        for x, y in DataLoader(Lines(file), batch_size=8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Files on a network drive: each read waits."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        x = torch.randn(64)
        return x, x[:1].abs()


def starve_drive(seconds: float) -> None:
    """One worker reads from a slow drive."""
    model = mlp(64, 256, 1)
    optimizer = torch.optim.Adam(model.parameters())
    until = time.monotonic() + seconds
    for x, y in DataLoader(Slow(), batch_size=16, num_workers=1):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.monotonic() > until:
            break


def patches(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of patches that are cut from saved arrays with loops."""
    while True:
        batch = []
        for file in sorted(folder.glob("*.npy")):
            picture = np.load(file)
            top, left = random.randrange(100), random.randrange(100)
            patch = picture[top : top + 24, left : left + 24].copy()
            for row in range(24):
                for column in range(24):
                    patch[row, column] = min(max(patch[row, column] * 1.1 - 0.05, 0.0), 1.0)
            batch.append(patch)
        x = torch.from_numpy(np.stack(batch)).float()
        yield x[:, None], x.mean((1, 2))[:, None]


def starve_generator(seconds: float) -> None:
    """A generator of numpy arrays instead of a DataLoader."""
    folder = Path("pictures")
    folder.mkdir(exist_ok=True)
    for number in range(12):
        np.save(folder / f"{number}.npy", np.random.default_rng(number).random((128, 128)))
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(484, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, (x, y) in zip(clock(seconds), patches(folder), strict=False):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def starve_collate(seconds: float) -> None:
    """Texts are tokenized and padded in `collate_fn`, pair by pair of letters."""
    texts = ["".join(random.choice("abcdefgh ") for _ in range(600)) for _ in range(64)]
    merges = {pair: 9 + n for n, pair in enumerate(itertools.product("abcdefgh", repeat=2))}

    def tokens(text: str) -> list[int]:
        found, at = [], 0
        while at < len(text):
            pair = tuple(text[at : at + 2])
            found.append(merges.get(pair, 0) if len(pair) == 2 else 1)
            at += 2 if pair in merges else 1
        return found

    def collate(rows: list[str]) -> tuple[Tensor, Tensor]:
        ids = [tokens(row) for row in rows]
        longest = max(map(len, ids))
        padded = [row + [0] * (longest - len(row)) for row in ids]
        return torch.tensor(padded), torch.tensor([row.count(9) % 2 for row in ids])

    model = nn.Sequential(nn.EmbeddingBag(80, 16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(
        texts,  # type: ignore[arg-type]
        batch_size=32,
        shuffle=True,
        collate_fn=collate,
    )
    for _ in clock(seconds):
        for ids, label in loader:
            loss = F.cross_entropy(model(ids), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


STARVED = (starve_lines, starve_drive, starve_generator, starve_collate)


# -- the host waits for the device -------------------------------------------------------------


class Guarded(nn.Module):
    """Looks for values that are not finite in each layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.dense(x))
        if torch.isnan(y).any():
            raise ValueError("not a number")
        return y


class Table(nn.Module):
    """Embeddings that are kept on the host, because there are so many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = torch.randn(1000, width)

    def forward(self, index: Tensor) -> Tensor:
        return self.rows[index.cpu()].to(index.device)


class Clipped(nn.Module):
    """Scales by the largest value, read as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x / max(x.abs().max().item(), 1.0)


class Listed(nn.Module):
    """Sums groups whose sizes are read as a list."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = (x[:8, 0] > 0).long() + 1
        parts = x.split([*sizes.tolist(), len(x) - sum(sizes.tolist())])
        return torch.stack([part.sum(0) for part in parts])


def on_device(model: nn.Module, inputs: Callable[[], Tensor], seconds: float) -> None:
    """Train on the CUDA device, if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in clock(seconds):
        optimizer.zero_grad()
        model(inputs().to(device)).square().mean().backward()
        optimizer.step()


def copy_check(seconds: float) -> None:
    """Each layer branches on a tensor."""
    model = nn.Sequential(*(Guarded(256) for _ in range(6)))
    on_device(model, lambda: torch.randn(64, 256), seconds)


def copy_table(seconds: float) -> None:
    """Rows are looked up on the host."""
    model = nn.Sequential(Table(256), nn.Linear(256, 64))
    on_device(model, lambda: torch.randint(0, 1000, (64,)), seconds)


def copy_scale(seconds: float) -> None:
    """A largest value is read with `.item()`."""
    model = nn.Sequential(nn.Linear(256, 256), Clipped(), nn.Linear(256, 64))
    on_device(model, lambda: torch.randn(64, 256), seconds)


def copy_sizes(seconds: float) -> None:
    """Sizes are read with `.tolist()`."""
    model = nn.Sequential(nn.Linear(256, 256), Listed(), nn.Linear(256, 64))
    on_device(model, lambda: torch.randn(64, 256), seconds)


COPIES = (copy_check, copy_table, copy_scale, copy_sizes)


# -- what delivers the data hangs --------------------------------------------------------------


def regression(batches: Iterable[tuple[Tensor, Tensor]], seconds: float = math.inf) -> None:
    """Train on (x, y) until the batches or the time are over."""
    model = mlp(32, 256, 256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    until = time.monotonic() + seconds
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if time.monotonic() > until:
            break


class Stopped(Dataset[tuple[Tensor, Tensor]]):
    """One worker is stopped by a signal, and goes on later."""

    def __len__(self) -> int:
        return 6000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        if index == 4000:
            if (child := os.fork()) == 0:  # a thread of this process would be stopped, too
                time.sleep(20)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(child, 0)
        x = torch.randn(32)
        return x, x.sum()[None]


def hang_stopped(seconds: float) -> None:
    """A worker is stopped, as a job scheduler or a debugger would."""
    del seconds  # one epoch
    regression(DataLoader(Stopped(), batch_size=20, num_workers=2))


class Heavy(Dataset[tuple[Tensor, Tensor]]):
    """One sample takes very long to compute."""

    def __len__(self) -> int:
        return 6000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.001)
        until = time.monotonic() + (20 if index == 4010 else 0)
        while time.monotonic() < until:
            re.match(r"(a+)+$", "a" * 18 + "b")
        x = torch.randn(32)
        return x, x.sum()[None]


def hang_heavy(seconds: float) -> None:
    """A regular expression backtracks for one sample, in one of three workers."""
    del seconds
    loader = DataLoader(Heavy(), batch_size=20, num_workers=3, persistent_workers=True)
    regression(loader)


class Served(IterableDataset[tuple[Tensor, Tensor]]):
    """Waits for a lock that another thread of the worker keeps."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        lock = threading.Lock()
        for number in range(4000):
            if number == 2500:
                lock.acquire()
                threading.Timer(20, lock.release).start()
            with lock:
                x = torch.randn(32)
            time.sleep(0.001)
            yield x, x.sum()[None]


def hang_lock(seconds: float) -> None:
    """The only worker waits for a lock."""
    del seconds
    regression(DataLoader(Served(), batch_size=20, num_workers=1))


def prefetched(into: queue.Queue[tuple[Tensor, Tensor]]) -> None:
    """Fill a queue; a connection breaks after a while."""
    for number in itertools.count():
        if number == 300:
            download()
        x = torch.randn(20, 32)
        time.sleep(0.005)
        into.put((x, x.sum(1, keepdim=True)))


def download() -> None:
    """Wait for a connection."""
    time.sleep(20)


def hang_thread(seconds: float) -> None:
    """A thread of the program, instead of a DataLoader, fetches the batches."""
    fetched: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(maxsize=4)
    threading.Thread(target=prefetched, args=(fetched,), name="prefetch", daemon=True).start()
    regression(iter(fetched.get, None), seconds)


HANGING = (hang_stopped, hang_heavy, hang_lock, hang_thread)

UNHEALTHY = (*LEAKS, *STARVED, *COPIES, *HANGING)
PROGRAMS: dict[str, Callable[[float], None]] = {p.__name__: p for p in (*HEALTHY, *UNHEALTHY)}


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    PROGRAMS[sys.argv[1]](float(sys.argv[2]))
