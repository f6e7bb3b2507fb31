"""Train a small recurrent network to predict which of five running sums are positive.

An input is a sequence of N tuples of five numbers in [-1, 1], treated as five independent
sequences; the target has a 1 for each of the five whose sum is positive, otherwise a 0. The
network trains on short sequences and is tested on longer ones too.

    python train.py
    python train.py model.activation_on_last_layer=false steps=1000
"""

from __future__ import annotations

import random

import hydra
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

CHANNELS = 5  # independent sequences, summed separately


# -- the task --------------------------------------------------------------------------------------


def make_batch(size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs [size, length, 5], uniform in [-1, 1], and targets [size, 5], 0 or 1."""
    inputs = torch.rand(size, length, CHANNELS, generator=generator) * 2 - 1
    return inputs, (inputs.sum(dim=1) > 0).float()


# -- the network -----------------------------------------------------------------------------------


class Subnet(nn.Module):
    """Two linear layers with a leaky ReLU, optionally after the last one as well."""

    def __init__(self, inputs: int, width: int, outputs: int, activation_on_last_layer: bool):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.last = nn.Linear(width, outputs)
        self.activation_on_last_layer = activation_on_last_layer

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(F.leaky_relu(self.first(x)))
        return F.leaky_relu(x) if self.activation_on_last_layer else x


class PartialSums(nn.Module):
    """Adds the next tuple to the sums so far: the true solution, which the network never sees."""

    def forward(self, sums: Tensor, x: Tensor) -> Tensor:
        return sums + x


class RunningSum(nn.Module):
    """Reads the tuples one by one into a memory and answers from the memory."""

    def __init__(self, width: int, activation_on_last_layer: bool):
        super().__init__()
        self.pre = Subnet(CHANNELS, width, width, activation_on_last_layer)
        self.memory = Subnet(2 * width, width, width, activation_on_last_layer)
        self.out = Subnet(width, width, CHANNELS, activation_on_last_layer)
        self.answer = nn.Sigmoid()
        self.partial_sums = PartialSums()  # only there to be recorded
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, length, 5] to [batch, 5]: the probability that each sum is positive."""
        memory = inputs.new_zeros(len(inputs), self.width)
        sums = inputs.new_zeros(len(inputs), CHANNELS)
        for x in inputs.unbind(dim=1):
            sums = self.partial_sums(sums, x)
            memory = self.memory(torch.cat([memory, self.pre(x)], dim=1))
            answer: Tensor = self.answer(self.out(memory))
        return answer  # answers after fewer tuples are not part of the loss


# -- training --------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, criterion: nn.Module, cfg: DictConfig) -> dict[int, str]:
    """Return loss and accuracy for each length, on the same sequences every time."""
    model.eval()
    generator = torch.Generator().manual_seed(cfg.seed + 1)
    scores = {}
    for length in [*cfg.task.train_lengths, *cfg.task.test_lengths]:
        inputs, targets = make_batch(cfg.task.eval_size, length, generator)
        answers = model(inputs.to(cfg.device)).cpu()
        loss = criterion(answers, targets).mean()
        accuracy = ((answers > 0.5) == (targets > 0.5)).float().mean()
        scores[length] = f"{loss:.3f} ({accuracy:.1%})"
    model.train()
    return scores


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)  # a network this small is fastest on one thread
    torch.manual_seed(cfg.seed)
    lengths = random.Random(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)

    model = RunningSum(**cfg.model).to(cfg.device)
    criterion = nn.BCELoss(reduction="none")  # [batch, 5]: one loss per sum
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    losses = torch.zeros(cfg.steps, device=cfg.device)
    for step in range(1, cfg.steps + 1):
        length = lengths.choice(cfg.task.train_lengths)
        inputs, targets = make_batch(cfg.batch_size, length, generator)

        optimizer.zero_grad()
        loss = criterion(model(inputs.to(cfg.device)), targets.to(cfg.device)).mean()
        loss.backward()
        optimizer.step()

        losses[step - 1] = loss.detach()
        if step % cfg.eval_every == 0 or step == cfg.steps:
            scores = evaluate(model, criterion, cfg)
            print(f"step {step:5}", *(f"| length {n}: {s}" for n, s in scores.items()))

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
