"""Training programs in the forms of public scripts: `python ordinary_programs.py NAME SECONDS`.

Ten are healthy. In four, something around the network is wrong: one keeps the losses of evaluated
batches with their graphs, one decodes its images while the model waits, one copies to the host in
every layer, and one has a data worker that hangs. They know nothing of comgra_decl, and were
written before their author had read the rules that judge them, except for the leak: the first one
kept the losses of training steps, which hold little after `backward`.
"""

from __future__ import annotations

import copy
import math
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def log(text: str) -> None:
    """Print like most programs."""
    sys.stdout.write(f"{text}\n")


def clock(seconds: float) -> Iterator[int]:
    """Yield numbers from 0 until the time is over."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        yield number
        number += 1


# -- healthy -----------------------------------------------------------------------------------


class Digits(nn.Module):
    """The network of the MNIST example, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 12 * 12, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def images(number: int, size: int = 28, channels: int = 1) -> TensorDataset:
    """Images with a bright patch whose place is the class."""
    labels = torch.randint(0, 10, (number,))
    pictures = 0.3 * torch.randn(number, channels, size, size)
    for row, label in enumerate(labels.tolist()):
        at = 2 * label
        pictures[row, :, at : at + 6, at : at + 6] += 1.5
    return TensorDataset(pictures, labels)


def mnist(seconds: float) -> None:
    """Epochs with a DataLoader, an evaluation after each one, Adadelta and a schedule."""
    train = DataLoader(images(1024), batch_size=32, shuffle=True)
    test = DataLoader(images(128), batch_size=64)
    model = Digits()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for epoch in clock(seconds):
        model.train()
        for number, (data, target) in enumerate(train):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                log(f"epoch {epoch} batch {number} loss {loss.item():.4f}")
        model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in test:
                correct += int((model(data).argmax(1) == target).sum())
        log(f"accuracy {correct / 128:.2f}")
        schedule.step()


