"""Intervals for sums over windows, by a block bootstrap. Pure functions on numpy arrays."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LEVEL = 0.95


@dataclass(frozen=True)
class Estimates:
    """Ratios of sums, one per column, each with the ends of its 95 % interval."""

    value: np.ndarray
    low: np.ndarray | None
    """None where a single window gives no idea of the spread."""
    high: np.ndarray | None

    def interval(self, column: int) -> list[float] | None:
        """`[low, high]` of one column, or None."""
        if self.low is None or self.high is None:
            return None
        return [float(self.low[column]), float(self.high[column])]


def block_length(windows: int) -> int:
    """Windows per block: the cube root of their number, the rate that suits a dependent series.

    Kuensch, The jackknife and the bootstrap for general stationary observations (1989).
    """
    return max(1, math.floor(windows ** (1 / 3) + 1e-9))


def bootstrap_intervals(
    sums: np.ndarray, counts: np.ndarray, samples: int = 2000, seed: int = 0
) -> Estimates:
    """Estimate `sum(sums) / sum(counts)` for each column, with a 95 % interval.

    Neighbouring windows often share a document, so whole blocks of `block_length` windows are drawn
    (circular block bootstrap, Politis and Romano 1992), the same for all columns. The interval is
    the estimate plus and minus Student's t, with one degree of freedom less than there are blocks,
    times the bootstrap's standard error. The bootstrap's own percentiles are too narrow for few
    windows: 92 % instead of 95 % for 5.

    Args:
        sums: float64 (windows, columns), in the order of the text.
        counts: (windows,), what each window's sums are over.

    Returns:
        Estimates of shape (columns,). A column whose windows all agree has an interval of width 0.
    """
    sums = np.asarray(sums, dtype=np.float64)
    counts = np.asarray(counts, dtype=np.float64)
    windows = len(counts)
    value = sums.sum(0) / counts.sum()
    if windows < 2:
        return Estimates(value, None, None)
    length = block_length(windows)
    # Residuals instead of ratios: of mean 0, so that equal windows give exactly 0.
    residuals = sums - counts[:, None] * value
    residuals[:, np.ptp(sums / counts[:, None], axis=0) == 0] = 0
    blocks = _circular_sums(np.column_stack([residuals, counts]), length)
    drawn = _resample(blocks, math.ceil(windows / length), samples, seed)
    # The bootstrap's variance is that of n residuals about their own mean: too small by 1 - 1/n.
    effective = windows / length
    error = drawn.std(0) * math.sqrt(effective / (effective - 1))
    reach = student_quantile((1 + LEVEL) / 2, windows // length - 1) * error
    return Estimates(value, value - reach, value + reach)


def _resample(blocks: np.ndarray, draws: int, samples: int, seed: int) -> np.ndarray:
    """Ratios of (samples, columns) sums to the last column's, over `draws` random rows each."""
    generator = np.random.default_rng(seed)
    drawn = np.empty((samples, blocks.shape[1] - 1))
    step = max(1, 2**20 // (draws * blocks.shape[1]))
    for start in range(0, samples, step):
        rows = generator.integers(0, len(blocks), (min(step, samples - start), draws))
        totals = blocks[rows].sum(1)
        drawn[start : start + step] = totals[:, :-1] / totals[:, -1:]
    return drawn


def _circular_sums(rows: np.ndarray, length: int) -> np.ndarray:
    """Sums of `length` consecutive rows from each row on, wrapping round: same shape as `rows`."""
    return sum((np.roll(rows, -shift, axis=0) for shift in range(length)), np.zeros_like(rows))


@lru_cache
def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for whole degrees of freedom; `probability` in [0.5, 1).

    By bisection of the distribution function in closed form, Abramowitz and Stegun 26.7.3 and .4.
    """
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if _student_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    series = 0.0 if freedom == 1 else term
    for index in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (index - 1) / index
        series += term
    central = (angle + sine * series) * 2 / math.pi if odd else sine * series
    return 0.5 + central / 2
