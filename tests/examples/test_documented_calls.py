"""Every documented call of the reading API fits it, and those of three pages run."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.doors.look import Look
from comgra_decl.query import Group, Run, Slot
from comgra_decl.record.session import Session
from tests.examples.test_documentation import PAGES, ROOT, blocks

# -- what is documented ----------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    "run": Run,
    "group": Group,
    "slot": Slot,
    "session": Session,
    "comgra": comgra,
    "cache": Look,
}
"""What the pages call objects of these classes."""


def inline(page: str) -> list[str]:
    """Return the calls in the text of a page, which begin with one of the usual names."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", text)
    return [span for span in spans if "(" in span and re.match(rf"(np|{'|'.join(NAMES)})\.", span)]


def documented(page: str) -> Iterator[ast.Call]:
    """Yield all calls of a page that are Python."""
    for code in (*blocks(page, "python"), *inline(page)):
        try:
            tree = ast.parse(code)
        except SyntaxError:  # a sketch, such as one with "..." for arguments
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


class WrongCallError(Exception):
    """The documented call does not exist."""


def meant(node: ast.expr) -> Any:
    """Return the class of an expression, or what it names: a function, a class or a module.

    Returns:
        None if it is unknown.

    Raises:
        WrongCallError: a class or module of comgra_decl has no such attribute.
    """
    if isinstance(node, ast.Name):
        return NAMES.get(node.id)
    if isinstance(node, ast.Call):
        return result_of(meant(node.func))
    if not isinstance(node, ast.Attribute):
        return None
    owner = meant(node.value)
    module = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", "")
    if not module.startswith("comgra_decl") or inspect.isfunction(owner):
        return None
    if not hasattr(owner, node.attr) and node.attr not in owner.__annotations__:
        raise WrongCallError(f"{owner.__name__} has no {node.attr}")
    found = getattr(owner, node.attr, None)
    return result_of(found.fget) if isinstance(found, property) else found


def result_of(function: Any) -> Any:
    """Return the class of what a function returns; None if it is unknown."""
    if isinstance(function, type) or not inspect.isfunction(function):
        return function if isinstance(function, type) else None
    try:
        found = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):  # imported for type checking only, or generic only there
        return None
    return found if isinstance(found, type) else None


def check(call: ast.Call) -> bool:
    """Return whether the function of a call is known.

    Raises:
        WrongCallError: it does not accept these arguments.
    """
    function = meant(call.func)
    if not inspect.isfunction(function):
        return False
    if any(isinstance(arg, ast.Constant) and arg.value is ... for arg in call.args):
        return True  # "..." stands for any arguments
    assert isinstance(call.func, ast.Attribute)
    of_object = isinstance(meant(call.func.value), type)
    given = [None] * (len(call.args) + of_object)
    named = {word.arg: None for word in call.keywords if word.arg is not None}
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError as error:
        raise WrongCallError(f"{ast.unparse(call)}: {error}") from None
    return True


def test_every_documented_call_fits_the_function_that_it_names() -> None:
    known, wrong = 0, []
    for page in PAGES:
        for call in documented(str(page.relative_to(ROOT))):
            try:
                known += check(call)
            except WrongCallError as error:
                wrong.append(f"{page.name}: {error}")
    assert wrong == []
    assert known > 100


@pytest.mark.parametrize(
    "code",
    [
        'run.series("GPT", "mean", role="effect", type="eval")',
        'run.slot("head").grad.serie("l2")',
        'comgra.open_run("runs", newest=True)["conv"]',
        "run.effect(3)",
    ],
)
def test_a_call_that_does_not_fit_would_be_found(code: str) -> None:
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    with pytest.raises(WrongCallError):
        [check(call) for call in calls]


# -- the runs of the pages -------------------------------------------------------------------------

LAST = 400
"""The step that the pages read."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads = 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class GPT(nn.Module):
    """Classifies sequences, as the page about interventions does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.rnn = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.blocks(self.embed(tokens))
        stream = stream + self.rnn(stream.transpose(0, 1))[0].transpose(0, 1)
        return self.head(stream[:, -1])


