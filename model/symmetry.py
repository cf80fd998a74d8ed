"""The bilinear block's gauge (exchange, inverse scaling) fixed, and exact re-expressions."""

import copy

import torch

from bilinearize.model.modeling_bilinear import BilinearMLP


@torch.no_grad()
def balance_(mlp: BilinearMLP) -> None:
    """Rescale each factor pair in place so that |[q; b]| = |[k; c]|; the function stays the same.

    A pair with a zero factor is left alone.

    Raises:
        ValueError: for a gated block, which lacks the symmetry.
    """
    if mlp.form != "bilinear":
        raise ValueError(f"a {mlp.form} block can't be balanced: its two factors are not alike.")
    q, k = _row_norms(mlp.gate_proj), _row_norms(mlp.up_proj)
    scale = torch.where((q > 0) & (k > 0), (k / q).sqrt(), torch.ones_like(q))
    for linear, factor in ((mlp.gate_proj, scale), (mlp.up_proj, 1 / scale)):
        linear.weight.mul_(factor[:, None].to(linear.weight.dtype))
        if linear.bias is not None:
            linear.bias.mul_(factor.to(linear.bias.dtype))


def _row_norms(linear: torch.nn.Linear) -> torch.Tensor:
    """(rows) norms in float64, bias included."""
    squares = linear.weight.double().square().sum(1)
    if linear.bias is not None:
        squares += linear.bias.double().square()
    return squares.sqrt()


@torch.no_grad()
def canonical(mlp: BilinearMLP) -> BilinearMLP:
    """The same function in a form that every gauge copy of the block shares, to rounding.

    A slot's score depends on its weights through the symmetric matrix `M_j = sum_s sym(q_s k_s^T)`
    of `[x; 1]` alone, which has at most `rank` positive and as many negative eigenvalues. Factor s
    is made of the s-th largest and the s-th smallest, `l+ p p^T - l- n n^T = sym(q k^T)` with
    `q, k = sqrt(l+) p +- sqrt(l-) n`, so |q| = |k| too. The entry of largest size in p, and in n,
    is positive. With sigma = identity the value has length 1 and its entry of largest size is
    positive as well. Slots come in the order of `|M_j| |v_j|`, the largest first.

    Where M_j has a repeated eigenvalue, or two slots the same size, the form is not unique.

    Raises:
        ValueError: for a block that is not of form "bilinear".
    """
    if mlp.form != "bilinear":
        raise ValueError(f"a {mlp.form} block has no canonical form.")
    query, key = (_augmented(part, mlp.rank) for part in (mlp.gate_proj, mlp.up_proj))
    value = mlp.down_proj.weight.double().T
    size = value.norm(dim=1)
    if mlp.activation == "identity":
        sign = _sign(value)
        value = value * (sign / size.clamp_min(1e-300))[:, None]
        query = query * (sign * size)[:, None, None]
    positive, negative = _halves(query, key)
    score_size = (positive.square().sum(-1) ** 2 + negative.square().sum(-1) ** 2).sum(-1).sqrt()
    if mlp.activation != "identity":
        score_size = score_size * size
    order = score_size.argsort(descending=True, stable=True)
    found = copy.deepcopy(mlp)
    _fill(found.gate_proj, (positive + negative)[order].flatten(0, 1))
    _fill(found.up_proj, (positive - negative)[order].flatten(0, 1))
    found.down_proj.weight.copy_(value[order].T)
    return found


@torch.no_grad()
def signed_squares(mlp: BilinearMLP) -> BilinearMLP:
    """The same function as a sum of signed squares, twice `rank` of them for each slot.

    `(q x)(k x) = ((q + k) x / 2)^2 - ((q - k) x / 2)^2`, on `[x; 1]`.

    Returns:
        A block of form "squares": `up_proj` (2 rank m, hidden_size), `down_proj` (hidden_size,
        2 rank m), the sign in `down_proj`.

    Raises:
        ValueError: for a block of another form, or with an activation on its scores.
    """
    if mlp.form != "bilinear" or mlp.activation != "identity":
        raise ValueError("only a bilinear block without an activation is a sum of signed squares.")
    query, key = (_augmented(part, 1)[:, 0] for part in (mlp.gate_proj, mlp.up_proj))
    down = mlp.down_proj
    found = BilinearMLP(
        mlp.gate_proj.in_features,
        2 * len(query),
        form="squares",
        bias=mlp.gate_proj.bias is not None,
    ).to(down.weight)
    _fill(found.up_proj, torch.cat([query + key, query - key]) / 2)
    value = down.weight.repeat_interleave(mlp.rank, 1)
    found.down_proj.weight.copy_(torch.cat([value, -value], 1))
    if down.bias is not None:
        found.down_proj.bias.copy_(down.bias)
    return found


def _augmented(linear: torch.nn.Linear, rank: int) -> torch.Tensor:
    """float64 (slots, rank, inputs + 1): weight and bias side by side; 0 where there is no bias."""
    bias = torch.zeros_like(linear.weight[:, 0]) if linear.bias is None else linear.bias
    return torch.cat([linear.weight, bias[:, None]], 1).double().unflatten(0, (-1, rank))


def _fill(linear: torch.nn.Linear, rows: torch.Tensor) -> None:
    linear.weight.copy_(rows[:, :-1])
    if linear.bias is not None:
        linear.bias.copy_(rows[:, -1])


def _sign(vectors: torch.Tensor) -> torch.Tensor:
    """(..., n) to (...): the sign of the entry of largest size, 1 for a vector of zeros."""
    entry = vectors.gather(-1, vectors.abs().argmax(-1, keepdim=True))[..., 0]
    return torch.where(entry < 0, -1.0, 1.0).to(vectors)


def _halves(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`sqrt(l+) p` and `sqrt(l-) n` of each slot's matrix, both (slots, rank, n)."""
    rank = query.shape[1]
    basis, triangle = torch.linalg.qr(torch.cat([query, key], 1).mT)
    swap = torch.zeros(2 * rank, 2 * rank, dtype=query.dtype, device=query.device)
    swap[:rank, rank:] = swap[rank:, :rank] = torch.eye(rank, dtype=query.dtype) / 2
    values, vectors = torch.linalg.eigh(triangle @ swap @ triangle.mT)
    vectors = (basis @ vectors).mT  # (slots, 2 rank, n), eigenvalues ascending
    vectors = vectors * _sign(vectors)[..., None] * values.abs().sqrt()[..., None]
    values = values[..., None]
    positive = torch.where(values > 0, vectors, 0.0).flip(1)[:, :rank]
    return positive, torch.where(values < 0, vectors, 0.0)[:, :rank]
