"""The synthetic transformer of the fake runs: its modules, slots, graphs and documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from comgra_decl.records import SlotInfo, SlotKey, Structure

BATCH, TOKENS, DIM, VOCABULARY = 16, 6, 8, 20
CELL_CALLS = 3  # iterations of the recurrent cell

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Module:
    """One module of the synthetic model."""

    path: str
    cls: str
    shape: tuple[int, ...]  # of its output, batch first
    parameters: Shapes


def modules_of(layers: int) -> list[Module]:
    wide, sequence = 4 * DIM, (BATCH, TOKENS)
    modules = [
        Module("Transformer", "Transformer", (*sequence, VOCABULARY), {}),
        Module("embed", "Embedding", (*sequence, DIM), {"weight": (VOCABULARY, DIM)}),
        Module("cell", "GRUCell", (BATCH, DIM), {"weight_ih": (3 * DIM, DIM)}),
    ]
    for layer in range(layers):
        at = f"blocks.{layer}"
        norm: Shapes = {"weight": (DIM,), "bias": (DIM,)}
        square: Shapes = {"weight": (DIM, DIM), "bias": (DIM,)}
        modules += [
            Module(at, "Block", (*sequence, DIM), {}),
            Module(f"{at}.norm1", "LayerNorm", (*sequence, DIM), norm),
            Module(f"{at}.attn", "Attention", (*sequence, DIM), {}),
            *(
                Module(f"{at}.attn.{name}", "Linear", (*sequence, DIM), square)
                for name in ("query", "key", "value", "out")
            ),
            Module(f"{at}.norm2", "LayerNorm", (*sequence, DIM), norm),
            Module(f"{at}.mlp", "Sequential", (*sequence, DIM), {}),
            Module(f"{at}.mlp.fc1", "Linear", (*sequence, wide), {"weight": (wide, DIM)}),
            Module(f"{at}.mlp.act", "ReLU", (*sequence, wide), {}),
            Module(f"{at}.mlp.fc2", "Linear", (*sequence, DIM), {"weight": (DIM, wide)}),
        ]
    modules += [
        Module("norm", "LayerNorm", (*sequence, DIM), {"weight": (DIM,), "bias": (DIM,)}),
        Module("head", "Linear", (*sequence, VOCABULARY), {"weight": (VOCABULARY, DIM)}),
        Module("aux", "Linear", (BATCH, 2), {"weight": (2, DIM)}),
    ]
    return modules


def slots_of(modules: list[Module]) -> list[SlotInfo]:
    slots: list[SlotInfo] = []

    def add(key: SlotKey, kind: str, shape: tuple[int, ...], cls: str = "") -> None:
        batch_dim = 0 if kind in ("input", "computed") else None
        slots.append(SlotInfo(len(slots), key, kind, "float32", shape, batch_dim, cls))

    add(SlotKey("input", "input", 0, "forward"), "input", (BATCH, TOKENS))
    for module in modules:
        for call in range(CELL_CALLS if module.cls == "GRUCell" else 1):
            for pass_ in ("forward", "grad"):
                key = SlotKey(module.path, "output", call, pass_)
                add(key, "computed", module.shape, module.cls)
        for name, shape in module.parameters.items():
            for pass_ in ("forward", "grad"):
                add(SlotKey(module.path, name, 0, pass_), "parameter", shape, module.cls)
    loss = SlotKey("loss", "output", 0, "forward")
    aux = [
        slot for slot in slots if slot.key.node == "aux"
    ]  # `aux` appears last and needs the last ids
    rest = [slot for slot in slots if slot.key.node != "aux"]
    ordered = [*rest, SlotInfo(0, loss, "loss", "float32", (), None, ""), *aux]
    return [_numbered(slot, number) for number, slot in enumerate(ordered)]


def _numbered(slot: SlotInfo, number: int) -> SlotInfo:
    return SlotInfo(
        number,
        slot.key,
        slot.kind,
        slot.dtype,
        slot.shape,
        slot.batch_dim,
        slot.module_class,
        (f"{slot.key.node}.{slot.key.role}",) if slot.kind == "parameter" else (),
    )


def structures_of(modules: list[Module], slots: list[SlotInfo]) -> list[Structure]:
    """Return two graphs: without `aux` for the first steps, and with it for later ones."""
    return [_structure(modules, slots, aux=False), _structure(modules, slots, aux=True)]


def _structure(modules: list[Module], slots: list[SlotInfo], *, aux: bool) -> Structure:
    forward = [s for s in slots if s.key.pass_ == "forward" and (aux or s.key.node != "aux")]
    keys = [slot.key for slot in forward]
    rank = {key: number for number, key in enumerate(keys)}
    edges: set[tuple[int, int, bool]] = set()
    for source, sink in _wires(modules, aux=aux):
        if source in rank and sink in rank:
            edges.add((rank[source], rank[sink], source.node != "input"))
    for slot in forward:
        if slot.kind == "parameter":
            owner = SlotKey(slot.key.node, "output", 0, "forward")
            edges.add((rank[slot.key], rank[owner], True))
    digest = "a1b2c3d4e5f60718" if aux else "0f1e2d3c4b5a6978"
    return Structure(digest, keys, [slot.kind for slot in forward], sorted(edges))


def _wires(modules: list[Module], *, aux: bool) -> list[tuple[SlotKey, SlotKey]]:
    """Connect the present leaf modules in a chain; containers show their last child's tensor."""

    def output(path: str, call: int = 0) -> SlotKey:
        return SlotKey(path, "output", call, "forward")

    paths = {module.path for module in modules}
    leaves = [m.path for m in modules if not any(p.startswith(m.path + ".") for p in paths)]
    leaves = [path for path in leaves if path not in ("Transformer", "aux")]
    wires: list[tuple[SlotKey, SlotKey]] = []
    previous = SlotKey("input", "input", 0, "forward")
    for path in leaves:
        if path.endswith((".key", ".value")):  # parallel to .query
            source = path.rsplit(".attn", 1)[0] + ".norm1"
            wires += [(output(source), output(path)), (output(path), output(_sibling_out(path)))]
            continue
        wires.append((previous, output(path)))
        previous = output(path)
        if path == "cell":
            for call in range(1, CELL_CALLS):
                wires.append((previous, output("cell", call)))
                previous = output("cell", call)
    wires.append((previous, SlotKey("loss", "output", 0, "forward")))
    if aux:
        wires += [(output("norm"), output("aux")), (output("aux"), output("loss"))]
    return wires


