"""Canonical form and signed squares, to float64 rounding."""

import pytest
import torch

from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_, canonical, signed_squares

SIZE, SLOTS = 12, 7


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random_block(rank=1, activation="identity", bias=True) -> BilinearMLP:
    block = BilinearMLP(SIZE, SLOTS, rank=rank, activation=activation, bias=bias).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block.requires_grad_(False)


@torch.no_grad()
def gauge_copy(block: BilinearMLP) -> BilinearMLP:
    """The same function by other weights: exchange, inverse scaling, slots and factors in another
    order, and, where no activation stands on the score, scale moved between score and value."""
    order = torch.randperm(SLOTS)
    factors = torch.stack([torch.randperm(block.rank) for _ in range(SLOTS)])
    q, k = (
        torch.cat([part.weight, part.bias[:, None]], 1).unflatten(0, (SLOTS, block.rank))
        for part in (block.gate_proj, block.up_proj)
    )
    scale = torch.randn(SLOTS, block.rank, 1, dtype=torch.float64)
    exchange = torch.rand(SLOTS, block.rank, 1) < 0.5
    q, k = torch.where(exchange, k, q) * scale, torch.where(exchange, q, k) / scale
    value = block.down_proj.weight.T
    if block.activation == "identity":
        moved = torch.randn(SLOTS, dtype=torch.float64)
        q, value = q * moved[:, None, None], value / moved[:, None]
    index = factors[:, :, None].expand_as(q)
    q, k = q.gather(1, index)[order].flatten(0, 1), k.gather(1, index)[order].flatten(0, 1)
    other = random_block(block.rank, block.activation)
    for part, rows in ((other.gate_proj, q), (other.up_proj, k)):
        part.weight.copy_(rows[:, :-1])
        part.bias.copy_(rows[:, -1])
    other.down_proj.weight.copy_(value[order].T)
    other.down_proj.bias.copy_(block.down_proj.bias)
    return other


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("activation", ["identity", "silu", "relu"])
def test_gauge_copies_share_one_canonical_form(rank, activation):
    block = random_block(rank, activation)
    other = gauge_copy(block)
    x = torch.randn(50, SIZE, dtype=torch.float64)
    torch.testing.assert_close(other(x), block(x), rtol=1e-11, atol=1e-11)
    one, two = canonical(block), canonical(other)
    torch.testing.assert_close(one(x), block(x), rtol=1e-12, atol=1e-11)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, two.state_dict()[name], rtol=1e-8, atol=1e-9)
    # Negative control: balancing alone does not make the copies equal.
    balance_(block)
    balance_(other)
    assert not torch.allclose(block.gate_proj.weight, other.gate_proj.weight, atol=1e-3)


def test_another_function_has_another_canonical_form():
    block = random_block()
    changed = gauge_copy(block)
    changed.up_proj.weight[0, 0] += 0.01
    difference = canonical(block).gate_proj.weight - canonical(changed).gate_proj.weight
    assert difference.abs().max() > 1e-4


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_signed_squares_are_the_same_function(rank, bias):
    block = random_block(rank, bias=bias)
    squares = signed_squares(block)
    x = torch.randn(50, SIZE, dtype=torch.float64)
    torch.testing.assert_close(squares(x), block(x), rtol=1e-12, atol=1e-11)
    assert squares.form == "squares" and squares.up_proj.out_features == 2 * rank * SLOTS
    assert not hasattr(squares, "gate_proj")
    # Negative control: without the signs it is another function.
    squares.down_proj.weight.data.abs_()
    assert not torch.allclose(squares(x), block(x), atol=0.1)


def test_other_forms_are_refused():
    gated = BilinearMLP(SIZE, SLOTS, form="gated", activation="silu")
    with pytest.raises(ValueError, match="a gated block has no canonical form"):
        canonical(gated)
    for block in (gated, random_block(activation="relu")):
        with pytest.raises(ValueError, match="without an activation"):
            signed_squares(block)
    with pytest.raises(ValueError, match="a squares layer has rank 1"):
        BilinearMLP(SIZE, SLOTS, form="squares", rank=2)
    with pytest.raises(ValueError, match="squares have the identity"):
        BilinearMLP(SIZE, SLOTS, form="squares", activation="silu")
