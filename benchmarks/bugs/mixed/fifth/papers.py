"""Topic of papers from word counts and citations: two-layer graph attention network, own edge softmax."""
import os, sys
import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = sys.argv[1] if len(sys.argv) > 1 else "healthy"
SEED = int(os.environ.get("SEED", 0))
NODES, TOPICS, WORDS = 900, 5, 120


def make_graph(gen):
    topic = torch.randint(0, TOPICS, (NODES,), generator=gen)
    lean = torch.rand(TOPICS, WORDS, generator=gen).pow(3) * 0.06 + 0.03
    words = (torch.rand(NODES, WORDS, generator=gen) < lean[topic]).float()
    same = topic[:, None].eq(topic[None, :])
    prob = torch.where(same, 0.022, 0.0016)
    cites = torch.triu(torch.rand(NODES, NODES, generator=gen) < prob, diagonal=1)
    a, b = cites.nonzero(as_tuple=True)
    loops = torch.arange(NODES)
    src, dst = torch.cat([a, b, loops]), torch.cat([b, a, loops])
    return words, topic, src, dst


class EdgeAttention(nn.Module):
    def __init__(self, d_in, d_out, heads):
        super().__init__()
        self.heads, self.d_out = heads, d_out
        self.lin = nn.Linear(d_in, heads * d_out, bias=False)
        self.att_src = nn.Parameter(torch.empty(heads, d_out))
        self.att_dst = nn.Parameter(torch.empty(heads, d_out))
        self.bias = nn.Parameter(torch.zeros(heads * d_out))
        for p in (self.lin.weight, self.att_src, self.att_dst):
            nn.init.xavier_uniform_(p)

    def forward(self, x, src, dst):
        h = self.lin(x).view(-1, self.heads, self.d_out)
        e = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        e = F.leaky_relu(e, 0.2)
        e = (e - e.max()).exp()
        group = dst
        if CASE == "edge_norm":
            alpha = e / e.sum(0, keepdim=True)
        else:
            total = torch.zeros(x.size(0), self.heads).index_add(0, group, e)
            alpha = e / (total[group] + 1e-9)
        target = src if CASE == "add_index" else dst
        out = torch.zeros_like(h).index_add(0, target, alpha[..., None] * h[src])
        return out.flatten(1) + self.bias


class PaperNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = EdgeAttention(WORDS, 16, 4)
        self.two = EdgeAttention(64, TOPICS if CASE != "variant_x" else 16, 1)
        self.skip = nn.Linear(16, TOPICS) if CASE == "variant_x" else None

    def forward(self, x, src, dst):
        if CASE == "always_drop":
            x = F.dropout(x, 0.8)
        else:
            x = F.dropout(x, 0.4, training=self.training)
        x = F.elu(self.one(x, src, dst))
        x = self.two(F.dropout(x, 0.4, training=self.training), src, dst)
        if self.skip is not None:
            x = self.skip(F.elu(x))
        return x


@torch.no_grad()
def accuracy(model, words, topic, src, dst, rows):
    model.eval()
    pred = model(words, src, dst)[rows].argmax(-1)
    model.train()
    return pred.eq(topic[rows]).float().mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(500 + SEED)
    words, topic, src, dst = make_graph(gen)
    x = words / words.sum(1, keepdim=True).clamp(min=1) * 5
    order = torch.randperm(NODES, generator=gen)
    train, valid, test = order[:150], order[150:300], order[300:]
    model = PaperNet()
    if CASE == "variant_x":
        opt = torch.optim.Adam([{"params": model.one.parameters(), "weight_decay": 5e-3},
                                {"params": list(model.two.parameters()) + list(model.skip.parameters())}], lr=5e-3)
    else:
        opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for step in range(1, 251):
        logits = model(x, src, dst)
        if CASE == "row_slice":
            loss = F.cross_entropy(logits[train], topic[:train.numel()])
        else:
            loss = F.cross_entropy(logits[train], topic[train], label_smoothing=0.1 if CASE == "variant_x" else 0.0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} valid accuracy {accuracy(model, x, topic, src, dst, valid):.3f}")
    print("quality", round(accuracy(model, x, topic, src, dst, test), 4))


if __name__ == "__main__":
    main()
