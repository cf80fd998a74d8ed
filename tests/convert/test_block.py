"""Ranks, widths and corrections against the scores written out."""

import pytest
import torch

from bilinearize import BilinearMLP
from bilinearize.convert.block import (
    TERMS,
    add_factors,
    build_block,
    corrected,
    padded,
    restart,
    widen,
)


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
    terms = (g * u, u, g * g, g, u * u, torch.ones_like(u))
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


def test_factors_add_a_product_to_each_slot(gated):
    block = build_block(gated, torch.randn(TERMS[2], 9), rank=2)
    first, second = torch.randn(9, 7), torch.randn(9, 7)
    x = torch.randn(20, 6)
    one = torch.cat([x, torch.ones(20, 1)], 1)
    more = add_factors(block, first, second)
    expected = block(x) + ((one @ first.T) * (one @ second.T)) @ block.down_proj.weight.T
    torch.testing.assert_close(more(x), expected, rtol=1e-3, atol=1e-3)
    assert more.rank == 3


def test_linear_map_becomes_factors_of_its_pair(gated):
    one = torch.zeros(9, 7)
    one[:, -1] = 1
    block = build_block(gated, torch.randn(TERMS[1], 9))
    block = add_factors(add_factors(block, torch.zeros(9, 7), one), torch.randn(9, 7), one)
    x = torch.randn(20, 6)
    linear = torch.randn(6, 6, dtype=torch.float64)
    correction = torch.cat([torch.zeros(9, 6).double(), linear, torch.zeros(1, 6).double()])
    found = corrected(block, correction, 1)
    torch.testing.assert_close(found(x), block(x) + x @ linear.float(), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(corrected(block, correction, 0)(x), found(x), atol=0.1)
    restart(found, gated, 1)
    torch.testing.assert_close(found(x), block(x), rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing_but_can_learn(gated):
    block = build_block(gated, torch.randn(TERMS[1], 9))
    more, x = padded(block, gated, 3), torch.randn(20, 6)
    torch.testing.assert_close(more(x), block(x), rtol=1e-4, atol=1e-4)
    assert more.rank == 3
    more.requires_grad_(True)(x).square().sum().backward()
    assert (more.gate_proj.weight.grad[2::3].abs().sum(1) > 0).all()
