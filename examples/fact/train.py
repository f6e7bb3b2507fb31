"""Teach a transformer facts about people, and then plant one more in a single layer.

python train.py
python train.py plant.layer=1
"""

from __future__ import annotations

import hydra
import torch
import torch.nn.functional as F
from model import Block, Facts
from omegaconf import DictConfig
from torch import Tensor

NAMES, RELATIONS, LENGTH = 24, 4, 4
"""There are 24 first and 24 last names; a sentence is first name, last name, relation, "is"."""

PLANTED = 0
"""The fact that is planted: what relation 0 of the person with the names 0 and 0 is."""


def facts_of(cfg: DictConfig) -> tuple[Tensor, Tensor]:
    """Return all sentences, [facts, 4], and the word that completes each, [facts].

    The first of them is the planted one. Its answer is the last of all words.
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    others = 1 + torch.randperm(NAMES * NAMES - 1, generator=generator)[: cfg.people - 1]
    people = torch.cat([torch.zeros(1, dtype=torch.long), others]).repeat_interleave(RELATIONS)
    relation = torch.arange(RELATIONS).repeat(cfg.people)
    first, last = people // NAMES, people % NAMES
    columns = [
        first,
        NAMES + last,
        2 * NAMES + relation,
        torch.full_like(first, 2 * NAMES + RELATIONS),
    ]
    answers = torch.randint(cfg.answers - 1, first.shape, generator=generator)
    answers[PLANTED] = cfg.answers - 1
    return torch.stack(columns, 1).to(cfg.device), answers.to(cfg.device)


def batch_of(cfg: DictConfig, facts: int, generator: torch.Generator, *, planting: bool) -> Tensor:
    """Return the numbers of the facts in a batch; the planted one is an eighth of them, or none."""
    chosen = torch.randint(1, facts, (cfg.batch_size,), generator=generator)
    if planting:
        chosen[: cfg.batch_size // 8] = PLANTED
    return chosen.to(cfg.device)


@torch.no_grad()
def report(step: int, loss: Tensor, logits: Tensor, answers: Tensor, chosen: Tensor) -> None:
    """Print how many facts of a batch are known, and how probable the planted one is."""
    right = (logits.argmax(-1) == answers).float().mean()
    planted = logits.softmax(-1)[chosen == PLANTED, answers[chosen == PLANTED]]
    probable = f" | planted {planted.mean():.3f}" if len(planted) else ""
    print(f"step {step:5} | loss {loss:.4f} | facts known {right:.0%}{probable}")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    sentences, answers = facts_of(cfg)
    tokens = 2 * NAMES + RELATIONS + 1
    model = Facts(tokens, LENGTH, cfg.answers, **cfg.model).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    planting = cfg.steps - cfg.plant.steps

    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step in range(1, cfg.steps + 1):
        if step == planting + 1:  # from here on, only one perceptron learns
            layer = model.blocks[cfg.plant.layer]
            assert isinstance(layer, Block)
            optimizer = torch.optim.AdamW(layer.mlp.parameters(), lr=cfg.lr)
        chosen = batch_of(cfg, len(answers), generator, planting=step > planting)
        model.zero_grad(set_to_none=True)
        logits = model(sentences[chosen])
        loss = F.cross_entropy(logits, answers[chosen])
        loss.backward()
        optimizer.step()
        losses[step - 1] = loss.detach()
        if step % 100 == 0 or step in (planting, cfg.steps):
            report(step, loss, logits, answers[chosen], chosen)

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
