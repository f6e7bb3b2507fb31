"""Mistakes in PyTorch programs, each of which raises one of the errors in the catalogue."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Mistake = Callable[[], Any]


class Op(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Model(nn.Module):
    """A model with a faulty part in its body."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Identity()
        self.body = nn.Sequential(nn.Identity(), part)

    def forward(self, *args: Any) -> Any:
        return self.body[1](*[self.stem(arg) for arg in args])


def _in(part: nn.Module | Callable[..., Any], *args: Any) -> Mistake:
    """Return a program that calls a faulty part of a model."""
    module = part if isinstance(part, nn.Module) else Op(part)
    return lambda: Model(module)(*args)


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


LONG = torch.long

IN_A_MODULE: dict[str, Mistake] = {
    # shapes
    "matmul_shapes": _in(nn.Linear(6, 2), _ones(5, 8)),
    "broadcast_sizes": _in(lambda x, y: x + y, _ones(4, 3), _ones(4, 2)),
    "view_count": _in(lambda x: x.view(-1, 7), _ones(4, 3)),
    "view_stride": _in(lambda x: x.t().view(-1), _ones(4, 3)),
    "cat_sizes": _in(lambda x, y: torch.cat([x, y]), _ones(4, 3), _ones(4, 2)),
    "cat_dims": _in(lambda x, y: torch.cat([x, y]), _ones(4, 3), _ones(4, 3, 1)),
    "argument_is_none": _in(nn.Linear(6, 2), None),
    "stack_sizes": _in(lambda x, y: torch.stack([x, y]), _ones(4, 3), _ones(4, 2)),
    "conv_channels": _in(nn.Conv2d(3, 4, 3), _ones(2, 1, 8, 8)),
    "conv_dims": _in(nn.Conv2d(3, 4, 3), _ones(8, 8)),
    "kernel_too_large": _in(nn.Conv2d(3, 4, 5), _ones(2, 3, 2, 2)),
    "pool_too_small": _in(nn.MaxPool2d(4), _ones(2, 3, 2, 2)),
    "batch_norm_channels": _in(nn.BatchNorm1d(4), _ones(8, 5)),
    "batch_norm_dims": _in(nn.BatchNorm2d(4), _ones(8, 4)),
    "batch_norm_one_value": _in(nn.BatchNorm1d(4), _ones(1, 4)),
    "layer_norm_shape": _in(nn.LayerNorm(8), _ones(3, 4)),
    "group_norm_channels": _in(nn.GroupNorm(2, 4), _ones(3, 6)),
    "einsum_sizes": _in(lambda x, y: torch.einsum("bi,ij->bj", x, y), _ones(2, 3), _ones(4, 5)),
    "bmm_shapes": _in(lambda x, y: torch.bmm(x, y), _ones(2, 3, 4), _ones(2, 5, 6)),
    "rnn_input_size": _in(nn.LSTM(4, 8), _ones(5, 2, 3)),
    "rnn_hidden_size": _in(nn.GRU(4, 8), _ones(5, 2, 4), _ones(1, 3, 8)),
    "attention_width": _in(
        nn.MultiheadAttention(8, 2), _ones(3, 2, 6), _ones(3, 2, 6), _ones(3, 2, 6)
    ),
    "dim_out_of_range": _in(lambda x: x.mean(dim=2), _ones(4, 3)),
    "expand_size": _in(lambda x: x.expand(5, 3), _ones(4, 3)),
    "too_many_indices": _in(lambda x: x[:, :, 0], _ones(4, 3)),
    "loss_batch_sizes": _in(nn.CrossEntropyLoss(), _ones(4, 3), _ones(5, dtype=LONG)),
    "bce_sizes": _in(nn.BCEWithLogitsLoss(), _ones(4, 1), _ones(4)),
    "targets_not_classes": _in(nn.NLLLoss(), _ones(4, 3), _ones(4, 1, dtype=LONG)),
    # indices and ranges
    "embedding_index": _in(nn.Embedding(10, 4), torch.tensor([3, 10])),
    "embedding_bag_index": _in(nn.EmbeddingBag(10, 4), torch.tensor([[3, 10]])),
    "class_out_of_range": _in(nn.CrossEntropyLoss(), _ones(4, 3), torch.full((4,), 3)),
    "index_out_of_bounds": _in(lambda x: x[torch.tensor([5])], _ones(4, 3)),
    "gather_index": _in(lambda x: torch.gather(x, 1, torch.full((4, 1), 3)), _ones(4, 3)),
    "bce_not_probabilities": _in(nn.BCELoss(), 2 * _ones(4), _ones(4)),
    # dtypes
    "matmul_dtypes": _in(nn.Linear(4, 2), _ones(3, 4, dtype=torch.float64)),
    "conv_types": _in(nn.Conv2d(3, 4, 3), _ones(2, 3, 8, 8, dtype=torch.float64)),
    "expected_scalar_type": _in(nn.CrossEntropyLoss(), _ones(4, 3), _ones(4, dtype=torch.int32)),
    "embedding_dtype": _in(nn.Embedding(10, 4), _ones(3)),
    "mean_of_integers": _in(lambda x: x.mean(), _ones(4, dtype=LONG)),
    "integers_need_no_grad": _in(lambda x: x.requires_grad_(), _ones(4, dtype=LONG)),
    "in_place_dtype": _in(lambda x: x.add_(0.5), _ones(4, dtype=LONG)),
    "index_dtype": _in(lambda x: x[_ones(2)], _ones(4, 3)),
    "not_for_half": _in(lambda x: torch.linalg.inv(x), _ones(4, 4, dtype=torch.float16)),
    # devices
    "two_devices": _in(lambda x, y: x + y, _ones(4, 3), torch.ones(4, 3, device="meta")),
    "meta_has_no_data": _in(lambda x: x.to("cpu"), torch.ones(3, device="meta")),
    # values
    "ambiguous_bool": _in(lambda x: 1 if x > 0 else 0, _ones(4)),
    "not_one_element": _in(lambda x: x.item(), _ones(4)),
    "numpy_requires_grad": _in(lambda x: x.numpy(), _ones(4).requires_grad_()),
    # modules
    "no_attribute": _in(lambda x: nn.Linear(2, 2).wieght * x, _ones(2)),
    "no_forward": _in(nn.Module(), _ones(4)),
    "forward_arguments": _in(nn.Linear(2, 2), _ones(2), _ones(2)),
    "list_is_no_module": _in(nn.ModuleList([nn.Linear(2, 2)]), _ones(2)),
    # gradients
    "leaf_in_place": _in(lambda x: x.add_(1), _ones(4).requires_grad_()),
    # memory
    "host_memory": _in(lambda x: x.expand(1 << 48).clone(), _ones(1)),
}
"""By name of the lesson: a program whose part `body.1` raises the error."""


