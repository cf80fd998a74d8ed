"""Ranks above 1: a further product for each slot, fitted to what the block still lacks.

    gate     (c g + c') g
    linear   a linear function of x, solved along with down_proj; see `block.corrected`
    up       c u u
    square   c (q x)^2 with a q of its own

The c of all slots come from one joint least squares problem. For the squares, let r_nj be the
block's residual along slot j's value: among all `(q x)^2`, those with q along the eigenvectors of
`sum_n w_n r_nj x_n x_n^T` (x whitened, with a constant 1) correlate best with it. The largest one
is found by a few steps of Lanczos' method, which never form these matrices.
"""

from collections.abc import Callable
from typing import Any

import torch

from bilinearize.convert.block import add_factors, augmented
from bilinearize.convert.stream import Stream
from bilinearize.model.modeling_bilinear import BilinearMLP

FIXED = ("gate", "linear", "up")
SEARCH_TOKENS = 8192
STEPS = 8
# Added to the whitening's spectrum, relative to its mean.
FLOOR = 1e-3


def add_pair(stream: Stream, block: BilinearMLP, mlp: Any, kind: str) -> BilinearMLP:
    """A copy of `block`, its rank one higher, with a pair of this kind for each slot.

    The coefficients of the first pair, whose second factor is up_proj's, move along with the new.
    A "linear" pair writes nothing yet.
    """
    gate, up = augmented(mlp.gate_proj), augmented(mlp.up_proj)
    one = torch.zeros_like(gate)
    one[:, -1] = 1
    if kind == "linear":
        return add_factors(block, torch.zeros_like(one), one)
    if kind == "gate":
        firsts, second = (gate, one), gate
    else:
        second = up if kind == "up" else find_directions(stream, block, block.rank)
        firsts = (second,)
    products = [(gate, up), (one, up), *((first, second) for first in firsts)]
    step = _solve(stream, block, products)
    moved = [row * first for row, (first, _) in zip(step, products, strict=True)]
    wider = add_factors(block, torch.stack(moved[2:]).sum(0), second)
    change = moved[0] + moved[1]
    wider.gate_proj.weight[:: wider.rank] += change[:, :-1]
    wider.gate_proj.bias[:: wider.rank] += change[:, -1]
    return wider


def _solve(stream: Stream, block: BilinearMLP, products: list[tuple]) -> torch.Tensor:
    """Coefficients (products, m, 1) of all slots' products towards what the block lacks."""

    def features(x: torch.Tensor) -> torch.Tensor:
        x = _with_one(x)
        return torch.cat([(x @ first.T) * (x @ second.T) for first, second in products], 1)

    down, terms = block.down_proj, len(products)
    sums = stream.gate_sums(features, terms, down, block)
    start = torch.zeros(terms, down.in_features, dtype=torch.float64, device=down.weight.device)
    return sums.solve(down.weight, torch.zeros_like(down.bias), start).float()[:, :, None]


def find_directions(stream: Stream, block: BilinearMLP, seed: int) -> torch.Tensor:
    """Each slot's q with its constant, (slots, d + 1), scaled so that the mean of (q x)^2 is 1."""
    x, target, weight = next(stream.shuffled(SEARCH_TOKENS, seed))
    value = block.down_proj.weight
    along = (target - block(x)) @ (value / value.norm(dim=0).clamp_min(1e-30)) * weight
    x = _with_one(x)
    moment = ((x * weight).T @ x).double() / weight.sum()
    moment.diagonal().add_(FLOOR * moment.diagonal().mean())
    triangle = torch.linalg.cholesky(moment)
    white = torch.linalg.solve_triangular(triangle, x.double().T, upper=False).T.float()
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(value.shape[1], x.shape[1], generator=generator).to(x.device)
    found = _largest(lambda vectors: (white @ vectors.T * along).T @ white, start)
    return torch.linalg.solve_triangular(triangle.T, found.double().T, upper=True).T.float()


def _largest(product: Callable, start: torch.Tensor) -> torch.Tensor:
    """Unit eigenvectors (m, size) of m symmetric matrices' eigenvalues largest in magnitude.

    Lanczos' method on all at once: `product` multiplies each matrix with its row of (m, size). A
    mere power iteration would mix the two of a pair of opposite sign, which products `q k` have.
    """
    steps = min(STEPS, start.shape[1])
    basis = start.new_zeros(len(start), steps, start.shape[1])
    images, vector = torch.zeros_like(basis), start
    for step in range(steps):
        for _ in range(2):  # once leaves rounding behind
            vector = vector - torch.einsum("mk,mkd->md", _dot(basis, vector), basis)
            vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-30)
        basis[:, step] = vector
        images[:, step] = vector = product(vector)
    values, mixes = torch.linalg.eigh(torch.einsum("mid,mjd->mij", basis, images))
    best = values.abs().argmax(1)[:, None, None].expand(-1, steps, 1)
    return torch.einsum("mk,mkd->md", mixes.gather(2, best)[:, :, 0], basis)


def _dot(basis: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return torch.einsum("mkd,md->mk", basis, vector)


def _with_one(x: torch.Tensor) -> torch.Tensor:
    """(tokens, d) to (tokens, d + 1), the last entry 1."""
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)
