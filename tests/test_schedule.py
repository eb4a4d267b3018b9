"""Schedules and scaling rules at points where their values are known."""

import itertools

import pytest

from nanomuon import schedule


def test_learning_rate_is_a_trapezoid():
    values = [schedule.lr_multiplier(step, 100, warmup=0.1, cooldown=0.4, final=0.2) for step in range(100)]
    assert values[0] == pytest.approx(0.1) and values[4] == pytest.approx(0.5)  # (step + 1) / 10
    assert values[9:60] == [1.0] * 51
    assert values[80] == pytest.approx(0.2 + 0.8 * 0.5)
    assert values[99] == pytest.approx(0.2 + 0.8 * 1 / 40)
    assert all(later < earlier for earlier, later in itertools.pairwise(values[60:]))


def test_learning_rate_without_warmup_or_cooldown_is_flat():
    assert {schedule.lr_multiplier(step, 7, 0.0, 0.0) for step in range(7)} == {1.0}


@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_no_step_is_wasted(steps):
    assert all(0 < schedule.lr_multiplier(step, steps, 0.05, 0.5) <= 1 for step in range(steps))


def test_momentum_rises_over_300_steps_or_a_third_of_a_short_run():
    assert schedule.muon_momentum(0, 10_000) == 0.85
    assert schedule.muon_momentum(150, 10_000) == pytest.approx(0.9)
    assert schedule.muon_momentum(300, 10_000) == schedule.muon_momentum(9_999, 10_000) == pytest.approx(0.95)
    assert schedule.muon_momentum(30, 90) == pytest.approx(0.95)


def test_weight_decay_falls_to_zero():
    assert schedule.weight_decay_multiplier(0, 10) == 1 and schedule.weight_decay_multiplier(5, 10) == 0.5


def test_learning_rates_follow_width_and_small_batches():
    assert schedule.adamw_lr_scale(768) == 1 and schedule.adamw_lr_scale(192) == 2
    assert schedule.matrix_lr_scale(1024) == 0.5
    assert schedule.matrix_lr_scale(4096) == schedule.matrix_lr_scale(2**19) == 1
    assert schedule.matrix_lr_scale(2**21) == 2


def test_learning_rates_rise_in_short_runs_to_those_of_the_shortest_that_was_measured():
    scales = [schedule.horizon_lr_scale(steps) for steps in (1, 100, 300, 1_000, 2_289, 10_000)]
    assert scales[0] == scales[1] > scales[2] > scales[3] > scales[4] == pytest.approx(1, abs=1e-3)
    assert scales[5] == 1 and scales[2] / scales[3] == pytest.approx((10 / 3) ** 0.32)
    assert schedule.horizon_decay_scale(10) == schedule.horizon_decay_scale(100)


def test_batch_grows_with_the_run_and_divides_evenly():
    assert schedule.total_batch_size(1_200_000_000, 2**15) == 2**19  # the reference point
    assert schedule.total_batch_size(12_000_000_000, 2**15) == 2**20  # 10^0.383 = 2.4, nearest power of two
    assert schedule.total_batch_size(1_000, 4096) == 4096
    assert schedule.total_batch_size(1_200_000_000, 3 * 2**15) % (3 * 2**15) == 0


def test_nearest_batch_sizes():
    assert schedule.nearest_batch_sizes(5000, 4096) == [4096, 8192]
    assert schedule.nearest_batch_sizes(100, 4096) == [4096]


def test_rows_that_fit_divide_the_batch_and_leave_a_margin():
    # 100 bytes and 50 a row: 16 rows take 900 bytes, 85% of 1,059
    assert schedule.rows_that_fit(64, 150, 200, 1059) == 16
    assert schedule.rows_that_fit(64, 150, 200, 1058) == 8
    assert schedule.rows_that_fit(64, 150, 200, 10**6) == 64
    assert schedule.rows_that_fit(24, 150, 200, 10**6) == 8
    assert schedule.rows_that_fit(64, 150, 200, 10) == 1  # one row is the least there is


def test_compilation_pays_in_long_runs_only():
    for device in ("cpu", "cuda"):
        costs, saves = schedule.compilation(device, 4, 10.0)
        assert 0 < saves < 10 and costs > saves
        costs, saves = schedule.compilation(device, 4, 3600.0)
        assert saves > costs
        assert schedule.compilation(device, 12, 10.0)[0] > costs
