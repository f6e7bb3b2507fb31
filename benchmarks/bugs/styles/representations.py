"""Models that learn representations without labels, or from pairs."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.bugs.styles.common import Reached, accuracy, adam, blobs, mlp, update


def _views(count: int) -> tuple[Tensor, Tensor, Tensor]:
    x, labels = blobs(count)
    return (
        x + 0.5 * torch.randn_like(x),
        x * (0.8 + 0.4 * torch.rand(count, 1)) + 0.3 * torch.randn_like(x),
        labels,
    )


def _encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))


def _neighbours(encoder: nn.Module) -> float:
    """Return the accuracy of the nearest neighbour among 256 labelled points."""
    encoder.eval()
    with torch.no_grad():
        (x, y), (x2, y2) = blobs(256), blobs(256)
        a, b = F.normalize(encoder(x), dim=1), F.normalize(encoder(x2), dim=1)
    encoder.train()
    return float((y[(b @ a.T).argmax(1)] == y2).float().mean())


def simclr() -> Reached:
    """NT-Xent over the two views of all samples, with a projection head."""
    encoder, head = _encoder(), mlp(32, 32, 16)
    optimizer = adam([*encoder.parameters(), *head.parameters()], 2e-3)
    for _ in range(150):
        a, b, _ = _views(64)
        z = F.normalize(head(encoder(torch.cat([a, b]))), dim=1)
        alike = z @ z.T / 0.2
        alike.fill_diagonal_(-1e9)
        partner = torch.arange(128).roll(64)
        update(optimizer, F.cross_entropy(alike, partner))
    return Reached(_neighbours(encoder), 0.8)


def simsiam() -> Reached:
    """A predictor, and no gradient through the other branch."""
    encoder = nn.Sequential(_encoder(), nn.BatchNorm1d(32, affine=False))
    predictor = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 32))
    parameters = [*encoder.parameters(), *predictor.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        a, b, _ = _views(64)
        za, zb = encoder(a), encoder(b)
        pa, pb = predictor(za), predictor(zb)
        loss = -0.5 * (
            F.cosine_similarity(pa, zb.detach()).mean()
            + F.cosine_similarity(pb, za.detach()).mean()
        )
        update(optimizer, loss)
        schedule.step()
    return Reached(_neighbours(encoder), 0.8)


def byol() -> Reached:
    """Predicts the output of a slowly updated copy."""
    online, predictor = _encoder(), mlp(32, 64, 32)
    slow = deepcopy(online)
    for parameter in slow.parameters():
        parameter.requires_grad = False
    optimizer = adam([*online.parameters(), *predictor.parameters()], 1e-3)
    for step in range(200):
        a, b, _ = _views(64)
        with torch.no_grad():
            ta, tb = slow(a), slow(b)
        loss = (
            2
            - F.cosine_similarity(predictor(online(a)), tb).mean()
            - F.cosine_similarity(predictor(online(b)), ta).mean()
        )
        update(optimizer, loss)
        rate = 0.96 + 0.04 * step / 200
        with torch.no_grad():
            for p, q in zip(slow.parameters(), online.parameters(), strict=True):
                p.mul_(rate).add_((1 - rate) * q)
    return Reached(_neighbours(online), 0.8)


def vicreg() -> Reached:
    """Invariance, variance and covariance terms with weights 25, 25 and 1."""
    encoder, expander = _encoder(), mlp(32, 64, 64)
    optimizer = adam([*encoder.parameters(), *expander.parameters()], 1e-3)

    def spread(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z - z.mean(0)
        covariance = z.T @ z / (len(z) - 1)
        off = covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()
        return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean(), off / z.shape[1]

    for _ in range(150):
        a, b, _ = _views(64)
        za, zb = expander(encoder(a)), expander(encoder(b))
        (va, ca), (vb, cb) = spread(za), spread(zb)
        update(optimizer, 25 * F.mse_loss(za, zb) + 25 * (va + vb) + ca + cb)
    return Reached(_neighbours(encoder), 0.8)


def barlow_twins() -> Reached:
    """The correlation matrix between the two views should be the identity."""
    model = nn.Sequential(_encoder(), nn.Linear(32, 48))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(150):
        a, b, _ = _views(128)
        za, zb = model(a), model(b)
        za, zb = (za - za.mean(0)) / za.std(0), (zb - zb.mean(0)) / zb.std(0)
        c = za.T @ zb / 128
        on = (c.diagonal() - 1).pow(2).sum()
        off = c.pow(2).sum() - c.diagonal().pow(2).sum()
        update(optimizer, on + 5e-3 * off)
    return Reached(_neighbours(model), 0.8)


def moco() -> Reached:
    """A queue of past keys from a momentum encoder."""
    query = _encoder()
    key = deepcopy(query)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
    queue, at = F.normalize(torch.randn(512, 32), dim=1), 0
    for _ in range(200):
        a, b, _ = _views(32)
        q = F.normalize(query(a), dim=1)
        with torch.no_grad():
            for p, o in zip(key.parameters(), query.parameters(), strict=True):
                p.data = p.data * 0.98 + o.data * 0.02
            k = F.normalize(key(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.1
        update(optimizer, F.cross_entropy(logits, torch.zeros(32, dtype=torch.long)))
        queue[at : at + 32] = k
        at = (at + 32) % 512
    return Reached(_neighbours(query), 0.8)


def two_towers() -> Reached:
    """Pictures and words, a learned temperature, a symmetric loss (CLIP)."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = mlp(12, 64, 16), nn.EmbeddingBag(40, 16)
            self.log_scale = nn.Parameter(torch.tensor(2.6593))

        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            a, b = F.normalize(self.left(x), dim=1), F.normalize(self.right(words), dim=1)
            return self.log_scale.exp() * a @ b.T

    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    truth = torch.randn(40, 12)
    for _ in range(250):
        words = torch.randint(40, (32, 4))
        x = truth[words].mean(1) + 0.1 * torch.randn(32, 12)
        logits = model(x, words)
        own = torch.arange(32)
        update(optimizer, (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2)
        model.log_scale.data.clamp_(max=4.6052)
    return Reached(accuracy(logits, own), 0.6)


def triplets() -> Reached:
    """Anchor, positive and negative; most triplets are easy at the end."""
    encoder = mlp(12, 64, 16)
    optimizer = adam(encoder, 1e-3)
    for _ in range(200):
        x, y = blobs(96)
        z = F.normalize(encoder(x), dim=1)
        far = torch.cdist(z, z)
        same = y[:, None] == y[None]
        positive = far.masked_fill(~same, 0).argmax(1)
        negative = far.masked_fill(same, 9).argmin(1)
        update(optimizer, F.triplet_margin_loss(z, z[positive], z[negative], margin=0.3))
    return Reached(_neighbours(encoder), 0.8)


def arc_face() -> Reached:
    """Angular margin and a scale of 16 on normalized weights."""
    encoder, centers = mlp(12, 64, 16), nn.Parameter(torch.randn(4, 16))
    optimizer = torch.optim.SGD([*encoder.parameters(), centers], lr=0.05, momentum=0.9)
    for _ in range(200):
        x, y = blobs(64)
        cosine = F.normalize(encoder(x), dim=1) @ F.normalize(centers, dim=1).T
        angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        wider = (angle + 0.3 * F.one_hot(y, 4)).cos()
        update(optimizer, F.cross_entropy(16 * wider, y))
    return Reached(accuracy(cosine, y), 0.85)


def word_vectors() -> Reached:
    """Skip-grams with negative sampling, sparse gradients, SparseAdam."""
    inside, outside = nn.Embedding(60, 16, sparse=True), nn.Embedding(60, 16, sparse=True)
    nn.init.uniform_(inside.weight, -0.5 / 16, 0.5 / 16)
    nn.init.zeros_(outside.weight)
    optimizer = torch.optim.SparseAdam([*inside.parameters(), *outside.parameters()], lr=0.02)
    losses = []
    for _ in range(300):
        word = torch.randint(60, (128,))
        near = word // 6 * 6 + torch.randint(6, (128,))
        other = torch.randint(60, (128, 5))
        v = inside(word)
        positive = F.logsigmoid((v * outside(near)).sum(1))
        negative = F.logsigmoid(-(outside(other) @ v[:, :, None]).squeeze(2)).sum(1)
        losses.append(update(optimizer, -(positive + negative).mean()))
    return Reached(losses[0] - losses[-1], 1.0)


def _transformer(depth: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def masked_autoencoder() -> Reached:
    """Encodes a quarter of the patches and reconstructs the others with mask tokens."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(6, 32), nn.Linear(32, 6)
            self.place = nn.Parameter(0.02 * torch.randn(16, 32))
            self.mask = nn.Parameter(torch.zeros(32))
            self.encoder, self.decoder = _transformer(2), _transformer(1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            order = torch.rand(x.shape[:2]).argsort(1)
            kept = order[:, :6]
            h = self.into(x) + self.place
            seen = self.encoder(h.gather(1, kept[..., None].expand(-1, -1, 32)))
            full = (self.mask + self.place).expand(len(x), -1, -1).clone()
            full = full.scatter(1, kept[..., None].expand(-1, -1, 32), seen)
            return self.out(self.decoder(full)), order[:, 6:]

    model, basis = Masked(), torch.randn(3, 16, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(250):
        x = torch.einsum("bk,kpc->bpc", torch.randn(32, 3), basis)
        y, hidden = model(x)
        rows = torch.arange(32)[:, None]
        loss = F.mse_loss(y[rows, hidden], x[rows, hidden])
        update(optimizer, loss)
    return Reached(1 - float(loss.detach()) / float(x.var()), 0.5)
