"""The squares that ranks above 4 add, against dense eigenvectors and planted ones."""

import pytest
import torch

from bilinearize import BilinearMLP
from bilinearize.convert.fit import GateSums
from bilinearize.convert.squares import add_square, find_directions

SLOTS, WIDTH, TOKENS = 5, 7, 3000


class Planted:
    """Stands in for a stream: tokens, and a target that a block lacks planted squares of."""

    def __init__(self):
        torch.manual_seed(5)
        block = BilinearMLP(WIDTH, SLOTS, rank=5, bias=True).requires_grad_(False)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter)
        for part in (block.gate_proj, block.up_proj):
            part.weight[4::5] = 0
            part.bias[4::5] = 0
        self.block = block
        self.q = torch.randn(SLOTS, WIDTH)
        self.scale = torch.randn(SLOTS)
        self.x = torch.randn(TOKENS, WIDTH)
        self.weight = torch.rand(TOKENS, 1) + 0.5
        lacking = ((self.x @ self.q.T).square() * self.scale) @ block.down_proj.weight.T
        self.target = block(self.x) + lacking

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
        assert reached > 0.97, slot


def test_squares_take_out_what_the_block_lacks():
    stream = Planted()

    def error(block):
        left = (stream.target - block(stream.x)).square() * stream.weight
        return left.sum().item()

    before = error(stream.block)
    after = add_square(stream, stream.block, pair=4)
    assert error(after) < 0.5 * before
    # The other pairs and down_proj stay, and the old block is not touched.
    assert error(stream.block) == before
    others = [row for row in range(5 * SLOTS) if row % 5 != 4]
    assert torch.equal(after.gate_proj.weight[others], stream.block.gate_proj.weight[others])
    assert torch.equal(after.down_proj.weight, stream.block.down_proj.weight)


def test_squares_of_another_residual_do_not_help():
    stream = Planted()
    target = stream.target
    stream.target = stream.block(stream.x) + (target - stream.block(stream.x)).roll(1, 0)
    blind = add_square(stream, stream.block, pair=4)
    error = (target - blind(stream.x)).square().sum()
    assert error > 0.75 * (target - stream.block(stream.x)).square().sum()
