"""The polar factor of a matrix by odd polynomials: Newton-Schulz, Polar Express, and their Gram form.

A step maps X to aX + b(XX^T)X + c(XX^T)^2 X, which maps every singular value s to as + bs^3 + cs^5 and does
not change the singular vectors. A few steps push all singular values towards 1, and X towards UV^T, the
nearest orthogonal matrix.
"""

import math

import torch

# (a, b, c) per step
COEFFICIENTS = {
    # Amsel et al., arXiv 2505.16932: num_iters 5, safety 2e-2, cushion 2. Further steps repeat the limit (see
    # `triples`).
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Keller Jordan, https://kellerjordan.github.io/posts/muon: steepest slope at zero, ends in .68-1.20
    "simple": ((3.4445, -4.7750, 2.0315),) * 5,
    # Jiacheng You: five different steps, optimized numerically
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Grishina et al., arXiv 2506.10935 (Chebyshev-accelerated Newton-Schulz)
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # DeepSeek-V4: eight steps of `simple`, then two that converge to 1
    "deepseekv4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
}


def triples(coefficients, steps=None):
    """The (a, b, c) of each step of a named set, or of any sequence of triples.

    `steps=None` is the set's own length. Fewer steps truncate it; more repeat its last triple, or for
    polar_express the limit of its sequence, (1.875, -1.25, 0.375). ValueError for an unknown name or no
    steps.
    """
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            known = ", ".join(COEFFICIENTS)
            raise ValueError(f"unknown coefficients {coefficients!r}; known: {known}, or a list of triples")
        table = COEFFICIENTS[coefficients]
    else:
        table = tuple(tuple(map(float, triple)) for triple in coefficients)
    steps = len(table) if steps is None else steps
    are_triples = all(len(triple) == 3 and all(map(math.isfinite, triple)) for triple in table)
    if not table or steps < 1 or not are_triples:
        raise ValueError(
            "coefficients must be finite (a, b, c) triples, with at least one step: "
            f"{coefficients!r}, {steps=}"
        )
    last = (1.875, -1.25, 0.375) if coefficients == "polar_express" else table[-1]
    return table[:steps] + (last,) * (steps - len(table))


def newton_schulz_form(m, n, steps, device_type="cpu", ns_dtype=None):
    """(whether to use the Gram form, dtype of the iteration) for float32 matrices of this shape.

    ns_dtype: torch.float32, torch.bfloat16, or None for the device's default: bf16 on "cuda", float32
    elsewhere. The choice depends only on the arguments, never on a measurement, because all ranks and a
    resumed run must agree.

    With short side s and aspect ratio r, five steps take (8r+28) s^3 FLOPs in the Gram form and (20r+10) s^3
    in the plain form. The Gram form is used only up to five steps: with ten (`deepseekv4`) it overflows in
    half precision and has a relative error of 0.44 in float32 at condition number 1e6. It is never used in
    bf16, because the accumulated polynomial exhausts its 8 bits: relative errors of 0.21 and 0.41 at
    condition numbers 1e2 and 1e4, against 0.03 and 0.11 in the plain form (256 x 1024), and a training run
    that ended at 2.76 bits per byte instead of 1.17.
    GPUs run it in float16, with 11 bits. CPUs have no fast float16, and in bf16 use the plain form: 280-420
    GFLOP/s against 80-190 in float32 on 2 cores with AVX512-BF16, while the Gram form saves at most a factor
    of 1.8.
    """
    if ns_dtype is None:
        ns_dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    gram_is_cheaper = max(m, n) > 1.5 * min(m, n) and steps <= 5
    if ns_dtype == torch.float32:
        return gram_is_cheaper, torch.float32
    if gram_is_cheaper and device_type == "cuda":
        return True, torch.float16
    return False, torch.bfloat16


def orthogonalize(U, coefficients="polar_express", steps=None, ns_dtype=None):
    """Approximate polar factor of each matrix.

    U: (..., m, n) float. Returns (..., m, n) in the dtype of the iteration: float64 stays float64, and
    `newton_schulz_form` chooses for all other dtypes. The Gram form in float16, used on GPUs, is more
    accurate than the plain form in bf16 (relative errors of .0044 and .0086 on a Gaussian matrix, computed on
    a CPU). Singular values end in about [0.7, 1.2], depending on the set, except the tiny ones of square
    matrices, which end lower; a zero matrix stays zero. Call this outside torch.autocast, which would compute
    the products in its own dtype; the optimizers' step does so. ValueError for anything but real matrices.
    """
    if U.ndim < 2 or U.is_complex():
        raise ValueError(f"orthogonalize takes real matrices, not {U.dtype} of shape {tuple(U.shape)}")
    m, n = U.shape[-2:]
    X = U.reshape(math.prod(U.shape[:-2]), m, n)
    if X.dtype != torch.float64:
        X = X.float()
    return polar_factor(X, (m, n), m > n, coefficients, steps, ns_dtype).view(U.shape)


