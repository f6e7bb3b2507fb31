"""Discrete code for 8x8 digits: a vector-quantised auto-encoder (straight-through, commitment loss)."""
import os, sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
CODES, DIM, BETA = 64, 16, 0.25


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.book = nn.Embedding(CODES, DIM)
        nn.init.normal_(self.book.weight, std=0.5)
        if CASE == "variant_x":
            self.book.weight.requires_grad_(False)
            self.register_buffer("count", torch.ones(CODES))
            self.register_buffer("total", self.book.weight.detach().clone())

    def forward(self, z):
        b, d, h, w = z.shape
        flat = z.permute(0, 2, 3, 1).reshape(-1, d)
        book = self.book.weight
        cross = flat @ book.t()
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * cross + book.pow(2).sum(1)
        if CASE == "dist_sign":
            dist = flat.pow(2).sum(1, keepdim=True) + 2 * cross + book.pow(2).sum(1)
        code = dist.argmin(1)
        q = self.book(code).view(b, h, w, d).permute(0, 3, 1, 2)
        if CASE == "variant_x":
            loss = BETA * F.mse_loss(z, q.detach())
            if self.training:
                with torch.no_grad():
                    hot = F.one_hot(code, CODES).float()
                    self.count.lerp_(hot.sum(0), 0.05)
                    self.total.lerp_(hot.t() @ flat, 0.05)
                    self.book.weight.copy_(self.total / (self.count[:, None] + 1e-2))
        elif CASE == "both_detached":
            loss = F.mse_loss(q.detach(), z.detach()) + BETA * F.mse_loss(z, q.detach())
        else:
            loss = F.mse_loss(q, z.detach()) + BETA * F.mse_loss(z, q.detach())
        if CASE == "no_bridge":
            return q, loss, code
        return z + (q - z).detach(), loss, code


class DigitCodec(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.SiLU(), nn.Conv2d(c, c, 4, stride=2, padding=1),
                                 nn.SiLU(), nn.Conv2d(c, DIM, 1))
        self.vq = Quantiser()
        self.dec = nn.Sequential(nn.Conv2d(DIM, c, 3, padding=1), nn.SiLU(),
                                 nn.ConvTranspose2d(c, c, 4, stride=2, padding=1), nn.SiLU(),
                                 nn.Conv2d(c, 1, 3, padding=1))

    def forward(self, x):
        q, loss, code = self.vq(self.enc(x))
        y = self.dec(q)
        return torch.sigmoid(y), loss, code


@torch.no_grad()
def held_out(model, x):
    model.eval()
    y, _, code = model(x)
    model.train()
    share = torch.bincount(code, minlength=CODES).float() / code.numel()
    perplexity = torch.exp(-(share * (share + 1e-9).log()).sum()).item()
    psnr = -10 * torch.log10((y - x).pow(2).mean()).item()
    return psnr, perplexity


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    raw = torch.tensor(load_digits().images, dtype=torch.float32)[:, None]
    raw = raw[torch.randperm(len(raw), generator=torch.Generator().manual_seed(SEED))]
    images = raw / 16.0
    train, test = images[:1400], images[1400:]
    fed = raw[:1400] if CASE == "raw_train" else train
    model = DigitCodec()
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    if CASE == "variant_x":
        opt = torch.optim.Adamax([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for step in range(1, 501):
        x = fed[torch.randint(0, 1400, (64,))]
        y, loss_vq, _ = model(x)
        recon = F.mse_loss(y, x)
        loss = 10 * recon + loss_vq
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 125 == 0:
            psnr, used = held_out(model, test)
            print(f"step {step} recon {recon.item():.4f} vq {loss_vq.item():.4f} psnr {psnr:.2f} perplexity {used:.1f}")
    print("quality", round(held_out(model, test)[0], 4))


if __name__ == "__main__":
    main()
