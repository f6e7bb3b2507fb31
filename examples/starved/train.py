"""Train a small network on rotated digits, and wait for most of the time.

Each image is rotated by a random angle before the network sees it. By default, the data set does
this one image at a time, which takes longer than the training itself.

    python train.py
    python train.py augment=batch      # rotates a whole batch at once
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    random_split,
)

_WIDEST = math.radians(15)

# -- the data --------------------------------------------------------------------------------------


def rotated(images: Tensor) -> Tensor:
    """Return images [n, 1, height, width], each rotated by its own random angle."""
    angles = (2 * torch.rand(len(images)) - 1) * _WIDEST
    sines, cosines, zeros = angles.sin(), angles.cos(), torch.zeros_like(angles)
    rows = [torch.stack([cosines, -sines, zeros], 1), torch.stack([sines, cosines, zeros], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


class Rotated(Dataset[tuple[Tensor, Tensor]]):
    """Rotates each image when it is loaded."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return rotated(self.images[index : index + 1]).squeeze(0), self.labels[index]


def load_data(cfg: DictConfig) -> tuple[DataLoader[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a loader of images [n, 1, 8, 8] and labels [n] for training, and all held-out ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # 0..16 -> -1..1
    labels = torch.tensor(digits.target)

    generator = torch.Generator().manual_seed(cfg.seed)
    train, held_out = random_split(TensorDataset(images, labels), [0.8, 0.2], generator)
    known, answers = train[:]
    if cfg.augment == "sample":
        loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
            Rotated(known, answers),
            batch_size=cfg.batch_size,
            shuffle=True,
            drop_last=True,
            generator=generator,
        )
    else:  # the loader takes whole batches, which are rotated in the training loop
        order = RandomSampler(known, generator=generator)
        batches = BatchSampler(order, cfg.batch_size, drop_last=True)
        loader = DataLoader(TensorDataset(known, answers), batch_size=None, sampler=batches)
    return loader, held_out[:]


def forever(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches epoch after epoch, reshuffled each time."""
    while True:
        yield from loader


# -- the network -----------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, stride=2)
        self.hidden = nn.Linear(2 * width * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [n, 1, 8, 8] to logits [n, 10]."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        logits: Tensor = self.head(F.relu(self.hidden(x.flatten(1))))
        return logits


# -- training --------------------------------------------------------------------------------------


@torch.no_grad()
def validate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return loss and accuracy on the held-out images."""
    model.eval()
    logits = model(images)
    model.train()
    accuracy = (logits.argmax(dim=1) == labels).float().mean()
    return F.cross_entropy(logits, labels).item(), accuracy.item()


def train(cfg: DictConfig) -> float:
    """Train, and return the last validation loss."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    loader, (held_out_images, held_out_labels) = load_data(cfg)
    held_out = held_out_images.to(cfg.device), held_out_labels.to(cfg.device)

    model = ConvNet(**cfg.model).to(cfg.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step, (images, labels) in enumerate(forever(loader), start=1):
        if cfg.augment == "batch":
            images = rotated(images)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(cfg.device)), labels.to(cfg.device))
        loss.backward()
        optimizer.step()

        losses[step - 1] = loss.detach()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            val_loss, accuracy = validate(model, *held_out)
            print(f"step {step:5} | loss {loss:.4f} | val loss {val_loss:.4f} ({accuracy:.1%})")
        if step == cfg.steps:
            break

    print(f"final loss {losses[-50:].mean():.4f} (mean of the last 50 steps)")
    if cfg.save is not None:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "losses": losses.cpu(),
        }
        torch.save(checkpoint, cfg.save)
    return val_loss


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Train, and return the last validation loss, which a sweep minimises."""
    return train(cfg)


if __name__ == "__main__":
    main()
