"""One pass of the same windows through a teacher and its candidates, to sums per window.

All losses and divergences are in nats. The last `scored` tokens of a window are scored, each by the
logits of the position before it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel

from bilinearize.eval.windows import Window
from bilinearize.model.errors import InputError


@dataclass
class Sums:
    """What one model leaves of a pass: float64 sums, one row a window, in the order of the text."""

    nll: list[float] = field(default_factory=list)
    """Negative log-likelihood of each window's scored tokens."""
    by_position: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """(longest window - 1,), the same summed over the windows, by tokens of context less 1."""

    def add_positions(self, sums: np.ndarray, first: int = 0) -> None:
        """Add sums for the positions from `first` on."""
        missing = first + len(sums) - len(self.by_position)
        if missing > 0:
            self.by_position = np.pad(self.by_position, (0, missing))
        self.by_position[first : first + len(sums)] += sums

    def extend(self, other: "Sums") -> None:
        """Append the windows of a later part of the text."""
        self.nll += other.nll
        self.add_positions(other.by_position)


@dataclass
class CandidateSums(Sums):
    """A candidate's sums, and what its comparison with the teacher leaves."""

    kl: list[float] = field(default_factory=list)
    """KL(teacher || candidate), summed over each window's scored positions."""
    kl_tokens: list[np.ndarray] = field(default_factory=list)
    """The same, one float32 (scored,) each, for exact quantiles."""
    top1: list[int] = field(default_factory=list)
    """Positions at which the candidate too gives no token more than the teacher's first choice."""
    top5: list[int] = field(default_factory=list)
    """Positions at which the teacher's first choice is among the candidate's first five."""
    change: list[float] = field(default_factory=list)
    """Sum of squares of the change in the probability of the right token."""

    def extend(self, other: "Sums") -> None:
        super().extend(other)
        assert isinstance(other, CandidateSums)
        for name in ("kl", "kl_tokens", "top1", "top5", "change"):
            getattr(self, name).extend(getattr(other, name))


@dataclass
class Pass:
    """What a pass over windows leaves of all models."""

    teacher: Sums
    candidates: dict[str, CandidateSums]

    def extend(self, other: "Pass") -> None:
        """Append the windows of a later part of the text."""
        self.teacher.extend(other.teacher)
        for name, sums in self.candidates.items():
            sums.extend(other.candidates[name])

    @classmethod
    def empty(cls, candidates: Mapping[str, object]) -> "Pass":
        """No windows yet."""
        return cls(Sums(), {name: CandidateSums() for name in candidates})


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
    windows: Sequence[Window],
    vocabulary: int,
    batch_size: int = 1,
    name: str | None = "eval",
    first: int = 0,
    total: int | None = None,
) -> Pass:
    """Run the windows through all models, each model once per window.

    Beyond the models it holds the logits of `batch_size` windows of the teacher and of one
    candidate, and one scalar per token and candidate.

    Args:
        vocabulary: logits compared; those beyond are left out.
        name: of the text, for the progress bar; None for no bar.
        first: number of the first window, from 0, where these are a part of `total` windows.

    Raises:
        InputError: if logits are not finite, naming the window and the model.
    """
    device, done = teacher.device, Pass.empty(candidates)
    total = len(windows) if total is None else total
    positions = max((window.scored for window in windows), default=1)
    scorer = Scorer(vocabulary, positions, device)
    number = first
    # One bar where several processes share the windows.
    quiet = first > 0 or name is None
    bar = tqdm(total=len(windows), desc=name, unit="window", file=sys.stderr, disable=quiet)
    with bar:
        for batch in same_shape(windows, batch_size):
            place = f"of {total}" + (f" in {name}" if name else " that were written")
            where = [f"window {number + row} {place}" for row in range(1, len(batch) + 1)]
            _score_batch(done, scorer, teacher, candidates, batch, where)
            number += len(batch)
            bar.update(len(batch))
    return done


def same_shape(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Batches of neighbours of one length that score as many tokens."""
    batch: list[Window] = []
    for window in windows:
        shape = (len(window.ids), window.scored)
        if batch and (len(batch) == batch_size or shape != (len(batch[0].ids), batch[0].scored)):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _score_batch(
    done: Pass,
    scorer: Scorer,
    teacher: PreTrainedModel,
    candidates: Mapping[str, PreTrainedModel],
    batch: list[Window],
    where: list[str],
) -> None:
    ids = torch.stack([window.ids for window in batch]).to(teacher.device)
    scored = batch[0].scored
    start = ids.shape[1] - 1 - scored
    inputs, targets = ids[:, :-1], ids[:, -scored:]
    logits = _logits(teacher, inputs)[:, start:]
    scores = [scorer.score(rows, right) for rows, right in zip(logits, targets, strict=True)]
    for each, place in zip(scores, where, strict=True):
        _add(done.teacher, each, start, f"the teacher, {place}")
    for name, model in candidates.items():
        sums, theirs = done.candidates[name], _logits(model, inputs)[:, start:]
        for row, place in enumerate(where):
            own = scorer.score(theirs[row], targets[row])
            _add(sums, own, start, f"{name}, {place}")
            _compare(sums, scorer, logits[row], theirs[row], scores[row], own)
        del theirs  # before the next candidate's are made


def _logits(model: PreTrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    return model(input_ids=inputs, use_cache=False).logits


def _add(sums: Sums, scores: Scores, start: int, where: str) -> None:
    if not scores.nll.isfinite().all():
        raise InputError(
            f"{where}: the logits are not finite (NaN or overflow); check the checkpoint, "
            "or evaluate with dtype float32."
        )
    sums.nll.append(float(scores.nll.sum()))
    sums.add_positions(scores.nll.numpy(), start)


def _compare(
    sums: CandidateSums,
    scorer: Scorer,
    teacher_logits: torch.Tensor,
    logits: torch.Tensor,
    teacher: Scores,
    own: Scores,
) -> None:
    kl, rank = scorer.diverge(teacher_logits, logits, teacher, own)
    sums.kl.append(float(kl.sum()))
    sums.kl_tokens.append(kl.float().numpy())
    sums.top1.append(int((rank == 0).sum()))
    sums.top5.append(int((rank < 5).sum()))
    sums.change.append(float(((-own.nll).exp() - (-teacher.nll).exp()).square().sum()))
