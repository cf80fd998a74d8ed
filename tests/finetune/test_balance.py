"""Balanced factors: another gauge, the same function."""

import pytest
import torch

from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_


def norms(linear):
    rows = linear.weight
    if linear.bias is not None:
        rows = torch.cat([rows, linear.bias[:, None]], 1)
    return rows.norm(dim=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank, activation", [(1, "identity"), (3, "silu")])
def test_norms_become_equal_and_the_function_stays(rank, activation, bias):
    torch.manual_seed(0)
    mlp = BilinearMLP(6, 10, rank=rank, activation=activation, bias=bias).double()
    mlp.gate_proj.weight.data *= 30
    x = torch.randn(5, 6, dtype=torch.float64)
    before = mlp(x)
    assert not torch.allclose(norms(mlp.gate_proj), norms(mlp.up_proj))
    balance_(mlp)
    assert torch.allclose(norms(mlp.gate_proj), norms(mlp.up_proj))
    assert torch.allclose(mlp(x), before)


def test_a_zero_factor_is_left_alone():
    torch.manual_seed(0)
    mlp = BilinearMLP(6, 10)
    mlp.gate_proj.weight.data[3] = 0
    up = mlp.up_proj.weight[3].clone()
    balance_(mlp)
    assert torch.equal(mlp.up_proj.weight[3], up)
    assert all(p.isfinite().all() for p in mlp.parameters())


def test_a_gated_block_is_refused():
    with pytest.raises(ValueError, match="gated"):
        balance_(BilinearMLP(6, 10, form="gated", activation="silu"))
