"""The interval: coverage on simulated pairs, exact cases, quantiles against published tables."""

import math

import numpy as np
import pytest

from bilinearize.eval.statistics import (
    block_length,
    bootstrap_intervals,
    combine,
    recolour,
    student_quantile,
    unskew,
)


def simulate_nll(generator: np.random.Generator, windows: int, dependence: float) -> np.ndarray:
    """(windows, 2): losses of two models, a shared difficulty of the text and a gap of 0.1 nats.

    The gap's own noise follows the text too, with this correlation between neighbouring windows.
    """
    shared = generator.normal(3.0, 0.5, windows)
    noise = generator.normal(0, 0.2, windows + 20)
    for index in range(1, len(noise)):
        noise[index] += dependence * noise[index - 1]
    return np.stack([shared, shared + 0.1 + noise[20:]], axis=1)


@pytest.mark.parametrize(
    ("windows", "dependence"),
    [(5, 0), (20, 0), (100, 0), (200, 0.2), (20, 0.5), (60, 0.5), (200, 0.5), (100, 0.7)],
)
def test_the_interval_covers_the_truth(windows, dependence):
    generator = np.random.default_rng(1)
    runs, held = 2000, 0
    for seed in range(runs):
        pair = simulate_nll(generator, windows, dependence)
        gap = pair[:, 1:] - pair[:, :1]
        estimates = bootstrap_intervals(gap, np.ones(windows), samples=200, seed=seed)
        low, high = estimates.interval(0)
        held += low <= 0.1 <= high
    assert 0.92 <= held / runs <= 0.98


@pytest.mark.parametrize("windows", [10, 20, 60])
def test_the_interval_covers_where_few_windows_stand_out(windows):
    generator = np.random.default_rng(3)
    runs, held, straight = 2000, 0, 0
    for seed in range(runs):
        gap = generator.lognormal(0, 1, (windows, 1))  # skewness 6
        estimates = bootstrap_intervals(gap, np.ones(windows), samples=200, seed=seed)
        low, high = estimates.interval(0)
        held += low <= math.exp(0.5) <= high
        reach = student_quantile(0.975, int(estimates.freedom[0])) * estimates.error[0]
        straight += abs(estimates.value[0] - math.exp(0.5)) <= reach
    assert 0.91 <= held / runs <= 0.98
    assert straight < held - 0.02 * runs  # negative control: symmetric intervals hold it less often


def test_the_bend_is_undone_by_the_published_cubic():
    skewness, n = 0.4, 25
    a = skewness * math.sqrt(n)  # of one window
    for t in (-2.0, 0.0, 2.0):
        x = unskew(t, skewness) / math.sqrt(n)
        forth = x + a * x**2 / 3 + a**2 * x**3 / 27 + a / (6 * n)
        assert math.sqrt(n) * forth == pytest.approx(t, abs=1e-12)
    assert unskew(2.0, 0.0) == 2.0 and unskew(2.0, 1e-7) == pytest.approx(2.0, rel=1e-6)


def test_slices_are_combined_without_their_difference():
    generator = np.random.default_rng(5)
    rows = [generator.normal(mean, 1, (60, 1)) for mean in (0.0, 10.0)]
    parts = [bootstrap_intervals(each, np.ones(60)) for each in rows]
    both = combine(parts, [60, 60])
    assert both.value[0] == pytest.approx(np.concatenate(rows).mean())
    expected = math.hypot(*(part.error[0] / 2 for part in parts))
    assert both.error[0] == pytest.approx(expected)
    assert parts[0].freedom[0] < both.freedom[0] <= 2 * parts[0].freedom[0]
    # Negative control: as one series the two would look dependent and spread by their difference.
    mixed = bootstrap_intervals(np.concatenate(rows), np.ones(120))
    assert mixed.error[0] > 5 * both.error[0]
    assert (
        combine([parts[0], bootstrap_intervals(np.ones((1, 1)), np.ones(1))], [60, 1]).error is None
    )


def test_the_factor_is_that_of_the_formula_and_independent_documents_go_without():
    generator = np.random.default_rng(6)
    noise = generator.normal(size=5000)
    for index in range(1, len(noise)):
        noise[index] += 0.6 * noise[index - 1]
    rows = noise[:, None] - noise.mean()
    assert recolour(rows, 1) == pytest.approx((1 + 0.6) / (1 - 0.6), rel=0.1)
    assert recolour(rows, 17) < 1.3 < recolour(rows, 4)
    assert recolour(np.zeros((10, 2)), 2).tolist() == [1, 1]
    apart = bootstrap_intervals(rows, np.ones(5000), dependent=False).error[0]
    assert apart == pytest.approx(noise.std() / math.sqrt(5000), rel=0.05)


def test_dependence_between_neighbours_widens_the_interval():
    # Negative control for the blocks: windows taken one by one would miss this.
    generator = np.random.default_rng(2)
    series = np.cumsum(generator.normal(size=400))[:, None]
    shuffled = generator.permutation(series)
    counts = np.ones(400)
    ordered, mixed = (bootstrap_intervals(rows, counts).interval(0) for rows in (series, shuffled))
    assert ordered[1] - ordered[0] > 1.5 * (mixed[1] - mixed[0])


def test_a_few_windows_against_the_formula():
    # With fewer than 8 windows the blocks are single windows: the plain t interval of a mean.
    values = np.array([4.0, 1.0, 7.0, 2.5, 5.5])  # neighbours differ: nothing to make up for
    low, high = bootstrap_intervals(values[:, None], np.ones(5), samples=20000).interval(0)
    reach = 2.776445 * values.std(ddof=1) / math.sqrt(5)
    assert (high - low) / 2 == pytest.approx(reach, rel=0.03)
    assert (high + low) / 2 == pytest.approx(values.mean())


def test_unequal_windows_are_weighted_by_their_tokens():
    sums, counts = np.array([[10.0], [3.0], [8.0]]), np.array([10, 2, 4])
    assert bootstrap_intervals(sums, counts).value[0] == pytest.approx(21 / 16)


def test_windows_that_agree_have_an_interval_of_no_width():
    sums = np.stack([np.full(30, 6.3), np.zeros(30), np.arange(30.0)], axis=1)
    estimates = bootstrap_intervals(sums, np.full(30, 63))
    assert estimates.interval(0) == pytest.approx([0.1, 0.1], abs=1e-15)
    assert estimates.interval(1) == [0, 0]
    low, high = estimates.interval(2)
    assert low < high


def test_one_window_gives_no_interval():
    estimates = bootstrap_intervals(np.array([[5.0]]), np.array([10]))
    assert estimates.value[0] == 0.5 and estimates.interval(0) is None


def test_the_same_seed_gives_the_same_interval():
    rows = np.random.default_rng(3).normal(size=(50, 2))
    first, again, other = (bootstrap_intervals(rows, np.ones(50), seed=seed) for seed in (4, 4, 5))
    assert first.interval(0) == again.interval(0) != other.interval(0)


def test_block_lengths():
    assert [block_length(n) for n in (1, 7, 8, 27, 64, 1000)] == [1, 1, 2, 3, 4, 10]


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (1000, 1.96234)],
)
def test_student_quantiles_of_the_tables(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-5)
