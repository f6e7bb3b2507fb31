import torch
import torch.nn as nn

torch.manual_seed(0)
torch.set_num_threads(1)
base = "she sells sea shells by the sea shore and the shells she sells are sea shells for sure . "
text = (base + "peter piper picked a peck of pickled peppers where is the peck of pickled peppers he picked . ") * 30
vocab = sorted(set(text))
data = torch.tensor([vocab.index(c) for c in text])
B, T = 8, 24


class CharRNN(nn.Module):
    def __init__(self, v, h=64):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(v, 16), nn.LSTM(16, h, batch_first=True), nn.Linear(h, v)

    def forward(self, x, s):
        o, s = self.rnn(self.emb(x), s)
        return self.out(o), s


n = (len(data) - 1) // B
xs = data[:n * B].view(B, n)
ys = data[1:n * B + 1].view(B, n)
net = CharRNN(len(vocab))
opt = torch.optim.Adam(net.parameters(), lr=8e-3)
crit = nn.CrossEntropyLoss()
step = 0
for ep in range(12):
    state = None
    for i in range(0, n - T, T):
        out, state = net(xs[:, i:i + T], state)
        state = tuple(s.detach() for s in state)
        loss = crit(out.transpose(1, 2), ys[:, i:i + T])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        step += 1
    print(f"epoch {ep} step {step} loss {loss.item():.4f}")
net.eval()
with torch.no_grad():
    out, _ = net(xs[:, :200], None)
    acc = (out.argmax(-1) == ys[:, :200])[:, 20:].float().mean().item()
print("final next-char acc", round(acc, 4))
