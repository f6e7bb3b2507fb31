"""Ways of training: several nets and losses, other updates, precision, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.neutrality.program import Program, usual
from benchmarks.neutrality.zoo.collection import Collection

TRAININGS = Collection()
_BATCH, _WIDTH = 6, 8


def _net(inputs: int = _WIDTH, outputs: int = 4) -> nn.Sequential:
    layers = (nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Linear(16, outputs))


def _loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(_BATCH, _WIDTH)), torch.randint(4, (_BATCH,)))


def _with(optimizer: Callable[..., Any], **options: Any) -> Callable[[], Program]:
    return lambda: usual(_net(), _loss, optimizer=optimizer, **options)


for _kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    TRAININGS[f"{_kind.__name__.lower()}-foreach"] = _with(_kind, foreach=True)
    TRAININGS[f"{_kind.__name__.lower()}-fused"] = _with(_kind, fused=True)
for _kind in (torch.optim.RMSprop, torch.optim.Rprop, torch.optim.NAdam, torch.optim.RAdam):
    TRAININGS[_kind.__name__.lower()] = _with(_kind)
for _kind in (torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Adafactor):
    TRAININGS[_kind.__name__.lower()] = _with(_kind)
TRAININGS["adam-amsgrad-maximize"] = _with(torch.optim.Adam, amsgrad=True, maximize=True)
TRAININGS["sgd-nesterov"] = _with(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1)


@TRAININGS
def lbfgs() -> Program:
    """A closure that the optimizer calls several times per step."""
    model = _net().train()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step(_: int) -> Tensor:
        x, y = torch.randn(_BATCH, _WIDTH), torch.randint(4, (_BATCH,))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Program([model], [optimizer], step, plain_loss=False)


@TRAININGS
def by_hand() -> Program:
    """No optimizer: the loop updates parameters, and the program marks the end of each step."""
    import comgra_decl as comgra

    model = _net().train()

    def step(_: int) -> Tensor:
        model.zero_grad()
        loss = _loss(model)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        comgra.step()
        return loss.detach()

    return Program([model], [], step)


@TRAININGS
def remembering() -> Program:
    """Keeps references to its variables and to torch functions, as many programs do."""
    model = _net().train()
    optimizer = torch.optim.AdamW(model.parameters())
    held: dict[str, Any] = {"steps": []}
    backward, call, switch = torch.autograd.backward, nn.Module.__call__, nn.Module.train

    def update(loss: Tensor, retain: bool = True) -> None:
        arguments = locals()
        loss.backward(retain_graph=retain)
        held["steps"].append({"helper": (sorted(arguments), arguments["loss"].detach())})

    def train(number: int) -> Tensor:
        variables = locals()
        variables["number"] = f"step {number}"
        optimizer.zero_grad()
        loss_a, loss_b = (_loss_by(call, model) for _ in range(2))
        update(loss_a)
        backward(loss_b)
        optimizer.step()
        switch(model, number % 3 != 0)
        kept = {name: value for name, value in variables.items() if isinstance(value, str)}
        held["steps"].append({"step": kept, "names": sorted(variables)})
        return torch.stack([loss_a.detach(), loss_b.detach()])

    def step(number: int, name: str = "of the caller") -> Tensor:
        variables = locals()
        loss = train(number)
        held["steps"].append(
            {"caller": [(k, str(v)) for k, v in variables.items() if k != "train"]}
        )
        return loss

    return Program([model], [optimizer], step, plain_loss=False, held=held)


def _loss_by(call: Callable[..., Tensor], model: nn.Module) -> Tensor:
    labels = torch.randint(4, (_BATCH,))
    return F.cross_entropy(call(model, torch.randn(_BATCH, _WIDTH)), labels)


@TRAININGS
def accumulated() -> Program:
    """Three batches per step, then clipping; a learning rate schedule."""
    model = _net().train()
    optimizer = torch.optim.AdamW(model.parameters())
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for _ in range(3):
            loss = _loss(model) / 3
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rates.step()
        return torch.stack(losses).sum()

    return Program([model], [optimizer], step, plain_loss=False)


@TRAININGS
def autocast_bfloat16() -> Program:
    """Automatic mixed precision."""
    model = _net().train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Program([model], [optimizer], step)


@TRAININGS
def scaled() -> Program:
    """A gradient scaler that skips one step because of an infinite gradient."""
    model = _net().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Program([model], [optimizer], step, plain_loss=False)


@TRAININGS
def adversarial() -> Program:
    """Two nets, two optimizers, two losses."""
    maker, judge = _net(_WIDTH, _WIDTH).train(), _Teacher(_net(_WIDTH, 1)).train()
    makers, judges = (torch.optim.Adam(m.parameters(), betas=(0.5, 0.9)) for m in (maker, judge))

    def step(_: int) -> Tensor:
        fake = maker(torch.randn(_BATCH, _WIDTH))
        judges.zero_grad()
        loss_d = F.softplus(judge(fake.detach())).mean()
        loss_d = loss_d + F.softplus(-judge(torch.randn(_BATCH, _WIDTH))).mean()
        loss_d.backward()
        judges.step()
        makers.zero_grad()
        loss_g = F.softplus(-judge(fake)).mean()
        loss_g.backward()
        makers.step()
        return torch.stack([loss_d.detach(), loss_g.detach()])

    return Program([maker, judge], [makers, judges], step, plain_loss=False)


@TRAININGS
def gradient_penalty() -> Program:
    """A backward pass through a gradient."""
    model = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Softplus(), nn.Linear(16, 1))

    def loss(net: nn.Module) -> Tensor:
        with torch.enable_grad():
            x = torch.randn(_BATCH, _WIDTH, requires_grad=True)
            out = net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out.mean() + (slope.norm(dim=1) - 1).square().mean()

    return usual(model, loss)


@TRAININGS
def meta_learned() -> Program:
    """An inner training step within the loss."""
    model = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(net: nn.Module) -> Tensor:
        with torch.enable_grad():
            own = dict(net.named_parameters())
            inner = net(torch.randn(_BATCH, _WIDTH)).square().mean()
            slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
            moved = {n: p - 0.1 * g for (n, p), g in zip(own.items(), slopes, strict=True)}
            out = torch.func.functional_call(net, moved, (torch.randn(_BATCH, _WIDTH),))
            return out.square().mean()

    return usual(model, loss)


class _Teacher(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@TRAININGS
def distilled() -> Program:
    """A frozen teacher in evaluation mode."""
    model, teacher = _net(), _Teacher(_net()).eval().requires_grad_(False)

    def loss(net: nn.Module) -> Tensor:
        x = torch.randn(_BATCH, _WIDTH)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        return F.kl_div(net(x).log_softmax(-1), target, reduction="batchmean")

    program = usual(model, loss)
    return Program([model, teacher], program.optimizers, program.step)


@TRAININGS
def bootstrapped() -> Program:
    """A student that learns from two views; its teacher is its moving average."""
    model, head = _net(), nn.Linear(4, 4)
    teacher = copy.deepcopy(model).requires_grad_(False)
    both = nn.ModuleDict({"net": model, "head": head}).train()
    optimizer = torch.optim.AdamW(both.parameters())

    def step(_: int) -> Tensor:
        x = torch.randn(_BATCH, _WIDTH)
        one, two = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        optimizer.zero_grad()
        loss = 2 - 2 * F.cosine_similarity(head(model(one)), teacher(two)).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)
        return loss.detach()

    return Program([both, teacher], [optimizer], step)


@TRAININGS
def policy_gradient() -> Program:
    """Actions sampled from the net's output; values pass through Python."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(_: int) -> Tensor:
        state, chances, rewards = torch.randn(4), [], []
        for _ in range(8):
            actions = torch.distributions.Categorical(logits=model(state))
            action = actions.sample()
            chances.append(actions.log_prob(action))
            state = state.roll(1) * (0.9 if action.item() else 1.1)
            rewards.append(float(state.sum()))
        loss = -(torch.stack(chances) * torch.tensor(rewards)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Program([model], [optimizer], step)


@TRAININGS
def several_losses() -> Program:
    """Two losses for one net, with the graph retained for the second."""
    model = _net().train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(_: int) -> Tensor:
        optimizer.zero_grad()
        out = model(torch.randn(_BATCH, _WIDTH))
        near, small = F.cross_entropy(out, torch.randint(4, (_BATCH,))), out.square().mean()
        near.backward(retain_graph=True)
        small.backward()
        optimizer.step()
        return torch.stack([near.detach(), small.detach()])

    return Program([model], [optimizer], step, plain_loss=False)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@TRAININGS
def hooked() -> Program:
    """The program's own hooks, which change outputs, inputs and gradients."""
    model = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))
    model[0].register_forward_hook(lambda _m, _a, out: out * 1.1)
    model[1].register_forward_pre_hook(lambda _m, args: (args[0] + 0.1,))
    model[2].register_full_backward_hook(lambda _m, into, _out: (into[0] * 2,))
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    model[0].weight.register_post_accumulate_grad_hook(_halve)
    return usual(model, _loss)


