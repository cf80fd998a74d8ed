"""Bilinear blocks built from a gated MLP's own directions, and the corrections laid on them.

A slot of the gated MLP has the gate `g` and the value `u`, both affine in x. The score of the slot
that replaces it is a sum of terms linear in a few coefficients:

    rank 1   (a0 g + a1) u
    rank 2   + (a2 g + a3) g
    rank 3   + a4 u u
    rank 4   + a5

Those of rank 1 are the start of every fit. Higher ranks stand so where an activation goes on the
score; without one, `convert.pairs` finds what to add.
"""

import copy
from typing import Any

import torch
from torch import nn

from bilinearize.model.modeling_bilinear import BilinearMLP

# Coefficients of a slot of each rank.
TERMS = {1: 2, 2: 4, 3: 5, 4: 6}
MAX_EXPAND = 3


def term_features(gate: torch.Tensor, up: torch.Tensor, terms: int) -> torch.Tensor:
    """The features that go with a slot's first coefficients: (tokens, m) to (tokens, terms * m)."""
    features = [gate * up, up]
    if terms > 2:
        features += [gate * gate, gate]
    if terms > 4:
        features.append(up * up)
    if terms > 5:
        features.append(torch.ones_like(up))
    return torch.cat(features, 1)


def build_block(
    mlp: Any, coefficients: torch.Tensor, rank: int = 1, activation: str = "identity"
) -> BilinearMLP:
    """The gated MLP with other scores, its down_proj kept.

    Args:
        mlp: has gate_proj, up_proj, down_proj.
        coefficients: (terms, m) or fewer terms than the rank has; the missing ones are zero. With
            one term, the slope alone, the block has biases only if `mlp` has.
    """
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    biased = len(coefficients) > 1 or gate.bias is not None
    block = BilinearMLP(
        gate.in_features, gate.out_features, rank=rank, activation=activation, bias=biased
    )
    block = block.to(gate.weight.device).requires_grad_(False)
    size = max(TERMS.values()), gate.out_features
    a = torch.zeros(size, dtype=torch.float64, device=gate.weight.device)
    a[: len(coefficients)] = coefficients
    a = a.to(gate.weight.dtype)[:, :, None]
    g, u = augmented(gate), augmented(up)
    one = torch.zeros_like(g)
    one[:, -1] = 1
    pairs = [(a[0] * g + a[1] * one, u)]
    if rank >= 2:
        pairs.append((a[2] * g + a[3] * one, g))
    if rank >= 3:
        pairs.append((a[4] * u, u))
    if rank >= 4:
        pairs.append((a[5] * one, one))
    for linear, rows in zip(
        (block.gate_proj, block.up_proj), zip(*pairs, strict=True), strict=True
    ):
        fill(linear, torch.stack(rows, 1).flatten(0, 1))
    fill(block.down_proj, augmented(down))
    return block


def augmented(linear: nn.Linear) -> torch.Tensor:
    """Weight and bias side by side, (out, in + 1), zeros where there is no bias."""
    bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return torch.cat([linear.weight, bias[:, None]], 1)


def fill(linear: nn.Linear, rows: torch.Tensor) -> None:
    """The inverse: set weight and, if there is one, bias."""
    linear.weight.copy_(rows[:, :-1])
    if linear.bias is not None:
        linear.bias.copy_(rows[:, -1])


def add_factors(block: BilinearMLP, first: torch.Tensor, second: torch.Tensor) -> BilinearMLP:
    """A copy of `block` with one more pair for each slot, augmented rows (m, in + 1)."""
    slots, inputs, rank = block.down_proj.in_features, block.gate_proj.in_features, block.rank
    new = BilinearMLP(inputs, slots, rank=rank + 1, activation=block.activation, bias=True)
    new = new.to(first.device).requires_grad_(False)
    for linear, old, rows in (
        (new.gate_proj, block.gate_proj, first),
        (new.up_proj, block.up_proj, second),
    ):
        pairs = torch.cat([augmented(old).view(slots, rank, -1), rows[:, None]], 1)
        fill(linear, pairs.flatten(0, 1))
    fill(new.down_proj, augmented(block.down_proj))
    return new


def padded(block: BilinearMLP, mlp: Any, rank: int) -> BilinearMLP:
    """`block` with pairs `0 g` up to this rank, for a finetune to make use of."""
    gate = augmented(mlp.gate_proj)
    while block.rank < rank:
        block = add_factors(block, torch.zeros_like(gate), gate)
    return block


def widen(block: BilinearMLP, mlp: Any, expand: int) -> BilinearMLP:
    """Add a slot `g g`, and for `expand` 3 also one `u u`, for each slot of `mlp`.

    They write nothing yet, so the function stays the same. They come after the old slots.
    """
    if expand == 1:
        return block
    g, u = augmented(mlp.gate_proj), augmented(mlp.up_proj)
    extra = torch.cat([g, u][: expand - 1])
    rank = block.rank
    slots = block.down_proj.in_features + len(extra)
    wide = BilinearMLP(
        mlp.gate_proj.in_features, slots, rank=rank, activation=block.activation, bias=True
    )
    wide = wide.to(extra.device).requires_grad_(False)
    rows = torch.zeros(len(extra), rank, extra.shape[1], device=extra.device)
    rows[:, 0] = extra
    for new, old in ((wide.gate_proj, block.gate_proj), (wide.up_proj, block.up_proj)):
        fill(new, torch.cat([augmented(old), rows.flatten(0, 1)]))
    wide.down_proj.weight.zero_()
    wide.down_proj.weight[:, : block.down_proj.in_features] = block.down_proj.weight
    wide.down_proj.bias.copy_(block.down_proj.bias)
    return wide


def restart(block: BilinearMLP, mlp: Any, linear: int | None) -> None:
    """Undo all corrections: down_proj as in `mlp`, and pair number `linear`, if any, zero."""
    fill(block.down_proj, augmented(mlp.down_proj))
    if linear is not None:
        block.gate_proj.weight[linear :: block.rank] = 0
        block.gate_proj.bias[linear :: block.rank] = 0


def corrected(
    block: BilinearMLP, correction: torch.Tensor, linear: int | None = None
) -> BilinearMLP:
    """A copy of `block` with a solved correction laid on it.

    `correction` (features, outputs) has a row for each slot, then, if any, one for each input (a
    linear map of x, which goes into each slot's pair number `linear`, whose second factor is 1),
    then the constant's.
    """
    block = copy.deepcopy(block)
    down, slots = block.down_proj, block.down_proj.in_features
    down.weight.add_(correction[:slots].T.float())
    down.bias.add_(correction[-1].float())
    rows = correction[slots:-1]
    if len(rows):
        # The shortest q_j with sum_j v_j q_j = the map.
        q = torch.linalg.lstsq(down.weight.double(), rows.T, driver="gelsd").solution
        block.gate_proj.weight[linear :: block.rank] += q.float()
    return block


def value_and_slope(act: Any, score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`act(score)` and its derivative, of the shape of `score`."""
    with torch.enable_grad():
        score = score.detach().requires_grad_()
        value = act(score)
        (slope,) = torch.autograd.grad(value.sum(), score)
    return value.detach(), slope


def derivative_at_zero(activation: Any) -> float:
    """The slope of the activation at 0: 1/2 for silu and gelu."""
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(activation(zero), zero)
    return slope.item()