def _sibling_out(path: str) -> str:
    return path.rsplit(".", 1)[0] + ".out"


def module_documents(modules: list[Module]) -> list[dict[str, Any]]:
    return [
        {
            "path": "" if module.path == "Transformer" else module.path,
            "node": module.path,
            "class": module.cls,
            "parameters": {
                name: {
                    "shape": list(shape),
                    "count": int(np.prod(shape)),
                    "trainable": True,
                    "tied_to": None,
                }
                for name, shape in module.parameters.items()
            },
        }
        for module in modules
    ]


def report_of(slots: list[SlotInfo]) -> dict[str, Any]:
    modules = {slot.key.node for slot in slots} - {"input", "loss"}
    entry = {"matched": len(modules), "fired": len(modules), "written": len(slots) - 2}
    return {
        "entries": {"all": {**entry, "never_called": []}},
        "unmatched": [],
        "never_called": [],
        "refused": {},
        "warnings": [],
    }


def spec_of(samples: int, bins: int) -> dict[str, Any]:
    capture = ["output", "output_grad", "parameter", "parameter_grad"]
    return {
        "nodes": {"all": {"select": "**", "capture": capture, "values": True}},
        "histogram": {"bins": bins, "elements": 4096},
        "samples": {"count": samples},
    }


def facts_of() -> dict[str, Any]:
    return {
        "command": ["train.py", "+comgra=debug"],
        "versions": {"python": "3.11.7", "torch": "2.13.0", "comgra-decl": "0.1.0"},
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "host": {"name": "example", "cpus": 2, "system": "Linux"},
    }
