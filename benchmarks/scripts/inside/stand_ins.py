"""Stand-ins for downloads of scripts: small data in memory, and no network.

Each stand-in is installed once the script has imported the library. It is the same in every process
and draws from its own generator.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_TRAINED = int(os.environ.get("SCRIPTS_SAMPLES", "512"))
_LOCAL = ("127.", "::1", "localhost")


def close_network() -> None:
    """Restrict network connections of the process to the local machine."""
    connect = socket.socket.connect

    def checked(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(_LOCAL):
            raise OSError(f"no network for scripts under test: {address[0]}")
        connect(self, address)

    socket.socket.connect = checked  # type: ignore[method-assign,assignment]


def _pictures(count: int, shape: tuple[int, ...], classes: int) -> tuple[Any, Any]:
    """Return uint8 images with blobs whose position determines the class, and the classes."""
    drawn = np.random.default_rng(count)
    labels = drawn.integers(0, classes, count)
    pictures = drawn.integers(0, 60, (count, *shape))
    side = shape[0] // 4
    for number, label in enumerate(labels):
        row, column = divmod(int(label) % 9, 3)
        top, left = row * side, column * side
        pictures[number, top : top + side, left : left + side] += 180
    return pictures.astype(np.uint8), labels


# -- torchvision -----------------------------------------------------------------------------------


def _torchvision(_: ModuleType) -> None:
    from torchvision import datasets
    from torchvision.datasets import utils

    utils.download_url = utils.download_and_extract_archive = _refuse
    for name in ("MNIST", "FashionMNIST", "KMNIST", "QMNIST"):
        getattr(datasets, name).__init__ = _grey
    for name, classes in (("CIFAR10", 10), ("CIFAR100", 100)):
        getattr(datasets, name).__init__ = _coloured(classes)


def _refuse(*arguments: Any, **_: Any) -> None:
    raise OSError(f"no downloads for scripts under test: {arguments[:1]}")


def _grey(
    self: Any,
    root: Any = None,
    train: bool = True,
    transform: Any = None,
    target_transform: Any = None,
    **_: Any,
) -> None:
    import torch
    from torchvision.datasets import VisionDataset

    VisionDataset.__init__(self, root, transform=transform, target_transform=target_transform)
    pictures, labels = _pictures(_TRAINED if train else _TRAINED // 6, (28, 28), 10)
    self.train, self.data = train, torch.from_numpy(pictures)
    self.targets = torch.from_numpy(labels)


def _coloured(classes: int) -> Callable[..., None]:
    def made(
        self: Any,
        root: Any = None,
        train: bool = True,
        transform: Any = None,
        target_transform: Any = None,
        **_: Any,
    ) -> None:
        from torchvision.datasets import VisionDataset

        VisionDataset.__init__(self, root, transform=transform, target_transform=target_transform)
        pictures, labels = _pictures(_TRAINED if train else _TRAINED // 6, (32, 32, 3), classes)
        self.train, self.data, self.targets = train, pictures, labels.tolist()
        self.classes = [f"class {number}" for number in range(classes)]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    return made


def _operators(module: ModuleType) -> None:
    """Declare operators without which torchvision cannot be imported with a CPU-only torch."""
    import torch

    if module._has_ops():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[Any] = []


# -- others ----------------------------------------------------------------------------------------


def _planetoid(module: ModuleType) -> None:
    def process(self: Any) -> None:
        import torch
        from torch_geometric.data import Data

        drawn = np.random.default_rng(7)
        nodes, classes, features = 140, 7, 64
        labels = torch.from_numpy(drawn.integers(0, classes, nodes))
        x = torch.from_numpy(drawn.random((nodes, features), dtype=np.float32))
        x[torch.arange(nodes), labels] += 2
        edges = torch.from_numpy(drawn.integers(0, nodes, (2, 500)))
        edges = torch.cat([edges, edges.flip(0)], 1)
        part = torch.arange(nodes) % 4
        masks = {"train_mask": part < 2, "val_mask": part == 2, "test_mask": part == 3}
        data = Data(x=x, edge_index=edges, y=labels, **masks)
        data = data if self.pre_transform is None else self.pre_transform(data)
        self.save([data], self.processed_paths[0])

    module.Planetoid.download = lambda _: None
    module.Planetoid.process = process


def _keras(module: ModuleType) -> None:
    def load_data(*_: Any, **__: Any) -> Any:
        trained, tested = _pictures(_TRAINED, (28, 28), 10), _pictures(_TRAINED // 6, (28, 28), 10)
        return trained, tested

    vars(module)["load_data"] = load_data


def _openml(module: ModuleType) -> None:
    def fetch_openml(*_: Any, **__: Any) -> Any:
        pictures, labels = _pictures(_TRAINED, (28, 28), 10)
        return {"data": pictures.reshape(len(pictures), -1), "target": labels.astype(str)}

    vars(module)["fetch_openml"] = fetch_openml


def _trainer(module: ModuleType) -> None:
    """Make scripts that insist on a GPU train on the CPU."""
    original = module.Trainer.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") in ("gpu", "cuda"):
            kwargs["accelerator"] = "cpu"
        original(self, *args, **kwargs)

    module.Trainer.__init__ = made


def _seeding(module: ModuleType) -> None:
    """Seed generators that the script leaves unseeded, so that all starts are the same."""
    original, drawn = module.np_random, iter(range(1_000_000))

    def np_random(seed: int | None = None) -> Any:
        return original(next(drawn) if seed is None else seed)

    vars(module)["np_random"] = np_random


ALIASES = {"gym": "gymnasium"}
"""Current names of renamed packages."""

STAND_INS: dict[str, Callable[[ModuleType], None]] = {
    "torchvision.extension": _operators,
    "torchvision": _torchvision,
    "torch_geometric.datasets.planetoid": _planetoid,
    "keras.src.datasets.mnist": _keras,
    "sklearn.datasets": _openml,
    "lightning.pytorch.trainer.trainer": _trainer,
    "gymnasium.utils.seeding": _seeding,
}
"""Functions to call after the import of each module."""
