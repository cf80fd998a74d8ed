"""The inverse-scaling symmetry of the bilinear block: a gauge that can be fixed."""

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
