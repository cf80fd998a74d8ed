"""One pass of the same windows through a teacher and its candidates, to sums per window.

All losses and divergences are in nats. A position is scored if the next token lies in its window,
so a window of W tokens has W - 1 scored positions.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel

from bilinearize.model.errors import InputError


@dataclass
class Sums:
    """What one model leaves of a pass: float64 sums, one row a window, in the order of the text."""

    nll: list[float] = field(default_factory=list)
    """Negative log-likelihood of each window's scored tokens."""
    by_position: np.ndarray | float = 0.0
    """(window - 1,), the same summed over the windows."""


@dataclass
class CandidateSums(Sums):
    """A candidate's sums, and what its comparison with the teacher leaves."""

    kl: list[float] = field(default_factory=list)
    """KL(teacher || candidate), summed over each window's scored positions."""
    kl_tokens: list[np.ndarray] = field(default_factory=list)
    """The same, one float32 (window - 1,) each, for exact quantiles."""
    top1: list[int] = field(default_factory=list)
    """Positions at which the candidate too gives no token more than the teacher's first choice."""
    top5: list[int] = field(default_factory=list)
    """Positions at which the teacher's first choice is among the candidate's first five."""
    change: list[float] = field(default_factory=list)
    """Sum of squares of the change in the probability of the right token."""


@dataclass
class Scores:
    """One model's scores of one window: float64 (positions,) on the CPU, but for `peak`."""

    peak: torch.Tensor
    """The highest logit, float32 on the device."""
    total: torch.Tensor
    """Sum of exp(logit - peak)."""
    log_total: torch.Tensor
    """Log of the sum of exp(logit)."""
    nll: torch.Tensor
    """Negative log-likelihood of the right token."""


class Scorer:
    """Reduces logits to scalars per position, a few rows at a time in two buffers of its own.

    Args:
        vocabulary: logits beyond this many are left out.
        positions: scored positions per window.
        device: where the logits lie.
    """

    def __init__(self, vocabulary: int, positions: int, device: torch.device):
        # Small chunks waste time on threads that wait for each other, above all on a busy machine,
        # and on a GPU's launches. Both buffers are at most a quarter of one window's logits.
        elements = 2**22 if device.type == "cpu" else 2**24
        self.rows = max(1, min(elements // vocabulary, positions // 8))
        self.vocabulary = vocabulary
        self.buffers = torch.empty(2, self.rows, vocabulary, device=device)

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> Scores:
        """Score logits (positions, at least vocabulary) against the right tokens (positions,)."""
        peaks, totals = [], []
        for start in range(0, len(logits), self.rows):
            rows = logits[start : start + self.rows, : self.vocabulary].float()
            peaks.append(rows.amax(-1))
            totals.append(self._exponentials(rows, peaks[-1]).sum(-1))
        peak, total = torch.cat(peaks), torch.cat(totals).cpu().double()
        log_total = peak.cpu().double() + total.log()
        right = logits.gather(1, targets[:, None])[:, 0].cpu().double()
        return Scores(peak, total, log_total, log_total - right)

    def diverge(
        self, teacher_logits: torch.Tensor, logits: torch.Tensor, teacher: Scores, own: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KL(teacher || candidate), and the rank that the candidate gives the teacher's choice.

        Returns:
            float64 (positions,) in nats; (positions,), how many logits are higher than that one.
        """
        choice = teacher_logits[:, : self.vocabulary].argmax(-1, keepdim=True)
        chosen = logits.gather(1, choice).float()
        weighted, ranks = [], []
        for start in range(0, len(logits), self.rows):
            rows = slice(start, start + self.rows)
            theirs = teacher_logits[rows, : self.vocabulary].float()
            mine = logits[rows, : self.vocabulary].float()
            weights = self._exponentials(theirs, teacher.peak[rows])
            difference = torch.sub(theirs, mine, out=self.buffers[1, : len(mine)])
            weighted.append(weights.mul_(difference).sum(-1))
            # Ones and zeros as float32: counting bools costs three times as much.
            ranks.append(torch.gt(mine, chosen[rows], out=difference).sum(-1))
        expected = torch.cat(weighted).cpu().double() / teacher.total
        # Equal models: the difference is 0 in every place, so the divergence is exactly 0.
        return expected - (teacher.log_total - own.log_total), torch.cat(ranks).cpu()

    def _exponentials(self, rows: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
        return torch.sub(rows, peak[:, None], out=self.buffers[0, : len(rows)]).exp_()


@torch.inference_mode()
def score_windows(
    teacher: PreTrainedModel,
    candidates: Mapping[str, PreTrainedModel],
    windows: torch.Tensor,
    vocabulary: int,
    batch_size: int = 1,
) -> tuple[Sums, dict[str, CandidateSums]]:
    """Run the windows through all models, each model once per window.

    Beyond the models it holds the logits of `batch_size` windows of the teacher and of one
    candidate, and one scalar per token and candidate.

    Args:
        windows: int64 (windows, window).
        vocabulary: logits compared; those beyond are left out.

    Raises:
        InputError: if logits are not finite, naming the window and the model.
    """
    device = teacher.device
    scorer = Scorer(vocabulary, windows.shape[1] - 1, device)
    teacher_sums = Sums()
    sums = {name: CandidateSums() for name in candidates}
    with tqdm(total=len(windows), desc="eval", unit="window", file=sys.stderr) as bar:
        for batch in windows.to(device).split(batch_size):
            where = [f"window {bar.n + row + 1} of {len(windows)}" for row in range(len(batch))]
            logits = _logits(teacher, batch)
            scored = [
                scorer.score(rows[:-1], ids[1:]) for rows, ids in zip(logits, batch, strict=True)
            ]
            for scores, place in zip(scored, where, strict=True):
                _add(teacher_sums, scores, f"the teacher, {place}")
            for name, model in candidates.items():
                places = [f"{name}, {place}" for place in where]
                _add_candidate(sums[name], scorer, model, batch, logits, scored, places)
            del logits  # before the next batch's are made
            bar.update(len(batch))
    return teacher_sums, sums


def _logits(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, use_cache=False).logits


def _add(sums: Sums, scores: Scores, where: str) -> None:
    if not scores.nll.isfinite().all():
        raise InputError(
            f"{where}: the logits are not finite (NaN or overflow); check the checkpoint, "
            "or evaluate with dtype float32."
        )
    sums.nll.append(float(scores.nll.sum()))
    sums.by_position = sums.by_position + scores.nll.numpy()


def _add_candidate(
    sums: CandidateSums,
    scorer: Scorer,
    model: PreTrainedModel,
    batch: torch.Tensor,
    teacher_logits: torch.Tensor,
    teacher_scores: list[Scores],
    places: list[str],
) -> None:
    logits = _logits(model, batch)
    for row, (ids, teacher) in enumerate(zip(batch, teacher_scores, strict=True)):
        own = scorer.score(logits[row, :-1], ids[1:])
        _add(sums, own, places[row])
        kl, rank = scorer.diverge(teacher_logits[row, :-1], logits[row, :-1], teacher, own)
        sums.kl.append(float(kl.sum()))
        sums.kl_tokens.append(kl.float().numpy())
        sums.top1.append(int((rank == 0).sum()))
        sums.top5.append(int((rank < 5).sum()))
        sums.change.append(float(((-own.nll).exp() - (-teacher.nll).exp()).square().sum()))