def polar_factor(X, shape, tall, coefficients, steps, ns_dtype, sum_over_ranks=None):
    """`orthogonalize` for X (K, m, n) in float32 or float64, or for this rank's shards of X.

    shape: (m, n) of a whole matrix. tall, sum_over_ranks: see `newton_schulz`.
    """
    table = triples(coefficients, steps)
    gram, dtype = newton_schulz_form(*shape, len(table), X.device.type, ns_dtype)
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)  # (K, 1, 1) Frobenius norms
    if sum_over_ranks is not None:
        norm = sum_over_ranks(norm.square()).sqrt()
    # So that singular values are at most 1; polar_express needs 2% less
    X = X / (1.02 * norm + 1e-6 if coefficients == "polar_express" else norm.clamp(min=1e-7))
    if X.dtype != torch.float64:
        X = X.to(dtype)
    iterate = gram_newton_schulz if gram else newton_schulz
    return iterate(X, table, tall, sum_over_ranks)


def newton_schulz(X, table, tall, sum_over_ranks=None):
    """X: (K, m, n) with singular values at most 1; table: triples. The products sum over the long side, which
    is the rows if `tall`. sum_over_ranks: if the long side is sharded over ranks, a function that sums the
    products of their shards; see `gram_matrix`.
    """
    for a, b, c in table:
        A = gram_matrix(X, tall, sum_over_ranks)  # (K, s, s)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, X, B, beta=a) if tall else torch.baddbmm(X, B, X, beta=a)
    return X


def gram_matrix(X, of_columns, sum_over_ranks=None):
    """Products of all pairs of columns, X^T X, or of rows, XX^T. X: (K, m, n), or a rank's shards, cut along
    the side over which the products sum; then sum_over_ranks(products) sums them over the ranks.

    bmm takes 2.8 ms, and @, which copies transposes, 5.0 (bf16, 512 x 2048, two cores). For a single matrix
    this avoids bmm, too: torch.compile gives its transpose stride 0 over the batch, and bmm copies that.
    """
    if len(X) == 1:
        products = products_of_rows(X[0].mT if of_columns else X[0]).unsqueeze(0)
    else:
        products = torch.bmm(X.mT, X) if of_columns else torch.bmm(X, X.mT)
    return products if sum_over_ranks is None else sum_over_ranks(products)


def products_of_rows(rows):
    """XX^T of one matrix X (s, l). Since it is symmetric, a CPU copies the part right of the diagonal from
    the left one, in four strips. That saves a quarter of the time at 512 x 2048, with a bitwise equal
    result, but no time below 512 rows; two, three, five or six strips save less.
    """
    if rows.device.type != "cpu" or len(rows) < 512:
        return torch.mm(rows, rows.mT)
    size = -(-len(rows) // 4)
    left = []  # the i-th strip of rows times itself and all above it
    for i, strip in enumerate(rows.split(size)):
        left.append(torch.mm(strip, rows[: (i + 1) * size].mT))
    strips = []
    for i, own in enumerate(left):
        right = [lower[:, i * size : (i + 1) * size].mT for lower in left[i + 1 :]]
        strips.append(torch.cat([own, *right], dim=1))
    return torch.cat(strips)


def gram_newton_schulz(X, table, tall, sum_over_ranks=None):
    """The same polynomial on the Gram matrix R = XX^T, with only four products with the long side (Dao-AILab,
    gram-newton-schulz).

    Q accumulates the polynomial of R, so a step costs only products of (s, s) matrices. Two things make half
    precision work: a restart before the third step, and one baddbmm for each of Z, Q and R (a separate
    addition loses three times as much accuracy).
    """
    for part in (table[:2], table[2:]):  # the restart: compute R again from the X so far
        if part:
            R = gram_matrix(X, tall, sum_over_ranks)  # (K, s, s)
            Q = gram_polynomial(R, part)
            X = X @ Q if tall else Q @ X
    return X


def gram_polynomial(R, table):
    """Q (K, s, s), such that these steps map X to QX (XQ if X is tall). R (K, s, s): Gram matrices."""
    a, b, c = table[0]
    Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
    Q = Z + a * torch.eye(R.size(1), dtype=R.dtype, device=R.device)
    for next_a, next_b, next_c in table[1:]:
        R = torch.baddbmm(R, R, Z, beta=a)  # (Z + aI) R (Z + aI)
        R = torch.baddbmm(R, Z, R, beta=a)
        a, b, c = next_a, next_b, next_c
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
        Q = torch.baddbmm(Q, Q, Z, beta=a)
    return Q


def update_scale(rule, m, n):
    """Factor for the Muon update of an (m, n) matrix. Unscaled, its rms is 1/sqrt(max(m, n)).

    "shape": sqrt(max(1, m/n)) (Keller Jordan, nanochat). "match_rms_adamw": 0.2*sqrt(max(m, n)) (Moonlight,
    arXiv 2502.16982). "spectral": sqrt(max(m, n)) (Megatron; the word names other formulas elsewhere).
    "unit_rms_norm": sqrt(m/n). Or a callable (m, n) -> float that gets the shape of the matrix, (out, in *
    height * width) for a convolution, or of a part made by `split`. ValueError for anything else.
    """
    if callable(rule):
        return float(rule(m, n))
    if rule == "shape":
        return math.sqrt(max(1, m / n))
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if rule == "spectral":
        return math.sqrt(max(m, n))
    if rule == "unit_rms_norm":
        return math.sqrt(m / n)
    raise ValueError(
        f"unknown scale {rule!r}; known: shape, match_rms_adamw, spectral, unit_rms_norm, or a callable"
    )
