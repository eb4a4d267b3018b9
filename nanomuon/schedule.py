"""Pure functions of step, depth and size: how long a run is, how large its batches are, and how its dials
move.

Nothing here touches a tensor, so every rule can be read, plotted and tested by itself.
"""

import math

WEB_BATCH, WEB_TOKENS = (
    2**19,
    1.2e9,
)  # reference point: nanochat trains depth 12 on about 1.2e9 tokens with this batch


def training_tokens(scaling_parameters: int, ratio: float) -> int:
    """Length of a run in tokens: `ratio` per parameter of the matrices and the head.

    20 is compute-optimal for the models of Hoffmann et al. (arXiv 2203.15556); Muon-trained models of this
    family do best near 10 (nanochat, 2026).
    """
    return int(scaling_parameters * ratio)


def total_batch_size(tokens: int, tokens_per_micro_step: int) -> int:
    """Tokens per optimizer step for a run of `tokens`: the critical batch grows as tokens^0.383 (arXiv
    2505.13738).

    Rounded to the nearest power of two, then to the nearest multiple of what all devices take in one
    micro-step.
    """
    ideal = WEB_BATCH * (tokens / WEB_TOKENS) ** 0.383
    batch = 2 ** round(math.log2(max(ideal, 1)))
    return max(1, round(batch / tokens_per_micro_step)) * tokens_per_micro_step


def nearest_batch_sizes(total: int, unit: int) -> list[int]:
    """The multiples of `unit` just below and just above `total`, without zero."""
    below = total // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def lr_multiplier(
    step: int, steps: int, warmup: float = 0.0, cooldown: float = 0.5, final: float = 0.0
) -> float:
    """Trapezoid: linear rise over the first `warmup` share of `steps`, flat, linear fall to `final` over the
    last `cooldown` share. Step counts from 0; the first step is never 0.
    """
    rise = (step + 1) / (warmup * steps) if warmup else 1.0
    fall = final + (1 - final) * (steps - step) / (cooldown * steps) if cooldown else 1.0
    return min(1.0, rise, fall)


def muon_momentum(step: int, steps: int, start: float = 0.85, peak: float = 0.95) -> float:
    """Momentum rises linearly over the first 300 steps (modded-nanogpt), or the first third of a shorter
    run.
    """
    return start + (peak - start) * min(1.0, step / max(1, min(300, steps // 3)))


def weight_decay_multiplier(step: int, steps: int) -> float:
    """Linear to zero: at the end of a run decay only adds noise (nanochat, 2026)."""
    return 1 - step / steps


def adamw_lr_scale(width: int) -> float:
    """AdamW learning rates are tuned at width 768 and follow width^-1/2."""
    return (width / 768) ** -0.5


def matrix_lr_scale(batch: int) -> float:
    """Muon's learning rate in small batches, of `batch` tokens: the square-root rule (arXiv 2205.10287) up to
    4,096.

    Measured at 768 tokens, where half the rate of 4,096 tokens is best (docs/log.md).
    """
    return min(1.0, (batch / 4096) ** 0.5)


def rows_that_fit(rows: int, one_row: float, two_rows: float, capacity: float) -> int:
    """The largest power of two that divides `rows` and keeps memory below 85% of `capacity`, at least 1.

    one_row, two_rows: bytes at the height of a step of so many rows; every further row takes as much again.
    """
    size = 1
    while rows % (2 * size) == 0 and one_row + (2 * size - 1) * (two_rows - one_row) <= 0.85 * capacity:
        size *= 2
    return size


def compilation(device: str, depth: int, eager_seconds: float) -> tuple[float, float]:
    """(seconds that compiling takes, seconds it saves) for steps that take `eager_seconds` in all when run
    eagerly.

    From an empty cache. Measured on 2 CPU cores at depth 4 (docs/log.md); for "cuda" a guess, not measured.
    """
    costs, speedup = {"cpu": (8 + 8 * depth, 1.2), "cuda": (20 + 5 * depth, 1.4)}[device]
    return costs, eager_seconds * (1 - 1 / speedup)
