"""Scores for a block with an activation on them, `sum_j act(score_j(x)) v_j`: residual fitting.

First slot by slot (nonlinear least squares with a free amplitude, by Levenberg and Marquardt's
method), then all slots together towards the layer's output by Gauss-Newton steps, each of which is
the linear problem that `fit.GateSums` solves.
"""

from typing import Any

import torch
from transformers.activations import ACT2FN

from bilinearize.convert.block import (
    TERMS,
    build_block,
    term_features,
    value_and_slope,
)
from bilinearize.convert.stream import Stream
from bilinearize.model.modeling_bilinear import BilinearMLP

SLOT_TOKENS = 2048
SLOTS_PER_CHUNK = 1024
# Root mean square of the scores that the search starts from: nearly linear, bent, and in between;
# each with both signs, since not every activation is odd.
STARTS = (0.1, 0.5, 2.0)
SLOT_STEPS = 10
JOINT_STEPS = 3


def fit_scores(
    stream: Stream, mlp: Any, gates: torch.Tensor, rank: int, activation: str
) -> BilinearMLP:
    """The block of this rank and activation, its down_proj that of `mlp` but for the amplitudes.

    `gates` (terms, m) are the coefficients fitted without an activation.
    """
    act = ACT2FN[activation]
    terms = TERMS[rank]
    start = gates.new_zeros(terms, gates.shape[1])
    start[: len(gates)] = gates
    x, _, weight = next(stream.shuffled(SLOT_TOKENS, seed=0))
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    found = [
        fit_slots(
            term_features(gate[:, slots], up[:, slots], terms).unflatten(1, (terms, -1)),
            mlp.act_fn(gate[:, slots]) * up[:, slots],
            weight,
            start[:, slots],
            act,
        )
        for slots in _chunks(gate.shape[1])
    ]
    coefficients = torch.cat([each[0] for each in found], 1)
    amplitude = torch.cat([each[1] for each in found])

    def block_of(coefficients: torch.Tensor) -> BilinearMLP:
        block = build_block(mlp, coefficients, rank, activation)
        block.down_proj.weight.mul_(amplitude)
        return block

    return _fit_together(stream, mlp, coefficients, block_of)


def _chunks(slots: int) -> list[slice]:
    return [slice(at, at + SLOTS_PER_CHUNK) for at in range(0, slots, SLOTS_PER_CHUNK)]


def fit_slots(
    features: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    start: torch.Tensor,
    act: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimise `sum_n w_n (t_nj - a_j act(sum_i c_ij f_nij))^2` for each slot j.

    Args:
        features: (tokens, terms, slots). target: (tokens, slots). weight: (tokens, 1).
        start: (terms, slots), where the search starts, up to a factor.

    Returns:
        The coefficients c, float64 (terms, slots), and the amplitudes a, float64 (slots).
    """
    root = weight.sqrt()
    target = target * root
    score = torch.einsum("nij,ij->nj", features, start.to(features.dtype))
    size = (score * root).square().sum(0) / weight.sum()
    unit = start * size.double().clamp_min(1e-30).rsqrt()
    starts = [sign * value * unit for value in STARTS for sign in (1, -1)]
    tried = [_amplitude(features, target, root, each, act) for each in starts]
    best = torch.stack([error for error, _ in tried]).argmin(0)
    coefficients = torch.stack(starts).gather(0, best.expand(1, len(start), -1))[0]
    error, amplitude = _amplitude(features, target, root, coefficients, act)
    damping = torch.full_like(error, 1e-2)
    for _ in range(SLOT_STEPS):
        step = _step(features, target, root, coefficients, amplitude, damping, act)
        moved = coefficients + step
        new_error, new_amplitude = _amplitude(features, target, root, moved, act)
        better = new_error < error
        coefficients = torch.where(better, moved, coefficients)
        amplitude = torch.where(better, new_amplitude, amplitude)
        error = torch.where(better, new_error, error)
        damping = torch.where(better, damping / 4, damping * 8)
    return coefficients, amplitude


def _amplitude(features, target, root, coefficients, act):
    """Each slot's error with its best amplitude, and that amplitude, float64 (slots)."""
    value = act(torch.einsum("nij,ij->nj", features, coefficients.to(features.dtype))) * root
    power = value.square().sum(0).double()
    along = (value * target).sum(0).double()
    amplitude = torch.where(power > 0, along / power.clamp_min(1e-30), 0.0)
    return target.square().sum(0).double() - amplitude * along, amplitude


def _step(features, target, root, coefficients, amplitude, damping, act):
    """A damped Gauss-Newton step of the coefficients, the amplitude moving along with them."""
    score = torch.einsum("nij,ij->nj", features, coefficients.to(features.dtype))
    value, slope = value_and_slope(act, score)
    value = value * root
    rows = features * (slope * root * amplitude.to(root.dtype))[:, None]
    rows = torch.cat([rows, value[:, None]], 1)
    residual = target - value * amplitude.to(root.dtype)
    normal = torch.einsum("nij,nkj->jik", rows, rows).double()
    cross = torch.einsum("nij,nj->ji", rows, residual).double()
    diagonal = normal.diagonal(dim1=1, dim2=2)
    floor = 1e-9 * diagonal.amax(1, keepdim=True) + 1e-30
    normal = normal + torch.diag_embed(damping[:, None] * diagonal + floor)
    return torch.linalg.solve(normal, cross)[:, :-1].T


def _fit_together(stream: Stream, mlp: Any, coefficients, block_of) -> BilinearMLP:
    """Gauss-Newton steps of all slots; a step that does not help on held-out tokens is halved."""
    block, terms = block_of(coefficients), len(coefficients)
    error, share = stream.error(block), 1.0
    for _ in range(JOINT_STEPS):
        down = block.down_proj

        def features(x: torch.Tensor, block=block) -> torch.Tensor:
            _, slope = value_and_slope(block.act_fn, block.scores(x))
            found = term_features(mlp.gate_proj(x), mlp.up_proj(x), terms)
            return found * slope.repeat(1, terms)

        sums = stream.gate_sums(features, terms, down, block)
        step = sums.solve(down.weight, torch.zeros_like(down.bias), torch.zeros_like(coefficients))
        while share > 0.05:
            moved = block_of(coefficients + share * step)
            moved_error = stream.error(moved)
            if moved_error < error:
                coefficients, block, error = coefficients + share * step, moved, moved_error
                break
            share /= 2
    return block
