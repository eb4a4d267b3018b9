"""Pure functions of step, depth and size: the length of a run, its batches, and how its dials move.

Nothing here touches a tensor, so every rule can be read, plotted and tested by itself.
"""

import math

# Reference point: nanochat trains depth 12 on about so many tokens with this batch
WEB_TOKENS = 1.2e9
WEB_BATCH = 2**19
WEB_STEPS = WEB_TOKENS / WEB_BATCH  # 2,289: the run that learning rates and weight decay are given for
FEWEST_STEPS = 100  # rates of shorter runs are those of so many; shorter ones were not measured


def training_tokens(scaling_parameters: int, ratio: float) -> int:
    """Length of a run in tokens: `ratio` per parameter of the matrices and the head.

    20 is compute-optimal for the models of Hoffmann et al. (arXiv 2203.15556); Muon-trained models of this
    family do best near 10 (nanochat, 2026).
    """
    return int(scaling_parameters * ratio)


def total_batch_size(tokens: int, tokens_per_micro_step: int) -> int:
    """Tokens per optimizer step for a run of `tokens`.

    The critical batch grows as tokens^0.383 (arXiv 2505.13738). Rounded to the nearest power of two, then to
    the nearest multiple of what all devices take in one micro-step.
    """
    ideal = WEB_BATCH * (tokens / WEB_TOKENS) ** 0.383
    batch = 2 ** round(math.log2(max(ideal, 1)))
    micro_steps = max(1, round(batch / tokens_per_micro_step))
    return micro_steps * tokens_per_micro_step


def nearest_batch_sizes(total: int, unit: int) -> list[int]:
    """The multiples of `unit` just below and just above `total`, without zero."""
    below = total // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def lr_multiplier(
    step: int, steps: int, warmup: float = 0.0, cooldown: float = 0.5, final: float = 0.0
) -> float:
    """Trapezoid: linear rise over the first `warmup` share of `steps`, flat, linear fall over the last.

    It falls to `final` over the `cooldown` share. Step counts from 0; the first step is never 0.
    """
    rise = fall = 1.0
    if warmup:
        rise = (step + 1) / (warmup * steps)
    if cooldown:
        fall = final + (1 - final) * (steps - step) / (cooldown * steps)
    return min(1.0, rise, fall)


def muon_momentum(step: int, steps: int, start: float = 0.85, peak: float = 0.95) -> float:
    """Momentum rises linearly over the first 300 steps (modded-nanogpt), the first third of a shorter run."""
    rising_steps = max(1, min(300, steps // 3))
    return start + (peak - start) * min(1.0, step / rising_steps)


def horizon_lr_scale(steps: int) -> float:
    """Learning rates of a run of so many steps, against those of WEB_STEPS: short runs want larger ones.

    The best rate falls with the horizon to the power -0.32 (arXiv 2409.19913, AdamW in language models),
    which our short runs of Muon and AdamW follow (docs/recipe.md). Longer runs keep the published rates of
    that length (nanochat, 2026).
    """
    return max(1.0, (WEB_STEPS / max(steps, FEWEST_STEPS)) ** 0.32)


def horizon_decay_scale(steps: int) -> float:
    """Weight decay of a run of so many steps, against that of WEB_STEPS.

    Rate times decay times steps is what a run decays by in all, and stays the same (arXiv 2405.13698; the
    published rule of nanochat for longer runs).
    """
    return WEB_STEPS / max(steps, FEWEST_STEPS) / horizon_lr_scale(steps)


def weight_decay_multiplier(step: int, steps: int) -> float:
    """Linear to zero: at the end of a run decay only adds noise (nanochat, 2026)."""
    return 1 - step / steps


def adamw_lr_scale(width: int) -> float:
    """AdamW learning rates are tuned at width 768 and follow width^-1/2."""
    return (width / 768) ** -0.5


def matrix_lr_scale(batch: int) -> float:
    """Muon's learning rate by the tokens of a step: the square-root rule (arXiv 2205.10287) at both ends.

    Below 4,096 tokens it is measured: at 768 half the rate of 4,096 is best (docs/log.md). Above WEB_BATCH it
    is published (nanochat, 2026). Between them the same rate is right at both ends, so it is held.
    """
    return min(1.0, (batch / 4096) ** 0.5) * max(1.0, (batch / WEB_BATCH) ** 0.5)


FILLED = 0.85  # share of a device's memory that a step may take


def rows_that_fit(rows: int, one_row: float, two_rows: float, capacity: float) -> int:
    """The largest power of two that divides `rows` and keeps memory below FILLED of `capacity`, at least 1.

    one_row, two_rows: bytes at the height of a step of so many rows; every further row takes as much again.
    """

    def fits(size):
        return one_row + (size - 1) * (two_rows - one_row) <= FILLED * capacity

    size = 1
    while rows % (2 * size) == 0 and fits(2 * size):
        size *= 2
    return size


def compilation(device: str, depth: int, eager_seconds: float) -> tuple[float, float]:
    """(seconds that compiling takes, seconds it saves) for steps that take `eager_seconds` in all uncompiled.

    From an empty cache. Measured on 2 CPU cores at depth 4 (docs/log.md); for "cuda" a guess, not measured.
    """
    if device == "cuda":
        seconds, speedup = 20 + 5 * depth, 1.4
    else:
        seconds, speedup = 8 + 8 * depth, 1.2
    return seconds, eager_seconds * (1 - 1 / speedup)
