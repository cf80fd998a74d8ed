"""Sums to numbers: perplexity, gap, divergence and agreement, with their intervals."""

import math
from collections.abc import Mapping

import numpy as np

from bilinearize.eval.scores import CandidateSums, Sums
from bilinearize.eval.statistics import bootstrap_intervals


def summarise(
    teacher: Sums,
    candidates: Mapping[str, CandidateSums],
    positions: int,
    text_bytes: int,
    samples: int,
    seed: int,
) -> tuple[dict, dict[str, dict]]:
    """The teacher's numbers and each candidate's, as they stand in `eval.json`.

    Every interval comes from the same resamples of the windows.

    Args:
        positions: scored positions per window.
        text_bytes: UTF-8 bytes of the scored text; 0 leaves bits per byte out.
    """
    teacher_nll = np.array(teacher.nll)
    columns = [teacher_nll]
    for sums in candidates.values():
        nll = np.array(sums.nll)
        columns += [nll, nll - teacher_nll, np.array(sums.kl)]
    counts = np.full(len(teacher_nll), positions)
    estimates = bootstrap_intervals(np.stack(columns, axis=1), counts, samples, seed)
    value, interval = estimates.value, estimates.interval
    records = {}
    for index, (name, sums) in enumerate(candidates.items()):
        own, gap, kl = (3 * index + offset for offset in (1, 2, 3))
        records[name] = {
            **_model_numbers(sums, value[own], interval(own), text_bytes),
            "gap": float(value[gap]),
            "gap_interval": interval(gap),
            "ratio": exponential(value[gap]),
            "ratio_interval": _exponentials(interval(gap)),
            "kl_interval": interval(kl),
            **_comparison_numbers(sums, positions),
        }
    return _model_numbers(teacher, value[0], interval(0), text_bytes), records


def _model_numbers(sums: Sums, nll: float, interval: list[float] | None, text_bytes: int) -> dict:
    return {
        "nll": float(nll),
        "nll_interval": interval,
        "perplexity": exponential(nll),
        "perplexity_interval": _exponentials(interval),
        "bits_per_byte": sum(sums.nll) / math.log(2) / text_bytes if text_bytes else None,
        "nll_by_position": (np.asarray(sums.by_position) / len(sums.nll)).tolist(),
    }


def _comparison_numbers(sums: CandidateSums, positions: int) -> dict:
    tokens = positions * len(sums.nll)
    divergence = np.stack(sums.kl_tokens)
    return {
        "kl": sum(sums.kl) / tokens,
        "kl_median": float(np.median(divergence)),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "kl_max": float(divergence.max()),
        "top1_agreement": sum(sums.top1) / tokens,
        "top5_agreement": sum(sums.top5) / tokens,
        "probability_change_rms": math.sqrt(sum(sums.change) / tokens),
    }


def exponential(nats: float) -> float | None:
    """exp, or None where that overflows."""
    return math.exp(nats) if nats < 700 else None


def _exponentials(interval: list[float] | None) -> list[float | None] | None:
    return None if interval is None else [exponential(end) for end in interval]
