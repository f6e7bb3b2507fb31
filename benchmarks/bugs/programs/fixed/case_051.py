import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
torch.set_num_threads(1)


def make_data(n, size=24):
    imgs = torch.randn(n, 1, size, size) * 0.35
    masks = torch.zeros(n, 1, size, size)
    for k in range(n):
        r = torch.randint(3, 6, (1,)).item()
        cy, cx = torch.randint(r, size - r, (2,)).tolist()
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        disk = ((yy - cy) ** 2 + (xx - cx) ** 2 <= r * r).float()
        masks[k, 0] = disk
        imgs[k, 0] += disk
    return imgs, masks


class MiniUNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.dec = nn.Sequential(nn.Conv2d(2 * c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 1, 1))

    def forward(self, x):
        e1 = self.enc1(x)
        e2 = self.enc2(F.max_pool2d(e1, 2))
        u = self.up(self.mid(e2))
        return self.dec(torch.cat([u, e1], 1))


def augment(img, mask):
    flip = torch.rand(img.size(0)) < 0.5
    img = img.clone()
    mask = mask.clone()
    img[flip] = img[flip].flip(-1)
    mask[flip] = mask[flip].flip(-1)
    img = img + 0.05 * torch.randn_like(img)
    return img, mask


def dice(logits, target):
    p = (torch.sigmoid(logits) > 0.5).float()
    inter = (p * target).sum()
    return (2 * inter / (p.sum() + target.sum() + 1e-6)).item()


def main():
    xtr, mtr = make_data(400)
    xva, mva = make_data(100)
    net = MiniUNet()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    step = 0
    for epoch in range(10):
        net.train()
        order = torch.randperm(len(xtr))
        for i in range(0, len(xtr), 32):
            b = order[i:i + 32]
            x, m = augment(xtr[b], mtr[b])
            loss = F.binary_cross_entropy_with_logits(net(x), m)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        net.eval()
        with torch.no_grad():
            d = dice(net(xva), mva)
        print(f"epoch {epoch} step {step} loss {loss.item():.4f} val dice {d:.4f}")
    print("final val dice", round(d, 4))


main()