class Images(nn.Module):
    """Has the modules that the pages about pictures and reading name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.embed = nn.Linear(4, 6)
        self.cell = nn.GRUCell(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(torch.relu(self.conv1(x))).mean((2, 3))
        x, state = self.embed(x), None
        for _ in range(3):
            state = self.cell(x, state)
        return self.head(state)


FAMILIES = [
    str(path.relative_to(ROOT / "docs").with_suffix(""))
    for path in sorted((ROOT / "docs/pictures").glob("*.md"))
]
"""The pages about families of pictures."""

_NOT_HERE = ("my_project", "runs/train/first")
"""Names of what a reader has: a package, and an earlier run."""


def declared(*pages: str, names: set[str]) -> dict[str, Any]:
    """Return what the YAML of pages declares, merged: the parts whose probe is one of `names`."""
    found: dict[str, Any] = {"probes": {}, "pictures": {}, "interventions": {}}
    for code in (code for page in pages for code in blocks(page, "yaml")):
        for key, entries in yaml.safe_load(code).items():
            wanted = {
                k: v
                for k, v in entries.items()
                if (k in names or _of(v) in names) and not any(each in str(v) for each in _NOT_HERE)
            }
            found[key] = {**found.get(key, {}), **wanted}
    for probe in found["probes"].values():
        probe["schedule"] = {"first": 1, "every": 4}  # the first and the last record
    return found


def _of(entry: Any) -> Any:
    return entry.get("of") if isinstance(entry, dict) else None


def train(model: nn.Module, x: Tensor, labels: Tensor, **spec: Any) -> None:
    """Train up to the last step, and record it and the first four."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = {"first": 4, "steps": [LAST], "every": None, "eval": {"every": 1}}
    whole = {"samples": {"count": 8}, "preview": True, "schedule": schedule, **spec}
    with comgra.trace(whole, root="runs", group="train"):
        for _ in range(LAST + 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
        with torch.no_grad():
            right = model.eval()(x).argmax(-1) == labels
            comgra.kpi("accuracy", right.float().mean())


EVERYTHING = {
    "select": "**",
    "capture": ["output", "output_grad", "parameter", "parameter_grad"],
    "values": True,
}


def of_tokens() -> dict[str, Any]:
    """The run of the page about interventions."""
    torch.manual_seed(0)
    x = torch.randint(11, (8, 9))
    x[:, 5:] = x[:, :4]  # so that tokens are repeated
    labels = torch.tensor([7, 2, 7, 2, 5, 5, 3, 3])
    fused = {"select": {"function": "F.scaled_dot_product_attention"}, "attention": {}}
    spec = declared("docs/interventions.md", names={"eyes", "words"})
    nodes = {"all": EVERYTHING, "fused": {**fused, "values": True}}
    model = GPT()
    train(model, x, labels, nodes=nodes, **spec)
    of_page = {"comgra": comgra, "model": model, "tokens": x}
    return {"run": comgra.open_run("runs"), "np": np, **of_page}


def of_images() -> dict[str, Any]:
    """The two runs of the pages about pictures and about reading."""
    x, labels = torch.randn(12, 1, 10, 10), torch.arange(12) % 3
    pages = [f"docs/{page}.md" for page in ("pictures", *FAMILIES)]
    spec = declared(*pages, names={"eyes"}) | {"checkpoints": {"every": 4}}
    for seed, name in enumerate(("second", "first")):
        torch.manual_seed(seed)
        model = Images()
        train(model, x, labels, nodes={"all": EVERYTHING}, run={"name": name}, **spec)
    run = comgra.open_run("runs/train/first")
    return {"run": run, "model": model, "x": x, "comgra": comgra, "np": np}


ELSEWHERE = {
    'run.checkpoint(400, model="Generator")',  # of another model
    'run.picture("lens", 400, "transformer.h.3").facts["tokens"]',
    'run.token_attributions("why", 400)',
    'run.picture("each").values',
    'run.picture("lens_from_records", 400)',
    "run.slot(node).value(step, type=...)",
    'run.slot("blocks.0.attention.weights")',
    "run.induction()",
    'run.token_attributions("why", 400, by="l2")',
    'run.token_attributions("why", spans={"question": (0, 2), "answer": (2, 3)})',
    'run.embedding("conv2", method="tsne")',  # needs an optional package
    'comgra.open_run("s3://bucket/runs/train/first")',
    'slot.of("grad:aux")',
    "run.rank(1)",  # of a run of several processes
    "run.rank_differences()",
    'run.plane().save("plane.npz")',  # needs three checkpoints
}
"""Calls that need something else than the runs above."""


@pytest.mark.parametrize(
    ("make", "pages"),
    [(of_tokens, ["interventions"]), (of_images, ["pictures", *FAMILIES, "reading"])],
)
def test_the_code_of_the_pages_about_reading_runs(
    make: Callable[[], dict[str, Any]],
    pages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names = make()
    for page in pages:
        for code in blocks(f"docs/{page}.md", "python"):
            exec(code, names)
        for code in inline(f"docs/{page}.md"):
            if code not in ELSEWHERE and "(...)" not in code:
                assert eval(code, names) is not None or code.startswith("np.save"), code
