"""How far a gated MLP is from the two symmetries of its product, after Breslow (arXiv 2606.22172).

Exchange swaps the factors, `q <-> k`; inverse scaling takes `q -> a q, k -> k / a`. Both leave
`sigma((q x)(k x))` alone and change `sigma(q x)(k x)` unless sigma is linear. Measured as the
relative change of the block's output over real inputs, `|y' - y| / |y|` (Frobenius, float64).

Absorption: a query matrix W common to all slots adds nothing, since `(x W^T) K^T = x (K W)^T`; the
paper's reason why only a query that is each slot's own makes a new function.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bilinearize import InputError

SCALES = (0.5, 3.0)
"""Factors of the inverse-scaling test; 3 is no power of 2, so rounding shows."""


@torch.no_grad()
def layer_symmetry(mlp: Any, x: Tensor, name: str = "the block") -> dict[str, float]:
    """Relative change of one block's output under each symmetry.

    Args:
        mlp: any gated MLP: `gate_proj` and `up_proj`, or a fused `gate_up_proj`, and `down_proj`.
        x: (tokens, inputs).

    Raises:
        InputError: if the module is no gated MLP.
    """
    mlp, x = copy.deepcopy(mlp).double(), x.double()
    q, k = _factors(mlp, name)
    right = mlp(x)
    changes = {"exchange": _change(_with_factors(mlp, k, q)(x), right)}
    for scale in SCALES:
        scaled = _with_factors(mlp, _scaled(q, scale), _scaled(k, 1 / scale))
        changes[f"scaling by {scale:g}"] = _change(scaled(x), right)
    return changes


@torch.no_grad()
def absorption_gap(mlp: Any, x: Tensor, matrix: Tensor, name: str = "the block") -> float:
    """Relative difference between a global query and the same block with the query absorbed.

    One side runs `gate_proj` on `x W^T` and `up_proj` on x; the other is an ordinary block whose
    gate weights are `gate_proj.weight W`. To rounding it is zero for any W and any activation.

    Args:
        matrix: W, (inputs, inputs).

    Raises:
        InputError: if the module is no gated MLP or W has another size.
    """
    mlp, x, matrix = copy.deepcopy(mlp).double(), x.double(), matrix.detach().double()
    (weight, bias), k = _factors(mlp, name)
    if matrix.shape != (weight.shape[1],) * 2:
        raise InputError(f"{name}: a query matrix of {list(matrix.shape)}; give a square one.")
    absorbed = _with_factors(mlp, (weight @ matrix, bias), k)
    queried = _with_factors(mlp, (weight, bias), k)
    first = nn.Sequential(_linear(matrix, None), _linear(weight, bias))
    if "gate_up_proj" in queried._modules:
        queried.gate_up_proj = _Fused(first, _linear(*k))
    else:
        queried.gate_proj = first
    return _change(queried(x), absorbed(x))


class _Fused(nn.Module):
    """Two maps side by side, in the place of a fused `gate_up_proj`."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], -1)


Factor = tuple[Tensor, Tensor | None]
"""Weight (rows, inputs) and bias (rows) of one factor."""


def _factors(mlp: Any, name: str) -> tuple[Factor, Factor]:
    """q and k of a gated MLP, fused or not."""
    if isinstance(getattr(mlp, "gate_up_proj", None), nn.Linear):
        q, k = mlp.gate_up_proj.weight.chunk(2)
        if mlp.gate_up_proj.bias is None:
            return (q, None), (k, None)
        q_bias, k_bias = mlp.gate_up_proj.bias.chunk(2)
        return (q, q_bias), (k, k_bias)
    gate, up = getattr(mlp, "gate_proj", None), getattr(mlp, "up_proj", None)
    if not isinstance(gate, nn.Linear) or not isinstance(up, nn.Linear):
        raise InputError(f"{name}: {type(mlp).__name__} is no gated MLP (gate_proj, up_proj).")
    return (gate.weight, gate.bias), (up.weight, up.bias)


def _with_factors(mlp: Any, q: Factor, k: Factor) -> Any:
    """A copy of the block with other factors; everything else is shared."""
    twin = copy.copy(mlp)
    twin._modules = dict(mlp._modules)
    if "gate_up_proj" in twin._modules:
        bias = None if q[1] is None or k[1] is None else torch.cat([q[1], k[1]])
        twin.gate_up_proj = _linear(torch.cat([q[0], k[0]]), bias)
    else:
        twin.gate_proj, twin.up_proj = _linear(*q), _linear(*k)
    return twin


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    return linear


def _scaled(factor: Factor, scale: float) -> Factor:
    weight, bias = factor
    return weight * scale, None if bias is None else bias * scale


def _change(ours: Tensor, right: Tensor) -> float:
    return float((ours - right).norm() / right.norm())