def _twice() -> None:
    loss = nn.Linear(4, 2)(_ones(3, 4)).square().sum()
    loss.backward()
    loss.backward()


def _overwritten() -> None:
    layer = nn.Linear(4, 4)
    hidden = torch.sigmoid(layer(_ones(3, 4)))
    out = hidden.square()
    hidden += 1
    out.sum().backward()


def _anomaly() -> None:
    with torch.autograd.set_detect_anomaly(True):
        (torch.zeros(2, requires_grad=True).sqrt() * 0).sum().backward()


def _inference() -> None:
    with torch.inference_mode():
        x = _ones(3, 4)
    nn.Linear(4, 2)(x)


def _non_leaf() -> None:
    torch.optim.SGD([_ones(3).requires_grad_() * 2], lr=0.1)


def _state_dict() -> None:
    nn.Linear(4, 2).load_state_dict(nn.Linear(5, 2).state_dict())


def _optimizer_state() -> None:
    saved = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1).state_dict()
    torch.optim.SGD([_ones(3).requires_grad_()], lr=0.1).load_state_dict(saved)


class _Early(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(2, 2)
        super().__init__()


def _unscaled_twice() -> None:
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer(_ones(3, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _no_gradients_to_scale() -> None:
    layer = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer(_ones(3, 4)).sum())
    scaler.step(torch.optim.SGD(layer.parameters(), lr=0.1))


class Samples(Dataset[Any]):
    """A data set of given samples; an exception among them is raised, a function is called."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample() if callable(sample) else sample


def _kill() -> None:
    """End the process as the kernel does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def _loaded(*samples: Any, workers: int = 0) -> Mistake:
    return lambda: next(iter(DataLoader(Samples(*samples), batch_size=8, num_workers=workers)))


OUTSIDE: dict[str, Mistake] = {
    # gradients
    "overwritten_before_backward": _overwritten,
    "backward_twice": _twice,
    "loss_without_grad": lambda: _ones(1).sum().backward(),
    "loss_not_scalar": lambda: (_ones(3).requires_grad_() * 2).backward(),
    "unused_in_grad": lambda: torch.autograd.grad(
        _ones(1).requires_grad_().sum(), _ones(1).requires_grad_()
    ),
    "anomaly": _anomaly,
    "inference_tensor": _inference,
    "copy_of_non_leaf": lambda: copy.deepcopy(_ones(3).requires_grad_() * 2),
    # optimizers and saved states
    "no_parameters": lambda: torch.optim.SGD([], lr=0.1),
    "optimizes_non_leaf": _non_leaf,
    "state_dict": _state_dict,
    "optimizer_state": _optimizer_state,
    "before_init": _Early,
    "unscaled_twice": _unscaled_twice,
    "nothing_to_unscale": _no_gradients_to_scale,
    # devices
    "unknown_device": lambda: _ones(3).to("gpu"),
    "missing_device": lambda: _ones(3).to("mps"),
    # data
    "collate_sizes": _loaded(_ones(3), _ones(4)),
    "collate_lists": _loaded([1, 2], [1, 2, 3]),
    "collate_type": _loaded(object(), object()),
    "array_of_objects": lambda: torch.tensor(np.array([None, "a"], dtype=object)),
    "in_worker": _loaded(_ones(3), ValueError("no such picture"), workers=1),
    "worker_killed": _loaded(_kill, workers=1),
    "empty_sampler": lambda: DataLoader(Samples(), shuffle=True),
    "bce_target_sizes": lambda: F.binary_cross_entropy(_ones(4, 1), _ones(4)),
}
"""By name of the lesson: a program that raises the error outside any model call."""
