"""The update rules in float64, written from the formulas without the code under test; and the models and
gradients on which both are tested.
"""

import types

import torch

MATRICES = dict(lr=0.02, momentum=0.95, ns_steps=5, beta2=0.9, weight_decay=0.1)
OTHERS = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
MUON, ADAMW = dict(MATRICES, kind="muon"), dict(OTHERS, kind="adamw")
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
LIMIT = (1.875, -1.25, 0.375)  # of polar_express
SIMPLE = (3.4445, -4.7750, 2.0315)
SCALES = {
    "shape": lambda m, n: max(1, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "spectral": lambda m, n: max(m, n) ** 0.5,
    "unit_rms_norm": lambda m, n: (m / n) ** 0.5,
}


OPTIONS = dict(nesterov=True, weight_decay_form="cautious", scale="shape", coefficients="polar_express")
OPTIONS |= dict(direction=None)


class ReferenceMuon:
    """Muon on one (m, n) matrix in float64. group: a param group."""

    def __init__(self, param, group):
        self.P, self.group = param.detach().double().clone(), {**OPTIONS, **group}
        m, n = self.P.shape
        self.M, self.kept = None, {}  # the momentum; what the direction keeps, (1, ...) by name
        direction, coefficients, scale = (self.group[key] for key in ("direction", "coefficients", "scale"))
        if self.group["momentum"] is not None:
            self.M = torch.zeros_like(self.P)
        function = getattr(direction, "func", direction)
        shapes = function.buffers(m, n) if hasattr(function, "buffers") else {}
        if self.group["beta2"] is not None and direction is None:
            shapes["second_momentum_buffer"] = (m, 1) if m >= n else (1, n)
        for name, shape in shapes.items():
            self.kept[name] = torch.zeros(1, *shape, dtype=torch.float64)
        named = {"polar_express": [*POLAR_EXPRESS, *[LIMIT] * 9], "simple": [SIMPLE] * 5}
        self.triples = named.get(coefficients, coefficients)[: self.group["ns_steps"]]
        self.scale = SCALES.get(scale, scale)(m, n)

    def step(self, grad):
        G, mu, wd = grad.double(), self.group["momentum"], self.group["weight_decay"]
        U = G
        if mu is not None:
            self.M = mu * self.M + (1 - mu) * G
            U = (1 - mu) * G + mu * self.M if self.group["nesterov"] else self.M
        if self.group["direction"] is None:
            X = self.variance_reduced(self.polar_factor(U))
        else:
            one = torch.ones(1, 1, 1, dtype=torch.float64)
            hyper = types.SimpleNamespace(one_minus_beta2=1 - (self.group["beta2"] or 0))
            X, gain = self.group["direction"](U[None], self.kept, one, hyper)
            X = (X * gain)[0]
        lr = self.group["lr"] * self.scale
        if self.group["weight_decay_form"] == "cautious":
            self.P = self.P - lr * X - lr * wd * self.P * (X * self.P >= 0)
        else:
            assert self.group["weight_decay_form"] == "decoupled"
            self.P = self.P * (1 - self.group["lr"] * wd) - lr * X

    def polar_factor(self, U):
        norm = (U**2).sum().sqrt()
        is_polar_express = self.group["coefficients"] == "polar_express"
        X = U / (1.02 * norm + 1e-6) if is_polar_express else U / max(norm, 1e-7)
        for a, b, c in self.triples:
            A = X @ X.T
            X = a * X + b * A @ X + c * A @ A @ X
        return X

    def variance_reduced(self, X):
        if not self.kept:
            return X
        V, beta2, (m, n) = self.kept["second_momentum_buffer"], self.group["beta2"], X.shape
        V.copy_((1 - beta2) * (X**2).mean(dim=1 if m >= n else 0, keepdim=True) + beta2 * V)
        scaled = X / V[0].clamp(min=1e-10).sqrt()
        return scaled * (X**2).sum().sqrt() / (scaled**2).sum().sqrt().clamp(min=1e-10)


def matrices_of(tensor):
    return tensor.unbind() if tensor.ndim == 3 else [tensor.flatten(1)]


class Reference:
    """One parameter of any kind and shape: PyTorch's AdamW in float64, or ReferenceMuon on each matrix.

    parts: the slices of every matrix that are matrices of their own; by default all of it.
    """

    def __init__(self, param, group, parts):
        self.param, self.parts = param.detach().double().clone(), parts
        self.adamw, self.matrices = None, []
        if group["kind"] == "adamw":
            numbers = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            self.adamw = torch.optim.AdamW([self.param], **numbers)
        else:
            self.matrices = [ReferenceMuon(part, group) for part in self.parts_of(self.param)]

    def parts_of(self, tensor):
        return [matrix[part] for matrix in matrices_of(tensor) for part in self.parts]

    def step(self, grad):
        if self.adamw:
            self.param.grad = grad
            self.adamw.step()
        for matrix, part in zip(self.matrices, self.parts_of(grad) if self.matrices else [], strict=True):
            matrix.step(part)

    def joined(self, parts):
        """A tensor of the parameter's shape, assembled from one tensor per part."""
        whole, parts = torch.empty_like(self.param), iter(parts)
        for matrix in matrices_of(whole):
            for part in self.parts:
                matrix[part] = next(parts)
        return whole

    def result(self):
        """(parameter, {name of its state: tensor}); if it has parts, only the momentum."""
        if self.adamw:
            state = {"step": torch.zeros(()), "exp_avg": self.param * 0, "exp_avg_sq": self.param * 0}
            return self.param, {**state, **self.adamw.state[self.param]}
        state = {}
        if self.matrices[0].M is not None:
            state["momentum_buffer"] = self.joined([matrix.M for matrix in self.matrices])
        if self.parts == WHOLE:
            for name in self.matrices[0].kept:
                stacked = torch.cat([matrix.kept[name] for matrix in self.matrices])
                state[name] = stacked if self.param.ndim == 3 else stacked[0]
        return self.joined([matrix.P for matrix in self.matrices]), state


WHOLE = (...,)


def build(model, dtype=torch.float64, seed=0, **options):
    """Parameters and groups of a model given as (kind, shape) pairs. Every third parameter is in a second
    group of its kind, and each kind also has an empty group. dtype: of all, or a tuple that they take in
    turn.
    """
    generator = torch.Generator().manual_seed(seed)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    params, groups = [], {}
    for i, (kind, shape) in enumerate(model):
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1
        param = torch.nn.Parameter(values.to(dtypes[i % len(dtypes)]))
        params.append(param)
        base = {**MUON, "lr": 0.02 + 0.01 * (i % 3 == 0), **options} if kind == "muon" else ADAMW
        group = groups.setdefault((kind, i % 3 == 0), dict(base, params=[], names=[]))
        group["params"].append(param)
        group["names"].append(f"p{i}")
    empty = [dict(MUON, params=[], names=[]), dict(ADAMW, params=[], names=[])]
    return params, [*groups.values(), *empty]


def mean_gradient(i, shape, step):
    """The mean gradient of parameter i over all ranks, in float64; None in one step of five."""
    if (i + step) % 5 == 4:
        return None
    generator = torch.Generator().manual_seed(1000 * i + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def local_gradient(i, shape, step, rank, size):
    """A rank's own gradient; their mean is `mean_gradient`. In one step of five the last rank has none."""
    mean = mean_gradient(i, shape, step)
    if mean is None or size == 1:
        return mean
    if (i + step) % 5 == 3:
        if rank == size - 1:
            return None
        mean, size = mean * size / (size - 1), size - 1
    generator = torch.Generator().manual_seed(-1000 * i - step - 1)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean + noise * (rank - (size - 1) / 2)


def expected(model, steps, parts=WHOLE, dtype=torch.float64, **options):
    """([parameter], {name: {key: tensor}}) after these steps by the formulas. dtype: of the parameters that
    training starts from.
    """
    params, groups = build(model, dtype, **options)
    numbers = {param: i for i, param in enumerate(params)}
    trained, state = {}, {}
    for group in groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            reference, i = Reference(param, group, parts), numbers[param]
            for step in range(steps):
                grad = mean_gradient(i, param.shape, step)
                if grad is not None and param.numel():
                    reference.step(grad)
            trained[i], of_param = reference.result()
            if param.numel():  # without elements there is nothing to train
                state[name] = of_param
    return [trained[i] for i in range(len(params))], state


def equal(tensors, others):
    """Whether the tensors are bitwise equal, pair by pair."""
    return all(torch.equal(p, q) for p, q in zip(tensors, others, strict=True))


def distance(actual, expected):
    """The Frobenius norm of the difference, divided by that of `expected`."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
