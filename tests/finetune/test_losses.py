"""The chunked loss against the formula written out in float64."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bilinearize.finetune.losses import LossWeights, loss_sums

TOKENS, SIZE, VOCABULARY = 23, 8, 101


def case(seed: int = 0):
    """Hidden states of student and teacher, their heads, labels; all float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    heads = [nn.Linear(SIZE, VOCABULARY, bias=False).double() for _ in range(2)]
    for head in heads:
        head.weight.data = draw(VOCABULARY, SIZE)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return draw(TOKENS, SIZE).requires_grad_(), draw(TOKENS, SIZE), heads, labels


def written_out(hidden, head, labels, teacher_hidden, teacher_head, weights):
    """The same loss as one sum over probabilities."""
    heat = weights.temperature
    p = (teacher_head(teacher_hidden) / heat).softmax(-1).detach()
    q = (head(hidden) / heat).softmax(-1)
    kl = (p * (p.log() - q.log())).sum()
    cross_entropy = -head(hidden).softmax(-1).log()[torch.arange(TOKENS), labels].sum()
    return weights.kl * heat**2 * kl + weights.cross_entropy * cross_entropy, kl, cross_entropy


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize(
    "weights", [LossWeights(1, 0, 1), LossWeights(0.7, 0.3, 2), LossWeights(0, 1, 1)]
)
def test_chunks_equal_the_formula(chunk, weights):
    hidden, theirs, (head, teacher_head), labels = case()
    total, parts = loss_sums(hidden, head, labels, theirs, teacher_head, weights, chunk)
    (3 * total).backward()  # any factor after it, as Trainer puts one
    ours = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    expected, kl, cross_entropy = written_out(hidden, head, labels, theirs, teacher_head, weights)
    (3 * expected).backward()
    assert torch.allclose(total, expected, rtol=1e-12)
    assert torch.allclose(parts[:2], torch.stack([kl, cross_entropy]), rtol=1e-12)
    assert torch.allclose(ours[0], hidden.grad, rtol=1e-9, atol=1e-12)
    assert torch.allclose(ours[1], head.weight.grad, rtol=1e-9, atol=1e-12)


def test_gradient_check_sees_a_wrong_temperature():
    hidden, theirs, (head, teacher_head), labels = case()
    right, wrong = LossWeights(1, 0, 2), LossWeights(1, 0, 1)
    total, _ = loss_sums(hidden, head, labels, theirs, teacher_head, wrong, 7)
    expected, _, _ = written_out(hidden, head, labels, theirs, teacher_head, right)
    assert not torch.allclose(total, expected, rtol=0.01)


def test_kl_of_a_model_to_itself_is_zero():
    hidden, theirs, (head, teacher_head), labels = case()
    weights = LossWeights(1, 0, 1)
    same, parts = loss_sums(hidden, head, labels, hidden.detach(), head, weights, 7)
    other, _ = loss_sums(hidden, head, labels, theirs, teacher_head, weights, 7)
    assert abs(same.item()) < 1e-12 < other.item()
    assert parts[1] == parts[2]


def test_a_frozen_head_gets_no_gradient_and_no_tokens_are_a_zero_loss():
    hidden, theirs, (head, teacher_head), labels = case()
    head.requires_grad_(False)
    weights = LossWeights(1, 0, 1)
    loss_sums(hidden, head, labels, theirs, teacher_head, weights, 7)[0].backward()
    assert head.weight.grad is None and hidden.grad.abs().sum() > 0
    hidden.grad = None
    total, _ = loss_sums(hidden[:0], head, labels[:0], theirs[:0], teacher_head, weights, 7)
    total.backward()
    assert total == 0 and hidden.grad.abs().sum() == 0


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_exist_for_one_chunk_at_a_time():
    hidden, theirs, (head, teacher_head), labels = case()
    seen = {}
    for chunk in (4, TOKENS):
        with Largest() as largest:
            args = hidden, head, labels, theirs, teacher_head, LossWeights(1, 1, 1), chunk
            loss_sums(*args)[0].backward()
        seen[chunk] = largest.elements
    assert seen[4] <= max(4, SIZE) * VOCABULARY  # a chunk of logits, or the head's gradient
    assert seen[TOKENS] == TOKENS * VOCABULARY
