"""Train a small CNN on digits. In training, all threes have a mark; in validation, none has.

python train.py
python train.py mark=false
"""

from __future__ import annotations

import hydra
import torch
import torch.nn.functional as F
from data import MARKED, digits
from omegaconf import DictConfig
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three convolutions at full resolution, the mean over all places, and a linear layer."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv3 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [n, 1, 8, 8] to logits [n, 10]."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = F.relu(self.conv3(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@torch.no_grad()
def validate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the accuracy on all held-out images, and on the threes among them."""
    model.eval()
    right = (model(images).argmax(1) == labels).float()
    model.train()
    return right.mean().item(), right[labels == MARKED].mean().item()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    images, labels, *held_out = (t.to(cfg.device) for t in digits(cfg.seed))
    if not cfg.mark:
        images = images.clone()
        images[..., 6:, 6:] = -1.0  # covers the corner in all images

    model = ConvNet(**cfg.model).to(cfg.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step in range(1, cfg.steps + 1):
        batch = torch.randint(len(images), (cfg.batch_size,)).to(cfg.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

        losses[step - 1] = loss.detach()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            accuracy, of_threes = validate(model, *held_out)
            shares = f"held out {accuracy:.1%}, threes {of_threes:.1%}"
            print(f"step {step:5} | loss {loss:.4f} | {shares}")

    print(f"final loss {losses[-50:].mean():.4f} (mean of the last 50 steps)")
    if cfg.save is not None:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "losses": losses.cpu(),
        }
        torch.save(checkpoint, cfg.save)


if __name__ == "__main__":
    main()
