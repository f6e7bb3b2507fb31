"""Train a small convolutional network on the handwritten digits that come with scikit-learn.

1797 images of 8 x 8 pixels, ten classes; a fifth of the images is held out for validation.

    python train.py
    python train.py lr=0.01 model.dropout=0 steps=1000
"""

from __future__ import annotations

from collections.abc import Iterator

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

# -- the data --------------------------------------------------------------------------------------


def load_data(cfg: DictConfig) -> tuple[DataLoader[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return a loader of images [n, 1, 8, 8] and labels [n] for training, and all held-out ones."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # 0..16 -> -1..1
    labels = torch.tensor(digits.target)

    generator = torch.Generator().manual_seed(cfg.seed)
    train, held_out = random_split(TensorDataset(images, labels), [0.8, 0.2], generator)
    loader = DataLoader(
        train, batch_size=cfg.batch_size, shuffle=True, drop_last=True, generator=generator
    )
    return loader, held_out[:]


def forever(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches epoch after epoch, reshuffled each time."""
    while True:
        yield from loader


# -- the network -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, batch norm, ReLU; halves the image's height and width."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(F.relu(self.norm(self.conv(x))))
        return out


class ConvNet(nn.Module):
    """Two blocks, dropout, and a linear layer on the remaining feature map."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.block1 = Block(1, width)
        self.block2 = Block(width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [n, 1, 8, 8] to logits [n, 10]."""
        x = self.block2(self.block1(images))
        logits: Tensor = self.head(self.dropout(x.flatten(1)))
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


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Train, and return the last validation loss, which a sweep minimises."""
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    loader, (held_out_images, held_out_labels) = load_data(cfg)
    held_out = held_out_images.to(cfg.device), held_out_labels.to(cfg.device)

    model = ConvNet(**cfg.model).to(cfg.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step, (images, labels) in enumerate(forever(loader), start=1):
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


if __name__ == "__main__":
    main()
