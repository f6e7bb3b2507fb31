"""Contact sheets of the viewer: every section for five networks, in both themes and three sizes.

    python -m docs.sheets              # all; needs timm and transformers
    python -m docs.sheets unet gpt2    # some networks

Each sheet, `docs/images/sheets/NETWORK-THEME.webp`, has a row per section and a column per window
width. They show at a glance whether a change to the viewer cuts anything off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from playwright.sync_api import Page
from torch import Tensor, nn

import comgra_decl as comgra
from benchmarks.neutrality.zoo.kernels import declare_missing
from docs.pictures import IMAGES, PATIENCE, browser_page, record, viewer

SIZES = ((800, 900), (1280, 800), (1920, 1080))
THEMES = ("light", "dark")
SECTIONS = (
    "overview", "inspect", "values", "data", "attention", "pictures", "compare", "runs", "explore",
    "kpis", "modules", "findings", "notes", "run",
)  # fmt: skip
SCALE = 0.5
GAP, LABEL = 8, 16  # pixels
QUALITY = 60  # of the files, at which names and numbers can still be read
STEPS = 12

NODES = {  # what is selected
    "tutorial": "out",
    "characters": "blocks.1.attention.weights",
    "resnet18": "layer2.0.conv1",
    "gpt2": "transformer.h.1.attn",
    "unet": "down.1",
}


class Convolutions(nn.Sequential):
    """Two convolutions that keep height and width."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """A U-Net with two levels for masks of blobs."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(1, 8), Convolutions(8, 16)])
        self.middle = Convolutions(16, 32)
        self.up = nn.ModuleList([Convolutions(48, 16), Convolutions(24, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the masks [B, 1, H, W] of images of the same shape."""
        x, skipped = images, []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skipped), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        masks: Tensor = self.head(x)
        return masks


def blobs(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images [count, 1, 32, 32] of a disc each, and its masks of the same shape."""
    grid = torch.stack(torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij"))
    centres = 8 + 16 * torch.rand(count, 2, 1, 1)
    masks = ((grid - centres).square().sum(1, keepdim=True) < 36).float()
    return masks + 0.3 * torch.randn_like(masks), masks


def train_unet() -> None:
    """Train a U-Net for a few steps."""
    model = UNet()
    _train(model, lambda: F.binary_cross_entropy_with_logits(*_paired(model, *blobs(8))))


def _paired(model: nn.Module, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    return model(images), masks


def train_resnet18() -> None:
    """Train timm's resnet18 for a few steps on coloured noise."""
    import timm

    model: nn.Module = timm.create_model("resnet18", num_classes=4)

    def loss() -> Tensor:
        labels = torch.randint(0, 4, (8,))
        images = torch.randn(8, 3, 64, 64) + labels[:, None, None, None] / 2
        return F.cross_entropy(model(images), labels)

    _train(model, loss)


def train_gpt2() -> None:
    """Train a GPT-2 with six layers for a few steps on counting."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=6, n_head=4, n_embd=64, vocab_size=64, n_positions=32)
    model = GPT2LMHeadModel(config)

    def loss() -> Tensor:
        tokens = (torch.randint(0, 64, (8, 1)) + torch.arange(24)) % 64
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    _train(model, loss)


def _train(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    comgra.note("the end of a short training")


EXAMPLES = {
    "tutorial": "tutorial/with-bug",
    "characters": "characters/gpt",
}
SPECS = {"gpt2": ("attention", "samples.count=8")}
"""Presets other than `debug`, and overrides."""

TRAINED = {"resnet18": train_resnet18, "gpt2": train_gpt2, "unet": train_unet}


def make_run(network: str, runs: Path) -> str:
    """Record a run of a network, unless it exists; return its name below `runs`."""
    if network in EXAMPLES:
        record(EXAMPLES[network], runs)
        return EXAMPLES[network]
    name = f"sheets/{network}"
    if not (runs / name).exists():
        torch.manual_seed(0)
        preset, *overrides = SPECS.get(network, ("debug",))
        with comgra.trace(preset, root=runs, group="sheets", name=network, overrides=overrides):
            TRAINED[network]()
    return name


Pictures = dict[str, dict[str, list[Image.Image]]]
"""Pictures by theme and section, one for each size."""


def photograph(page: Page, address: str, run: str, network: str) -> Pictures:
    """Return pictures of all sections that the run has."""
    pictures: Pictures = {theme: {} for theme in THEMES}
    query = urlencode({"run": run, "node": NODES[network], "section": SECTIONS[0]})
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        page.goto(f"{address}?{query}", timeout=PATIENCE)
        page.locator('[role="tab"]').first.wait_for(timeout=PATIENCE)
        page.wait_for_function("() => Bokeh.documents[0].is_idle")
        for section in SECTIONS:
            tab = f'[role="tab"][data-send="{section}"]'
            if not page.locator(tab).count():  # a run without attention
                continue
            page.locator(tab).click(timeout=PATIENCE)
            page.locator(f'{tab}[aria-selected="true"]').wait_for(timeout=PATIENCE)
            page.wait_for_function("() => Bokeh.documents[0].is_idle")
            page.wait_for_timeout(700)  # until the charts are painted
            for theme, rows in pictures.items():
                page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
                page.wait_for_timeout(250)
                picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
                size = int(width * SCALE), int(height * SCALE)
                rows.setdefault(section, []).append(picture.resize(size, Image.Resampling.LANCZOS))
    return pictures


def sheet_of(rows: dict[str, list[Image.Image]]) -> Image.Image:
    """Return a sheet of the pictures of one theme."""
    widths = [picture.width for picture in next(iter(rows.values()))]
    heights = [max(picture.height for picture in row) for row in rows.values()]
    size = sum(widths) + GAP * (len(widths) + 1), sum(h + GAP + LABEL for h in heights) + GAP
    sheet = Image.new("RGB", size, "#808080")
    draw, y = ImageDraw.Draw(sheet), GAP
    for (section, row), height in zip(rows.items(), heights, strict=True):
        draw.text((GAP, y), section, fill="white")
        x = GAP
        for picture in row:
            sheet.paste(picture, (x, y + LABEL))
            x += picture.width + GAP
        y += height + GAP + LABEL
    return sheet


def main() -> None:
    """Make the sheets of the networks named on the command line."""
    parser = argparse.ArgumentParser(description="Make contact sheets of the viewer.")
    parser.add_argument("networks", nargs="*", choices=[*NODES, []], help="all by default")
    parser.add_argument("--runs", type=Path, help="store the runs here, and reuse existing ones")
    options = parser.parse_args()
    declare_missing()  # timm and transformers import torchvision
    folder_of_sheets = IMAGES / "sheets"
    folder_of_sheets.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = (options.runs or Path(folder)).resolve()
        names = {network: make_run(network, runs) for network in options.networks or NODES}
        with viewer(runs) as address, browser_page() as page:
            for network, run in names.items():
                for theme, rows in photograph(page, address, run, network).items():
                    file = folder_of_sheets / f"{network}-{theme}.webp"
                    sheet_of(rows).save(file, quality=QUALITY, method=6)
                    sys.stdout.write(f"{file.name}\n")


if __name__ == "__main__":
    main()
