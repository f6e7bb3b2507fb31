import random

import numpy as np
import torch

torch.set_num_threads(1)

CASES = {}


def case(name):
    def deco(fn):
        CASES[name] = fn
        return fn
    return deco


def seed_all(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


_digits = None


def digits(seed=0, n_val=400):
    """8x8 digit images in [0, 1]: (Xtr, ytr, Xva, yva), images flat (N, 64)."""
    global _digits
    if _digits is None:
        from sklearn.datasets import load_digits
        d = load_digits()
        _digits = (torch.tensor(d.data, dtype=torch.float32) / 16.0, torch.tensor(d.target))
    X, y = _digits
    p = torch.from_numpy(np.random.RandomState(seed).permutation(len(X)))
    X, y = X[p], y[p]
    return X[n_val:].clone(), y[n_val:].clone(), X[:n_val].clone(), y[:n_val].clone()


def acc(logits, y):
    return (logits.argmax(-1) == y).float().mean().item()


def r2(pred, y):
    pred, y = pred.reshape(-1), y.reshape(-1)
    return (1 - ((pred - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()).item()