def words(seconds: float) -> None:
    """A language model with an LSTM whose state is carried from batch to batch."""
    text = torch.tensor([(i * i + i // 3) % 17 for i in range(20_000)])
    rows = text[: len(text) // 16 * 16].view(16, -1).t().contiguous()
    embed, lstm, head = nn.Embedding(17, 24), nn.LSTM(24, 48), nn.Linear(48, 17)
    parts = nn.ModuleList([embed, lstm, head])
    optimizer = torch.optim.SGD(parts.parameters(), lr=1.0)
    total = 0.0
    for _ in clock(seconds):
        state: Any = None
        for start in range(0, len(rows) - 21, 20):
            data, target = rows[start : start + 20], rows[start + 1 : start + 21]
            if state is not None:
                state = tuple(part.detach() for part in state)
            parts.zero_grad()
            out, state = lstm(embed(data), state)
            loss = F.cross_entropy(head(out).view(-1, 17), target.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(parts.parameters(), 0.25)
            optimizer.step()
            total += loss.item()
    log(f"total {total}")


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 2, width // 2).transpose(1, 2)
            for part in self.attn(self.ln_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """A small GPT with tied embeddings."""

    def __init__(self, vocabulary: int = 32, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(seconds: float) -> None:
    """Micro-steps, warm-up and cosine, clipping, estimates of the loss, and checkpoints."""
    source = np.array([(i * 7 + i // 5) % 32 for i in range(50_000)], dtype=np.int64)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def batch() -> tuple[Tensor, Tensor]:
        at = torch.randint(len(source) - 33, (8,))
        x = torch.stack([torch.from_numpy(source[i : i + 32]) for i in at])
        y = torch.stack([torch.from_numpy(source[i + 1 : i + 33]) for i in at])
        return x, y

    @torch.no_grad()
    def estimate() -> float:
        model.eval()
        losses = torch.zeros(10)
        for k in range(10):
            losses[k] = model(*batch())[1].item()
        model.train()
        return float(losses.mean())

    best = math.inf
    for step in clock(seconds):
        lr = 1e-3 * min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(min(step / 3000, math.pi)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        if step % 100 == 0 and (now := estimate()) < best:
            best = now
            torch.save({"model": model.state_dict(), "step": step}, Path("ckpt.pt"))
        for _ in range(2):
            _, loss = model(*batch())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class VAE(nn.Module):
    """The network of the VAE example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(196, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.fc3, self.fc4 = nn.Linear(8, 64), nn.Linear(64, 196)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae(seconds: float) -> None:
    """A loss of two terms; the mean of an epoch is kept as a number."""
    pictures = images(2048, size=14)[:][0].flatten(1).sigmoid()
    loader = DataLoader(TensorDataset(pictures), batch_size=64, shuffle=True, drop_last=True)
    model, history = VAE(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in clock(seconds):
        total = 0.0
        for (data,) in loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy(recon, data, reduction="sum")
            loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            total += loss.item()
            optimizer.step()
        history.append(total / len(pictures))


def gan(seconds: float) -> None:
    """Generator and discriminator in turns."""
    loader = DataLoader(images(512, size=16), batch_size=32, shuffle=True, drop_last=True)
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0),
    )  # fmt: skip
    one = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    two = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    judge = nn.BCEWithLogitsLoss()
    for _ in clock(seconds):
        for real, _label in loader:
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            critic.zero_grad()
            judge(critic(real).view(-1), ones).backward()
            fake = generator(torch.randn(len(real), 16, 1, 1))
            judge(critic(fake.detach()).view(-1), zeros).backward()
            one.step()
            generator.zero_grad()
            judge(critic(fake).view(-1), ones).backward()
            two.step()


def dqn(seconds: float) -> None:
    """Q-learning on a line of cells, with a buffer of transitions (tensors) that fills up."""
    policy = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
    memory: deque[tuple[Tensor, int, Tensor, float]] = deque(maxlen=5000)
    cells, place = torch.eye(8), 3
    for step in clock(seconds):
        with torch.no_grad():
            greedy = int(policy(cells[place : place + 1]).argmax())
        action = greedy if random.random() > max(0.05, 0.9 - step / 2000) else random.randrange(2)
        after = min(max(place + 2 * action - 1, 0), 7)
        memory.append((cells[place].clone(), action, cells[after].clone(), float(after == 7)))
        place = 3 if after in (0, 7) else after
        if len(memory) < 64:
            continue
        batch = random.sample(memory, 64)
        states = torch.stack([row[0] for row in batch])
        nexts = torch.stack([row[2] for row in batch])
        actions = torch.tensor([row[1] for row in batch])
        rewards = torch.tensor([row[3] for row in batch])
        values = policy(states).gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            wanted = rewards + 0.95 * (1 - rewards) * target(nexts).max(1).values
        loss = F.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), policy.parameters(), strict=True):
                old.mul_(0.995).add_(new, alpha=0.005)


def waves(seconds: float) -> None:
    """Two LSTM cells stepped by hand over sine waves, and LBFGS with a closure."""
    shift = torch.randint(-80, 80, (20, 1))
    data = torch.sin((torch.arange(60)[None] + shift) / 20.0)
    one, two, head = nn.LSTMCell(1, 16), nn.LSTMCell(16, 16), nn.Linear(16, 1)
    model = nn.ModuleList([one, two, head])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def predict(rows: Tensor) -> Tensor:
        h, c, h2, c2 = (torch.zeros(len(rows), 16) for _ in range(4))
        outputs = []
        for now in rows.split(1, dim=1):
            h, c = one(now, (h, c))
            h2, c2 = two(h, (h2, c2))
            outputs.append(head(h2))
        return torch.cat(outputs, dim=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(predict(data[:, :-1]), data[:, 1:])
        loss.backward()
        return loss

    for step in clock(seconds):
        loss = optimizer.step(closure)
        if step % 5 == 0:
            log(f"loss {float(loss)}")


class Pieces(Dataset[tuple[Tensor, int]]):
    """Images that are changed a little in each epoch, as torchvision's transforms do."""

    def __init__(self, number: int) -> None:
        self.pictures, self.labels = images(number, size=28, channels=3)[:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self.pictures[index]
        if random.random() < 0.5:
            picture = picture.flip(-1)
        top, left = random.randrange(4), random.randrange(4)
        return picture[:, top : top + 24, left : left + 24], int(self.labels[index])


def workers(seconds: float) -> None:
    """A residual network whose images come from two worker processes, with momentum and EMA."""

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))

    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), Residual(24), Residual(24), nn.AdaptiveAvgPool2d(6),
        nn.Flatten(), nn.Linear(24 * 36, 10),
    )  # fmt: skip
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    loader = DataLoader(
        Pieces(1024), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    running = 0.0
    for _ in clock(seconds):
        for picture, label in loader:
            loss = F.cross_entropy(model(picture), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            running = 0.9 * running + 0.1 * loss.item()
        log(f"running loss {running}")


def finetune(seconds: float) -> None:
    """A frozen trunk and a new head, early stopping that keeps the best weights, a plateau."""
    trunk = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()
    )
    for parameter in trunk.parameters():
        parameter.requires_grad_(False)
    model = nn.Sequential(trunk, nn.Linear(32 * 25, 32), nn.ReLU(), nn.Linear(32, 10))
    loaders = {
        "train": DataLoader(images(512), batch_size=16, shuffle=True),
        "val": DataLoader(images(128), batch_size=64),
    }
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    best, weights = 0.0, copy.deepcopy(model.state_dict())
    history: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for _ in clock(seconds):
        for phase, loader in loaders.items():
            model.train(phase == "train")
            total, correct, seen = 0.0, 0, 0
            for data, label in loader:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out = model(data)
                    loss = F.cross_entropy(out, label)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item() * len(data)
                correct += int((out.argmax(1) == label).sum())
                seen += len(data)
            history["loss"].append(total / seen)
            history["accuracy"].append(correct / seen)
        schedule.step(history["loss"][-1])
        if correct / seen > best:
            best, weights = correct / seen, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)


def graphs(seconds: float) -> None:
    """Full-batch training of a graph network; the whole data is one batch."""
    labels = torch.arange(300) % 4
    near = (labels[:, None] == labels[None]).float() * (torch.rand(300, 300) < 0.1)
    near = ((near + near.t() + torch.eye(300)) > 0).float()
    scale = near.sum(1).rsqrt()
    adjacency = scale[:, None] * near * scale[None]
    features = torch.randn(300, 64) + F.one_hot(labels, 64)
    one, two = nn.Linear(64, 32), nn.Linear(32, 4)
    model = nn.ModuleList([one, two])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    known = torch.rand(300) < 0.3
    for step in clock(seconds):
        model.train()
        optimizer.zero_grad()
        hidden = F.dropout(F.relu(adjacency @ one(features)), training=model.training)
        scores = adjacency @ two(hidden)
        loss = F.cross_entropy(scores[known], labels[known])
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            log(f"{step}: {loss.item():.3f}")


HEALTHY = (mnist, words, gpt, vae, gan, dqn, waves, workers, finetune, graphs)


# -- not healthy -------------------------------------------------------------------------------


class Trainer:
    """Evaluates a batch every few steps with gradients switched on, and keeps the losses."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.logs: list[dict[str, Any]] = []

    def training_step(self, inputs: Tensor, labels: Tensor) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    def validation_step(self, inputs: Tensor, labels: Tensor) -> None:
        """Evaluate one batch."""
        self.model.eval()
        logits = self.model(inputs)
        accuracy = float((logits.argmax(1) == labels).float().mean())
        self.logs.append({"loss": F.cross_entropy(logits, labels), "accuracy": accuracy})
        self.model.train()


def leak(seconds: float) -> None:
    """The loss of each evaluated batch stays, with all that its graph holds."""
    trainer = Trainer()
    for step in clock(seconds):
        labels = torch.randint(0, 10, (128,))
        inputs = torch.randn(128, 256) + labels[:, None] / 10
        if step % 5 == 4:
            trainer.validation_step(inputs, labels)
        else:
            trainer.training_step(inputs, labels)


class Compressed(Dataset[tuple[Tensor, int]]):
    """Images that are decoded and resized when they are asked for."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.spectra = self.random.normal(size=(64, 96, 96))

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = np.fft.irfft2(self.spectra[index % 64], s=(256, 256))
        small = np.stack([np.roll(picture, k, axis=0)[::8, ::8] for k in range(3)])
        return torch.from_numpy((small - small.mean()) / small.std()).float(), index % 4


def starve(seconds: float) -> None:
    """The main process decodes each image; the model is small."""
    loader = DataLoader(Compressed(), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 49, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in clock(seconds):
        for picture, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(picture), label).backward()
            optimizer.step()


class OnHost(nn.Module):
    """Normalizes with numpy, on the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        scale = np.abs(y.detach().cpu().numpy()).max()
        return torch.relu(y / torch.tensor(scale, device=y.device))


def host_copy(seconds: float) -> None:
    """Each layer copies its output from the device and a scale to it."""
    device = torch.device("cuda")
    model = nn.Sequential(*(OnHost(256) for _ in range(6)), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in clock(seconds):
        optimizer.zero_grad()
        inputs = torch.randn(128, 256, device=device)
        F.mse_loss(model(inputs)[:, 0], inputs.mean(1)).backward()
        optimizer.step()


class Remote(Dataset[tuple[Tensor, Tensor]]):
    """One record comes from a server that does not answer for a while."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 2600:
            read_from_server()
        time.sleep(0.002)
        row = torch.full((32,), index / 4000) + 0.1 * torch.randn(32)
        return row, row.sum()[None]


def read_from_server() -> None:
    """Wait for a server that does not answer."""
    time.sleep(20)


def hang(seconds: float) -> None:
    """A worker of the DataLoader waits for a server while the model waits for its batch."""
    del seconds  # one epoch
    loader = DataLoader(Remote(), batch_size=16, num_workers=2)
    model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for row, total in loader:
        optimizer.zero_grad()
        for _ in range(4):
            F.mse_loss(model(row), total).backward()
        optimizer.step()


UNHEALTHY = (leak, starve, host_copy, hang)
PROGRAMS: dict[str, Callable[[float], None]] = {p.__name__: p for p in (*HEALTHY, *UNHEALTHY)}


if __name__ == "__main__":
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    PROGRAMS[sys.argv[1]](float(sys.argv[2]))
