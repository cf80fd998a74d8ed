"""KL and cross-entropy over a large vocabulary, a chunk of tokens at a time.

Shapes: n tokens, d hidden size, v vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LossWeights:
    """What the loss of one token is, in nats:
    `kl * temperature^2 * KL_T + cross_entropy * CE + hidden * (the layers' mean error)`."""

    kl: float
    cross_entropy: float
    temperature: float
    hidden: float = 0.0
    target: str = "state"
    """What the error of a layer compares: the `state` after it, or the output of its `mlp`."""
    layers: tuple[float, ...] = ()
    """Weight of each layer; empty weighs all alike."""
    bound: float = 0.0
    """Where the penalty on the slots' scores begins; 0 is no penalty."""
    range: float = 0.0
    """Weight of that penalty."""

    @property
    def need_teacher(self) -> bool:
        """Whether the loss compares with a teacher."""
        return self.kl > 0 or self.hidden > 0


@dataclass(frozen=True)
class TopTokens:
    """A teacher's likeliest k tokens at n positions."""

    values: torch.Tensor
    """(n, k) log-probabilities at the loss's temperature."""
    tokens: torch.Tensor
    """int64 (n, k)."""
    labels: torch.Tensor
    """(n) log-probabilities of the tokens that follow, at temperature 1."""

    def part(self, rows: slice) -> "TopTokens":
        """These rows of it."""
        return TopTokens(self.values[rows], self.tokens[rows], self.labels[rows])

    def kl(self, log_student: torch.Tensor) -> torch.Tensor:
        """The summed KL over k + 1 outcomes, the last being all other tokens together; at most the
        KL over all tokens.

        Args:
            log_student: (n, v) log-probabilities.
        """
        ours = log_student.gather(1, self.tokens)
        tails = []
        for logs in (ours, self.values):
            rest = -torch.expm1(torch.logsumexp(logs, 1))
            tails.append(rest.clamp(min=torch.finfo(logs.dtype).eps))
        share = self.values.exp()
        kl = (share * (self.values - ours)).sum()
        return kl + (tails[1] * (tails[1].log() - tails[0].log())).sum()


