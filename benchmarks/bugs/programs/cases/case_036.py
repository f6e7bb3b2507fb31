import torch
import torch.nn as nn
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler
from sklearn.model_selection import train_test_split
import warnings
warnings.filterwarnings("ignore")

torch.manual_seed(0)
torch.set_num_threads(1)
X, y = load_diabetes(return_X_y=True)
Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=0)
sx = StandardScaler().fit(Xtr)
mu, sd = ytr.mean(), ytr.std()
Xtr = torch.tensor(sx.transform(Xtr), dtype=torch.float32)
Xte = torch.tensor(sx.transform(Xte), dtype=torch.float32)
ytr = torch.tensor((ytr - mu) / sd, dtype=torch.float32)
yte = torch.tensor((yte - mu) / sd, dtype=torch.float32)

model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)
loss_fn = nn.MSELoss()
for epoch in range(60):
    model.train()
    order = torch.randperm(len(Xtr))
    for i in range(0, len(order), 64):
        xb, yb = Xtr[order[i:i + 64]], ytr[order[i:i + 64]]
        pred = model(xb)
        loss = loss_fn(pred, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch % 10 == 9:
        model.eval()
        with torch.no_grad():
            out = model(Xte).view(-1)
            r2 = 1 - ((out - yte) ** 2).sum() / ((yte - yte.mean()) ** 2).sum()
        print(f"epoch {epoch + 1} train loss {loss.item():.4f} test R2 {r2.item():.4f}")
print("final test R2", round(r2.item(), 4))
