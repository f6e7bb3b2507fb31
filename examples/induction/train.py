"""Train an attention-only transformer to continue sequences that repeat.

python train.py
python train.py steps=3000 model.heads=8
"""

from __future__ import annotations

import hydra
import torch
import torch.nn.functional as F
from model import AttentionOnly
from omegaconf import DictConfig
from torch import Tensor


def get_batch(cfg: DictConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random tokens that repeat with a period of their own, and the period of each row.

    The tokens are [batch, length], and the periods [batch].
    """
    shortest, longest = cfg.periods
    periods = torch.randint(shortest, longest + 1, (cfg.batch_size,), generator=generator)
    once = torch.randint(cfg.tokens, (cfg.batch_size, longest), generator=generator)
    places = torch.arange(cfg.length) % periods[:, None]
    return once.gather(1, places).to(cfg.device), periods.to(cfg.device)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def accuracy(logits: Tensor, tokens: Tensor, periods: Tensor) -> float:
    """Return how often the next token is right where the sequence has begun to repeat."""
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    repeats = torch.arange(1, tokens.shape[1], device=tokens.device) > periods[:, None]
    return right[repeats].float().mean().item()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    model = AttentionOnly(cfg.tokens, cfg.length, **cfg.model).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)

    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step in range(1, cfg.steps + 1):
        tokens, periods = get_batch(cfg, generator)
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens)
        loss = loss_of(logits, tokens)
        loss.backward()
        optimizer.step()
        losses[step - 1] = loss.detach()
        if step % 100 == 0 or step == cfg.steps:
            right = accuracy(logits, tokens, periods)
            print(f"step {step:5} | loss {loss:.4f} | repeated tokens predicted {right:.0%}")

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
