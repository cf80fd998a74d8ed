"""The closed forms against float64 least squares written out independently."""

import pytest
import torch

from bilinearize.convert.block import term_features
from bilinearize.convert.fit import (
    GATE_RIDGE,
    NO_CORRECTION,
    AffineSums,
    GateSums,
    LinearSums,
    refit,
)

CPU = torch.device("cpu")


def tokens(count: int, seed: int = 0):
    """gate, up, target (count, 5) and positive weights (count, 1)."""
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(count, 5, generator=generator) * 2 + 0.5
    up = torch.randn(count, 5, generator=generator) + 0.3
    weight = torch.rand(count, 1, generator=generator) + 0.1
    return gate, up, torch.nn.functional.silu(gate) * up, weight


def test_affine_gates_are_weighted_least_squares():
    gate, up, target, weight = tokens(300)
    sums = AffineSums(5, CPU)
    for rows in (slice(0, 100), slice(100, 300)):  # sums over parts add up
        sums.add(gate[rows], up[rows], target[rows], weight[rows])
    slope, intercept = sums.solve()
    for j in range(5):
        root = weight[:, 0].double().sqrt()
        design = torch.stack([gate[:, j] * up[:, j], up[:, j]], 1).double() * root[:, None]
        expected = torch.linalg.lstsq(design, target[:, j].double() * root).solution
        torch.testing.assert_close(
            torch.stack([slope[j], intercept[j]]), expected, rtol=1e-5, atol=1e-6
        )


def test_affine_gates_of_degenerate_slots_are_finite():
    gate, up, target, weight = tokens(50)
    gate[:, 0] = 0.7  # constant gate: g u and u are collinear
    up[:, 1] = 0  # never fires
    target = torch.nn.functional.silu(gate) * up
    sums = AffineSums(5, CPU)
    sums.add(gate, up, target, weight)
    slope, intercept = sums.solve()
    assert torch.isfinite(slope).all() and torch.isfinite(intercept).all()
    approximation = (slope * gate[:, 0:1].double() + intercept)[:, 0]
    torch.testing.assert_close(
        approximation, torch.nn.functional.silu(gate[:, 0]).double(), rtol=1e-4, atol=1e-4
    )
    assert slope[1] == intercept[1] == 0


def test_joint_gates_are_least_squares_towards_the_output():
    gate, up, target, weight = (part.double() for part in tokens(200))
    generator = torch.Generator().manual_seed(7)
    down = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    output = target @ down.T + 0.1 * torch.randn(200, 3, generator=generator, dtype=torch.float64)
    start = torch.tensor([[0.5], [0.0]], dtype=torch.float64).repeat(1, 5)
    sums = GateSums(5, 2, 3, CPU)
    sums.add(term_features(gate, up, 2), output, weight)
    bias = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    found = sums.solve(down, bias, start)
    # The same as one design matrix: a row for each token and output, a column for each unknown.
    features = torch.cat([gate * up, up], 1)
    columns = down.repeat(1, 2)
    design = (features[:, None, :] * columns * weight.sqrt()[:, :, None]).flatten(0, 1)
    wanted = ((output - bias) * weight.sqrt()).flatten() - design @ start.flatten()
    scale = design.square().sum(0).sqrt()
    padded = torch.cat([design / scale, GATE_RIDGE**0.5 * torch.eye(10).double()])
    step = (
        torch.linalg.lstsq(padded, torch.cat([wanted, torch.zeros(10).double()])).solution / scale
    )
    torch.testing.assert_close(found, start + step.view(2, 5))


def linear_problem(count: int, seed: int, noise: float):
    """features (count, 6), residual (count, 3), weight; a true linear map plus noise."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 6, generator=generator)
    truth = torch.randn(6, 3, generator=torch.Generator().manual_seed(99))
    residual = features @ truth + 0.5 + noise * torch.randn(count, 3, generator=generator)
    return features, residual, torch.rand(count, 1, generator=generator) + 0.1


def sums_of(features, residual, weight) -> LinearSums:
    sums = LinearSums(6, 3, CPU)
    sums.add(features, residual, residual, weight)
    return sums


@pytest.mark.parametrize("ridge", [1e-4, 0.3])
def test_correction_is_scaled_ridge_regression(ridge):
    features, residual, weight = linear_problem(200, 1, 0.1)
    root = weight.double().sqrt()
    design = torch.cat([features.double(), torch.ones(200, 1, dtype=torch.float64)], 1) * root
    scale = design.square().sum(0).sqrt()
    # Ridge as rows appended to the scaled design: an independent way to the same minimum.
    padded = torch.cat([design / scale, ridge**0.5 * torch.eye(7, dtype=torch.float64)])
    target = torch.cat([residual.double() * root, torch.zeros(7, 3, dtype=torch.float64)])
    expected = torch.linalg.lstsq(padded, target).solution / scale[:, None]
    found = sums_of(features, residual, weight).solve(ridge)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_error_is_the_weighted_share_left():
    features, residual, weight = linear_problem(200, 1, 0.1)
    sums = sums_of(features, residual, weight)
    correction = sums.solve(0.1)
    left = residual - features @ correction[:-1].float() - correction[-1].float()
    expected = (weight * left.square()).sum() / (weight * residual.square()).sum()
    assert sums.error(correction) == pytest.approx(expected.item(), rel=1e-3)


def test_refit_generalises_where_there_is_something_to_learn():
    solved = refit(sums_of(*linear_problem(300, 1, 0.1)), sums_of(*linear_problem(100, 2, 0.1)))
    assert solved.heldout_error < 0.1 * solved.uncorrected_error
    assert solved.ridge < 0.1


def test_refit_of_pure_noise_is_never_worse_than_none():
    generator = torch.Generator().manual_seed(3)

    def noise(count):
        features = torch.randn(count, 6, generator=generator)
        return sums_of(features, torch.randn(count, 3, generator=generator), torch.ones(count, 1))

    for _ in range(20):
        fitted, heldout = noise(9), noise(9)
        solved = refit(fitted, heldout)
        assert solved.heldout_error <= solved.uncorrected_error
        if solved.ridge == NO_CORRECTION:
            assert not solved.correction().any()
        # Negative control: the smallest ridge overfits.
        assert heldout.error(fitted.solve(1e-4)) > solved.heldout_error
