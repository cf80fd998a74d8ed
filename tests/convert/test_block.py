"""Ranks, widths and corrections against the scores written out."""

import pytest
import torch

from bilinearize import BilinearMLP
from bilinearize.convert.block import TERMS, build_block, corrected, widen


@pytest.fixture
def gated():
    torch.manual_seed(3)
    mlp = BilinearMLP(6, 9, form="gated", activation="silu", bias=True)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp.requires_grad_(False)


@pytest.mark.parametrize("rank", list(TERMS))
def test_block_of_each_rank_is_its_terms(gated, rank):
    a = torch.randn(TERMS[rank], 9)
    block = build_block(gated, a, rank)
    x = torch.randn(20, 6)
    g, u = gated.gate_proj(x), gated.up_proj(x)
    terms = (g * u, u, g * g, g, u * u)
    score = sum(coefficient * term for coefficient, term in zip(a, terms, strict=False))
    torch.testing.assert_close(block(x), gated.down_proj(score), rtol=1e-4, atol=1e-4)
    assert block.rank == rank and block.gate_proj.out_features == 9 * rank


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("expand", [1, 2, 3])
def test_wider_block_is_the_same_until_corrected(gated, rank, expand):
    block = build_block(gated, torch.randn(TERMS[rank], 9), rank)
    wide = widen(block, gated, expand)
    x = torch.randn(20, 6)
    torch.testing.assert_close(wide(x), block(x), rtol=1e-4, atol=1e-4)
    g, u = gated.gate_proj(x), gated.up_proj(x)
    extra = torch.cat([g * g, u * u], 1)[:, : 9 * (expand - 1)]
    correction = torch.randn(9 * expand + 1, 6)
    expected = block(x) + torch.cat([block.features(x), extra], 1) @ correction[:-1]
    found = corrected(wide, correction)(x)
    torch.testing.assert_close(found, expected + correction[-1], rtol=1e-3, atol=1e-3)


def test_linear_map_becomes_the_last_factor(gated):
    block = build_block(gated, torch.randn(5, 9), rank=4)
    x = torch.randn(20, 6)
    linear = torch.randn(6, 6, dtype=torch.float64)
    correction = torch.cat([torch.zeros(9, 6).double(), linear, torch.zeros(1, 6).double()])
    found = corrected(block, correction)(x)
    torch.testing.assert_close(found, block(x) + x @ linear.float(), rtol=1e-3, atol=1e-3)
