"""Sums to numbers: perplexity, gap, divergence and agreement, with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bilinearize.eval.scores import CandidateSums, Pass, Sums
from bilinearize.eval.statistics import Estimates, bootstrap_intervals, combine
from bilinearize.eval.windows import Slice, Window


@dataclass
class Counts:
    """What sums over windows are divided by."""

    tokens: int
    bytes: int
    words: int | None
    positions: np.ndarray
    """(longest window - 1,): how many windows score a position."""


def summarise(
    slices: Sequence[Slice], passes: Sequence[Pass], samples: int, seed: int
) -> tuple[dict, list[dict]]:
    """The numbers of all slices together, and of each, as they stand in `eval.json`.

    Every interval of a slice comes from the same resamples of its windows or documents.

    Returns:
        Dicts with `teacher` and `candidates`.
    """
    estimates = [
        estimate(part, done, samples, seed) for part, done in zip(slices, passes, strict=True)
    ]
    counts = [count(part) for part in slices]
    records = [
        _records(done, each, numbers)
        for done, each, numbers in zip(passes, estimates, counts, strict=True)
    ]
    if len(slices) == 1:
        return records[0], records
    whole = Pass.empty(passes[0].candidates)
    for done in passes:
        whole.extend(done)
    together = combine(estimates, [part.tokens for part in slices])
    return _records(whole, together, add(counts)), records


def estimate(part: Slice, done: Pass, samples: int, seed: int) -> Estimates:
    """Columns: the teacher's loss, then loss, gap and KL of each candidate."""
    teacher_nll = np.array(done.teacher.nll)
    columns = [teacher_nll]
    for sums in done.candidates.values():
        nll = np.array(sums.nll)
        columns += [nll, nll - teacher_nll, np.array(sums.kl)]
    rows = np.column_stack([*columns, [window.scored for window in part.windows]])
    documents = [window.document for window in part.windows]
    apart = documents[0] is not None
    if apart:
        starts = [i for i in range(len(rows)) if i == 0 or documents[i] != documents[i - 1]]
        rows = np.add.reduceat(rows, starts, axis=0)
    return bootstrap_intervals(rows[:, :-1], rows[:, -1], samples, seed, dependent=not apart)


def count(part: Slice) -> Counts:
    """What a slice's sums are over."""
    longest = max(len(window.ids) for window in part.windows) - 1
    positions = np.zeros(longest, dtype=int)
    for window in part.windows:
        positions[_scored(window)] += 1
    return Counts(part.tokens, part.bytes, part.words, positions)


def _scored(window: Window) -> slice:
    end = len(window.ids) - 1
    return slice(end - window.scored, end)


def add(counts: Sequence[Counts]) -> Counts:
    """What sums over all slices are over."""
    positions = np.zeros(max(len(each.positions) for each in counts), dtype=int)
    for each in counts:
        positions[: len(each.positions)] += each.positions
    words = [each.words for each in counts if each.words is not None]
    return Counts(
        sum(each.tokens for each in counts),
        sum(each.bytes for each in counts),
        sum(words) if len(words) == len(counts) else None,
        positions,
    )


def _records(done: Pass, estimates: Estimates, counts: Counts) -> dict:
    value, interval = estimates.value, estimates.interval
    candidates = {}
    for index, (name, sums) in enumerate(done.candidates.items()):
        own, gap, kl = (3 * index + offset for offset in (1, 2, 3))
        candidates[name] = {
            **_model_numbers(sums, value[own], interval(own), counts),
            "gap": float(value[gap]),
            "gap_interval": interval(gap),
            "ratio": exponential(value[gap]),
            "ratio_interval": _exponentials(interval(gap)),
            "kl_interval": interval(kl),
            **_comparison_numbers(sums, counts.tokens),
        }
    teacher = _model_numbers(done.teacher, value[0], interval(0), counts)
    return {"teacher": teacher, "candidates": candidates}


def _model_numbers(sums: Sums, nll: float, interval: list[float] | None, counts: Counts) -> dict:
    total = math.fsum(sums.nll)
    by_position = [
        float(each) / int(number) if number else None
        for each, number in zip(sums.by_position, counts.positions, strict=True)
    ]
    return {
        "nll": float(nll),
        "nll_interval": interval,
        "perplexity": exponential(nll),
        "perplexity_interval": _exponentials(interval),
        "bits_per_byte": total / math.log(2) / counts.bytes if counts.bytes else None,
        "byte_perplexity": exponential(total / counts.bytes) if counts.bytes else None,
        "word_perplexity": exponential(total / counts.words) if counts.words else None,
        "nll_by_position": by_position,
    }


def _comparison_numbers(sums: CandidateSums, tokens: int) -> dict:
    divergence = np.concatenate(sums.kl_tokens)
    return {
        "kl": math.fsum(sums.kl) / tokens,
        "kl_median": float(np.median(divergence)),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "kl_max": float(divergence.max()),
        "kl_histogram": kl_histogram(divergence),
        "top1_agreement": sum(sums.top1) / tokens,
        "top5_agreement": sum(sums.top5) / tokens,
        "probability_change_rms": math.sqrt(math.fsum(sums.change) / tokens),
    }


# Ten bins a decade; what lies below the first edge is counted with the first bin.
KL_EDGES = np.logspace(-6, 2, 81)


def kl_histogram(divergence: np.ndarray) -> list[int]:
    """How many tokens have a KL within each pair of neighbours in `KL_EDGES`."""
    clipped = np.clip(divergence, KL_EDGES[0], KL_EDGES[-1])
    return np.histogram(clipped, KL_EDGES)[0].tolist()


def exponential(nats: float) -> float | None:
    """exp, or None where that overflows."""
    return math.exp(nats) if nats < 700 else None


def _exponentials(interval: list[float] | None) -> list[float | None] | None:
    return None if interval is None else [exponential(end) for end in interval]