@TRAININGS
def intervened() -> Program:
    """Interventions on a copy of a net with batch norm, dropout, and a hook of the program."""
    hidden = nn.Sequential(nn.Linear(_WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))
    model = nn.Sequential(hidden, nn.Dropout(0.2), nn.Linear(16, 4))
    model[0].register_forward_hook(lambda _m, _a, out: out * 1.1)
    on_hidden = {"of": "eyes", "select": "0.0"}
    program = usual(model, _loss)
    program.spec = {
        "probes": {"eyes": {"samples": {"count": 4}, "mode": "train", "schedule": {"every": 1}}},
        "interventions": {
            "zero": {**on_hidden, "do": "zero"},
            "swept": {**on_hidden, "do": {"patch": "other"}, "sweep": "feature"},
            "guess": {**on_hidden, "do": "mean", "sweep": "feature", "estimate": "gradient"},
            "weights": {**on_hidden, "role": "parameter", "do": {"noise": 0.5}},
        },
    }
    return program


@TRAININGS
def replayable() -> Program:
    """Checkpoints with what it takes to replay their steps and the next ones."""
    hidden = nn.Sequential(nn.Linear(_WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))
    program = usual(nn.Sequential(hidden, nn.Dropout(0.2), nn.Linear(16, 4)), _loss)
    program.spec = {"checkpoints": {"every": 2, "replay": {"steps": 2}}}
    return program


