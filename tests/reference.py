"""The update rules in float64, written from the formulas and sharing nothing with the code under test."""

import torch

POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


class ReferenceMuon:
    """Muon on one 2-D matrix in float64, the default form or the options given."""

    def __init__(
        self,
        param,
        lr,
        momentum=0.95,
        beta2=0.95,
        weight_decay=0.0,
        nesterov=True,
        decay="cautious",
        scale=lambda m, n: max(1, m / n) ** 0.5,
        row_equilibrate=False,
        renormalize=False,
        triples=None,
    ):
        self.P = param.detach().double().clone()
        self.M, self.V = torch.zeros_like(self.P), None
        self.lr, self.momentum, self.beta2, self.weight_decay = lr, momentum, beta2, weight_decay
        self.nesterov, self.decay, self.scale, self.triples = nesterov, decay, scale, triples
        self.row_equilibrate, self.renormalize = row_equilibrate, renormalize

    def step(self, grad):
        G, mu = grad.double(), self.momentum
        m, n = G.shape
        self.M = mu * self.M + (1 - mu) * G
        U = (1 - mu) * G + mu * self.M if self.nesterov else self.M
        if self.row_equilibrate:
            norms = torch.stack([row.norm() for row in U])
            U = torch.stack([row * norms.mean() / norm for row, norm in zip(U, norms, strict=True)])
        norm = (U**2).sum().sqrt()
        X = U / max(norm, 1e-7) if self.triples else U / (1.02 * norm + 1e-6)
        for a, b, c in self.triples or POLAR_EXPRESS:
            A = X @ X.T
            X = a * X + b * A @ X + c * A @ A @ X
        if self.renormalize:
            X = X * min(m, n) ** 0.5 / (X**2).sum().sqrt()
        if self.beta2 is not None:
            v = (X**2).mean(dim=1, keepdim=True) if m >= n else (X**2).mean(dim=0, keepdim=True)
            self.V = (1 - self.beta2) * v + self.beta2 * (0 if self.V is None else self.V)
            scaled = X / self.V.clamp(min=1e-10).sqrt()
            X = scaled * (X**2).sum().sqrt() / (scaled**2).sum().sqrt().clamp(min=1e-10)
        lr = self.lr * self.scale(m, n)
        if self.decay == "cautious":
            self.P = self.P - lr * X - lr * self.weight_decay * self.P * (X * self.P >= 0)
        else:
            self.P = self.P * (1 - self.lr * self.weight_decay) - lr * X


def distance(actual, expected):
    """Frobenius norm of the difference over that of the expected."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