def loss_sums(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor,
    teacher_hidden: torch.Tensor | None,
    teacher_head: nn.Module | None,
    weights: LossWeights,
    chunk: int,
    top: TopTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over tokens of the loss and of its parts.

    Logits exist for `chunk` tokens at a time. The gradient is taken chunk by chunk in the forward
    pass (the loss is a plain sum, so it only has to be scaled later), which needs no second pass
    through the heads, as in Liger Kernel (arXiv 2410.10989).

    Args:
        hidden, teacher_hidden: (n, d) what the heads read; no teacher, no KL.
        head, teacher_head: modules from (n, d) to logits (n, v).
        labels: int64 (n), the token that follows each position.
        top: what is known of a teacher in place of its hidden states.

    Returns:
        The weighted sum (scalar, differentiable in `hidden` and the parameters of `head`), and the
        unweighted sums (3): KL at the temperature, cross-entropy, the teacher's cross-entropy.
        All are 0, and no logits are made, where neither KL nor cross-entropy has a weight and a
        gradient is wanted.
    """
    if torch.is_grad_enabled() and not (weights.kl or weights.cross_entropy):
        zeros = hidden.new_zeros(4, dtype=torch.promote_types(hidden.dtype, torch.float32))
        return zeros[0], zeros[1:]

    def chunk_loss(part: slice, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        teacher = None
        if teacher_hidden is not None and teacher_head is not None:
            with torch.no_grad():
                teacher = _logits(teacher_head, teacher_hidden[part])
        known = None if top is None else top.part(part)
        return _token_losses(_logits(head, piece), teacher, labels[part], weights, known)

    parameters = [p for p in head.parameters() if p.requires_grad]
    train = torch.is_grad_enabled()
    return _ChunkedSum.apply(chunk_loss, chunk, train, hidden, *parameters)


def range_excess(
    scores: list[torch.Tensor], counts: torch.Tensor, bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the slots' scores exceed a bound, and the largest.

    Args:
        scores: (batch, length, slots) of each layer.
        counts: bool (batch, length - 1): which of the positions but the last count.

    Returns:
        The mean over layers and slots of `relu(|score| / bound - 1)^2`, summed over the tokens that
        count; and the largest |score| among these (no gradient).
    """
    total = torch.zeros((), dtype=torch.float32, device=counts.device)
    largest = torch.zeros((), dtype=torch.float32, device=counts.device)
    for score in scores:
        size = score[:, :-1][counts].abs().float()
        total = total + F.relu(size / bound - 1).square().mean(-1).sum()
        if size.numel():
            largest = torch.maximum(largest, size.detach().amax())
    return total / max(len(scores), 1), largest


def layer_errors(
    ours: list[torch.Tensor],
    theirs: list[torch.Tensor],
    streams: list[torch.Tensor],
    counts: torch.Tensor,
    layers: tuple[float, ...],
) -> torch.Tensor:
    """The mean over layers of |ours - theirs|^2 / |stream|^2, summed over the tokens that count.

    Dividing token by token keeps the few tokens with massive activations from being all there is.

    Args:
        ours, theirs: (batch, length, d) each: what is compared in each layer.
        streams: (batch, length, d) each: the teacher's residual stream after each layer.
        counts: bool (batch, length - 1): which of the positions but the last count.
        layers: the weight of each layer, or none.

    Raises:
        ValueError: if there are not as many weights as layers.
    """
    if layers and len(layers) != len(ours):
        raise ValueError(f"{len(layers)} layer weights for {len(ours)} layers")
    total = torch.zeros((), dtype=torch.float32, device=counts.device)
    for index, (our, their, stream) in enumerate(zip(ours, theirs, streams, strict=True)):
        weight = layers[index] if layers else 1.0
        if weight:
            our, their, stream = (x[:, :-1][counts] for x in (our, their, stream))
            our, their, stream = (
                x.to(torch.promote_types(x.dtype, total.dtype)) for x in (our, their, stream)
            )
            power = stream.square().sum(-1).clamp(min=1e-12)
            total = total + weight * ((our - their).square().sum(-1) / power).sum()
    return total / len(ours)


def _logits(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    logits = head(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _token_losses(
    student: torch.Tensor,
    teacher: torch.Tensor | None,
    labels: torch.Tensor,
    weights: LossWeights,
    top: TopTokens | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, v), (n, v) and labels (n) to the weighted sum and the three sums."""
    heat = weights.temperature
    kl = teacher_cross_entropy = student.new_zeros(())
    log_student = None
    if teacher is not None:
        log_teacher = F.log_softmax(teacher, -1)
        teacher_cross_entropy = F.nll_loss(log_teacher, labels, reduction="sum")
        warm, log_warm = student, log_teacher
        if heat != 1:
            warm, log_warm = student / heat, F.log_softmax(teacher / heat, -1)
        kl, log_student = _Divergence.apply(warm, log_warm)
    if log_student is None or heat != 1 or weights.cross_entropy:
        log_student = F.log_softmax(student, -1)
    cross_entropy = F.nll_loss(log_student, labels, reduction="sum")
    if top is not None:
        kl = top.kl(F.log_softmax(student / heat, -1) if heat != 1 else log_student)
        teacher_cross_entropy = -top.labels.sum()
    loss = weights.kl * heat**2 * kl + weights.cross_entropy * cross_entropy
    return loss, torch.stack([kl, cross_entropy, teacher_cross_entropy]).detach()


class _Divergence(torch.autograd.Function):
    """KL(teacher || student) summed over tokens, and the student's log-probabilities.

    Its gradient, the difference of the two distributions, is taken along the way: a fifth of the
    passes over (n, v) that autograd makes.
    """

    @staticmethod
    def forward(
        ctx: Any, student: torch.Tensor, log_teacher: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_student, teacher = F.log_softmax(student, -1), log_teacher.exp()
        kl = (log_teacher - log_student).mul_(teacher).sum()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(log_student.exp().sub_(teacher))
        ctx.mark_non_differentiable(log_student)
        return kl, log_student

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Any, ...]:
        return outputs[0] * ctx.saved_tensors[0], None


class _ChunkedSum(torch.autograd.Function):
    """Sum `chunk_loss` over chunks of the rows of `hidden`, its gradient taken along the way."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_loss: Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        chunk: int,
        train: bool,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total, parts = hidden.new_zeros((), dtype=dtype), hidden.new_zeros(3, dtype=dtype)
        gradients = [torch.zeros_like(x) for x in (hidden, *parameters)] if train else []
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(train):
                piece = hidden[part].detach().requires_grad_(train)
                loss, terms = chunk_loss(part, piece)
            if train:
                first, *rest = torch.autograd.grad(loss, [piece, *parameters])
                gradients[0][part] = first
                for sum_, gradient in zip(gradients[1:], rest, strict=True):
                    sum_ += gradient
            total += loss.detach()
            parts += terms
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(parts)
        return total, parts

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Any, ...]:
        return None, None, None, *(outputs[0] * gradient for gradient in ctx.saved_tensors)
