"""Train a character-level transformer on Python's own documentation, then generate text.

python train.py
python train.py steps=3000 model.layers=6 text=my_book.txt
"""

from __future__ import annotations

import hydra
import torch
import torch.nn.functional as F
from model import GPT
from omegaconf import DictConfig
from text import alphabet_of, read_text
from torch import Tensor


def get_batch(data: Tensor, cfg: DictConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random pieces of the text [batch, context], and the same shifted by a character."""
    context = cfg.model.context
    starts = torch.randint(len(data) - context, (cfg.batch_size,), generator=generator)
    pieces = torch.stack([data[start : start + context + 1] for start in starts]).to(cfg.device)
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per character."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: GPT, data: Tensor, cfg: DictConfig) -> float:
    """Return the loss on the held-out text, with the same pieces every time."""
    generator = torch.Generator().manual_seed(cfg.seed)
    model.eval()
    losses = [loss_of(model, *get_batch(data, cfg, generator)) for _ in range(cfg.eval_batches)]
    model.train()
    return torch.stack(losses).mean().item()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)

    text = read_text(cfg.text)
    alphabet = alphabet_of(text)
    number = {character: i for i, character in enumerate(alphabet)}
    data = torch.tensor([number[character] for character in text])
    train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]

    model = GPT(len(alphabet), **cfg.model).to(cfg.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    print(f"{len(text):,} characters, {sum(p.numel() for p in model.parameters()):,} parameters")

    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step in range(1, cfg.steps + 1):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, *get_batch(train_data, cfg, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()

        losses[step - 1] = loss.detach()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            print(
                f"step {step:5} | loss {loss:.4f} | val loss {validate(model, val_data, cfg):.4f}"
            )

    print(f"final loss {losses[-50:].mean():.4f} (mean of the last 50 steps)")
    if cfg.save is not None:
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "losses": losses.cpu(),
        }
        torch.save(checkpoint, cfg.save)

    model.eval()
    prompt = torch.full((1, 1), number["\n"], device=cfg.device)
    written = model.generate(prompt, cfg.write)
    print("".join(alphabet[i] for i in written[0].tolist()))


if __name__ == "__main__":
    main()
