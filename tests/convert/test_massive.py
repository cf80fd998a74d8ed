"""What the targets become: massive activations are cut, drift is made up for in part."""

import torch

from bilinearize.convert.stream import ALIKE, DRIFT, MASSIVE, Batch, Stream

HIDDEN = 16


def stream(before: torch.Tensor, limit: float) -> Stream:
    """A stream with no more than `shrink` reads: the teacher's power before the MLP, the limit."""
    made = object.__new__(Stream)
    made.before, made.limit = before, limit
    return made


def power(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True)


def tokens(*sizes: float) -> torch.Tensor:
    """(1, tokens, HIDDEN) random directions of these root mean squares."""
    directions = torch.randn(1, len(sizes), HIDDEN, generator=torch.Generator().manual_seed(0))
    return directions / power(directions).sqrt() * torch.tensor(sizes)[None, :, None]


def test_only_massive_tokens_are_cut_and_to_the_limit():
    residual, target = tokens(1, 1, 1), tokens(0.5, 3, 4000).flip(-1)
    made = stream(power(residual), MASSIVE**2)
    factor = made.shrink(Batch(slice(0, 1), False, residual, residual), target)
    assert torch.equal(factor[0, :2], torch.ones(2, 1))
    size = power(residual + factor * target).sqrt()[0, 2]
    assert abs(size - MASSIVE) < 1.5  # to within the residual itself
    # The direction is what the teacher writes: nearly that of the target.
    after = (residual + factor * target)[0, 2]
    assert torch.cosine_similarity(after, target[0, 2], 0) > 0.99


def test_what_takes_a_massive_activation_back_shrinks_with_it():
    teacher = tokens(4000, 1)
    student = teacher * torch.tensor([0.01, 0.9])[None, :, None]
    made = stream(power(teacher), MASSIVE**2 * 100)
    factor = made.shrink(Batch(slice(0, 1), False, student, student), -0.5 * teacher)
    torch.testing.assert_close(factor[0, :, 0], torch.tensor([0.01, 1.0]))
    # Uncut, the student's state would be turned around.
    assert torch.cosine_similarity(student - 0.5 * teacher, teacher, -1)[0, 0] < -0.9
    left = student + factor * -0.5 * teacher
    assert torch.cosine_similarity(left, teacher, -1)[0, 0] > 0.99


def test_a_share_of_the_drift_is_made_up_for_where_states_are_alike():
    teacher = tokens(1, 1, 1, 1)
    sizes = torch.tensor([1.1, 1.1, 1.1 * ALIKE, 0.9 / ALIKE])[None, :, None]
    student = teacher * sizes + tokens(0.01, 0.01, 0.01, 0.01).flip(-1)
    after, target = tokens(2, 2, 2, 2).flip(1), tokens(3, 3, 3, 3).flip(2)
    made = stream(power(teacher), MASSIVE**2)
    made.teacher = after
    made.massive = torch.tensor([False, True, False, False])[None, :, None]
    found = made.undo_drift(Batch(slice(0, 1), False, student, student), target)
    # The first token's state comes the share nearer to the teacher's, in a straight line.
    lacking = after - (student + target)
    left = after - (student + found)
    torch.testing.assert_close(left[0, 0], (1 - DRIFT) * lacking[0, 0])
    assert 0 < DRIFT < 1
    # A massive one, and those of another size, keep their target.
    assert torch.equal(found[0, 1:], target[0, 1:])
