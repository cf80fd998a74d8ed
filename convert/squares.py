"""Ranks above 4: squares `c_j (q_j x)^2` that fit what a block lacks, one for each slot.

The block's residual along slot j's value is r_nj. Among all `(q x)^2`, those with q along the
eigenvectors of `sum_n w_n r_nj x_n x_n^T` (x whitened, with a constant 1) correlate best with it.
The largest one is found by power iterations of all slots at once, which never form these matrices;
the c_j of all slots then come from one joint least squares problem.
"""

import torch

from bilinearize.convert.stream import Stream
from bilinearize.model.modeling_bilinear import BilinearMLP

SEARCH_TOKENS = 8192
STEPS = 8
# Added to the whitening's spectrum, relative to its mean.
FLOOR = 1e-3


def add_square(stream: Stream, block: BilinearMLP, pair: int) -> BilinearMLP:
    """A copy of `block` with factors for pair number `pair` of each slot, zero in `block`."""
    directions = find_directions(stream, block, pair)
    slots, down = block.down_proj.in_features, block.down_proj

    def features(x: torch.Tensor) -> torch.Tensor:
        return (_with_one(x) @ directions.T).square()

    sums = stream.gate_sums(features, 1, down, block)
    start = torch.zeros(1, slots, dtype=torch.float64, device=directions.device)
    scale = sums.solve(down.weight, torch.zeros_like(down.bias), start)[0].float()
    found = BilinearMLP(
        block.gate_proj.in_features, slots, rank=block.rank, activation=block.activation, bias=True
    )
    found = found.to(down.weight).requires_grad_(False)
    found.load_state_dict(block.state_dict())
    rows = slice(pair, None, block.rank)
    for linear, factor in (
        (found.gate_proj, directions * scale[:, None]),
        (found.up_proj, directions),
    ):
        linear.weight[rows] = factor[:, :-1]
        linear.bias[rows] = factor[:, -1]
    return found


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
    found = torch.randn(value.shape[1], x.shape[1], generator=generator).to(x.device)
    for _ in range(STEPS):
        found = (white @ found.T * along).T @ white
        found = found / found.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return torch.linalg.solve_triangular(triangle.T, found.double().T, upper=True).T.float()


def _with_one(x: torch.Tensor) -> torch.Tensor:
    """(tokens, d) to (tokens, d + 1), the last entry 1."""
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)
