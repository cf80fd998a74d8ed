"""The products that ranks above 1 add, against dense eigenvectors and planted ones."""

import pytest
import torch

from bilinearize import BilinearMLP
from bilinearize.convert.fit import GateSums
from bilinearize.convert.pairs import add_pair, find_directions

SLOTS, WIDTH, TOKENS = 5, 7, 3000


def randomise(block):
    for parameter in block.requires_grad_(False).parameters():
        torch.nn.init.normal_(parameter)
    return block


class Planted:
    """Stands in for a stream: tokens, and a target that a block lacks planted squares of."""

    def __init__(self):
        torch.manual_seed(5)
        self.mlp = BilinearMLP(WIDTH, SLOTS, form="gated", activation="silu", bias=True)
        self.mlp = randomise(self.mlp)
        block = randomise(BilinearMLP(WIDTH, SLOTS, rank=2, bias=True))
        self.block = block
        for new, old in ((block.up_proj, self.mlp.up_proj), (block.down_proj, self.mlp.down_proj)):
            rows = slice(0, None, 2 if new is block.up_proj else 1)
            new.weight[rows], new.bias[rows] = old.weight, old.bias
        self.x = torch.randn(TOKENS, WIDTH)
        self.weight = torch.rand(TOKENS, 1) + 0.5
        lacking = (self.x @ torch.randn(WIDTH, SLOTS)).square() * torch.randn(SLOTS)
        self.plant(lacking)

    def plant(self, lacking):
        """Let the block lack these scores, (tokens, slots)."""
        self.target = self.block(self.x) + lacking @ self.block.down_proj.weight.T

    def shuffled(self, tokens, seed):
        yield self.x, self.target, self.weight

    def gate_sums(self, features, terms, down, block):
        sums = GateSums(down.in_features, terms, down.out_features, self.x.device)
        sums.add(features(self.x), self.target - block(self.x), self.weight)
        return sums


def test_directions_are_the_largest_eigenvectors():
    stream = Planted()
    x = torch.cat([stream.x, torch.ones(TOKENS, 1)], 1).double()
    weight = stream.weight.double()
    moment = (x * weight).T @ x / weight.sum()
    moment += 1e-3 * moment.diagonal().mean() * torch.eye(WIDTH + 1)
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.rsqrt() @ vectors.T
    down = stream.block.down_proj.weight.double()
    along = (stream.target - stream.block(stream.x)).double() @ (down / down.norm(dim=0))
    found = find_directions(stream, stream.block, seed=4).double()
    for slot in range(SLOTS):
        matrix = root @ (x * weight * along[:, slot, None]).T @ x @ root
        values = torch.linalg.eigvalsh(matrix)
        ours = torch.linalg.solve(root, found[slot])
        assert ours.norm().item() == pytest.approx(1, abs=1e-4)
        reached = (ours @ matrix @ ours).abs() / values.abs().max()
        assert reached > 0.999, slot


def error(stream, block):
    left = (stream.target - block(stream.x)).square() * stream.weight
    return left.sum().item()


def test_squares_take_out_what_the_block_lacks():
    stream = Planted()
    before = error(stream, stream.block)
    after = add_pair(stream, stream.block, stream.mlp, "square")
    assert after.rank == 3
    assert error(stream, after) < 0.5 * before
    # The second pair and down_proj stay, and the old block is not touched.
    assert error(stream, stream.block) == before
    assert torch.equal(after.gate_proj.weight[1::3], stream.block.gate_proj.weight[1::2])
    assert torch.equal(after.down_proj.weight, stream.block.down_proj.weight)


def test_squares_of_another_residual_do_not_help():
    stream = Planted()
    target = stream.target
    stream.target = stream.block(stream.x) + (target - stream.block(stream.x)).roll(1, 0)
    blind = add_pair(stream, stream.block, stream.mlp, "square")
    stream.target = target
    assert error(stream, blind) > 0.75 * error(stream, stream.block)


def test_gates_take_out_products_of_the_gate_and_what_the_first_pair_lacks():
    stream = Planted()
    gate, up = stream.mlp.gate_proj(stream.x), stream.mlp.up_proj(stream.x)
    a = torch.randn(4, SLOTS)
    stream.plant(a[0] * gate * up + a[1] * up + a[2] * gate * gate + a[3] * gate)
    before = error(stream, stream.block)
    assert error(stream, add_pair(stream, stream.block, stream.mlp, "gate")) < 1e-3 * before
    assert error(stream, add_pair(stream, stream.block, stream.mlp, "square")) > 0.05 * before