@TRAININGS
def optimizer_in_backward() -> Program:
    """One optimizer for each parameter, which steps within backward."""
    model = nn.Sequential(nn.Linear(_WIDTH, 16), nn.Tanh(), nn.Linear(16, 4)).train()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(_: int) -> Tensor:
        loss = _loss(model)
        loss.backward()
        return loss.detach()

    return Program([model], list(optimizers.values()), step)


@TRAININGS
def smaller_last_batch() -> Program:
    """Every third batch is smaller; the last has one element."""
    model, sizes = (
        nn.Sequential(nn.Linear(_WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, 4)),
        [6, 6, 1],
    )
    drawn = iter(sizes * 100)

    def loss(net: nn.Module) -> Tensor:
        size = next(drawn)
        return F.cross_entropy(net(torch.randn(size, _WIDTH)), torch.randint(4, (size,)))

    return usual(model, loss, evaluate=False)


@TRAININGS
def quantization_aware() -> Program:
    """Fake quantization: observers that change buffers in the forward pass."""
    from torch.ao.quantization import FakeQuantize

    model = nn.Sequential(nn.Linear(_WIDTH, 16), FakeQuantize(), nn.ReLU(), nn.Linear(16, 4))
    return usual(model, _loss)


@TRAININGS
def averaged() -> Program:
    """Stochastic weight averaging, with the averaged model called in evaluations."""
    model = _net().train()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        mean.update_parameters(model)
        if number % 5 == 4:
            mean.eval()
            with torch.no_grad():
                mean(torch.randn(_BATCH, _WIDTH))
        return loss.detach()

    return Program([model, mean], [optimizer], step)


def _compiled(backend: str) -> Program:
    torch._dynamo.reset()  # discards graphs compiled before this training
    net = _net()
    net[3] = nn.Identity()  # inductor draws different dropout masks than eager code
    program = usual(torch.compile(net, backend=backend), _loss, evaluate=False)
    return replace(program, rounds_differently=True, unseen=frozenset([""]))


TRAININGS["compiled"] = lambda: _compiled("inductor")
TRAININGS["compiled-aot-eager"] = lambda: _compiled("aot_eager")
