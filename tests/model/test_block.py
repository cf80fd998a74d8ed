"""The block against its formula, and its two symmetries against a gated block that lacks them."""

import pytest
import torch
from torch.nn import functional

from bilinearize import BilinearMLP

ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu2": lambda z: torch.relu(z) ** 2,
}


def random_block(**options) -> BilinearMLP:
    torch.manual_seed(1)
    block = BilinearMLP(12, 20, **options).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_block_is_its_formula(activation, rank, bias):
    block = random_block(rank=rank, activation=activation, bias=bias)
    x = torch.randn(5, 12, dtype=torch.float64)
    q, k, v = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
    for n in range(5):
        y = torch.zeros(12, dtype=torch.float64)
        for j in range(20):
            score = torch.zeros((), dtype=torch.float64)
            for s in range(rank):
                row = j * rank + s
                b = block.gate_proj.bias[row] if bias else 0
                c = block.up_proj.bias[row] if bias else 0
                score = score + (q[row] @ x[n] + b) * (k[row] @ x[n] + c)
            y += ACTIVATIONS[activation](score) * v[:, j]
        if bias:
            y += block.down_proj.bias
        torch.testing.assert_close(block(x)[n], y, rtol=1e-12, atol=1e-12)


def exchange_(block: BilinearMLP) -> None:
    block.gate_proj, block.up_proj = block.up_proj, block.gate_proj


def scale_inversely_(block: BilinearMLP) -> None:
    factor = torch.empty(len(block.gate_proj.weight), dtype=torch.float64).uniform_(-3, 3)
    for linear, by in ((block.gate_proj, factor), (block.up_proj, 1 / factor)):
        linear.weight.data.mul_(by[:, None])
        linear.bias.data.mul_(by)


@pytest.mark.parametrize("change", [exchange_, scale_inversely_])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_symmetries_hold(change, rank, activation):
    block = random_block(rank=rank, activation=activation, bias=True)
    x = torch.randn(7, 12, dtype=torch.float64)
    before = block(x)
    change(block)
    torch.testing.assert_close(block(x), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("change", [exchange_, scale_inversely_])
def test_symmetries_fail_for_the_gated_form(change):
    block = random_block(form="gated", activation="silu", bias=True)
    x = torch.randn(7, 12, dtype=torch.float64)
    before = block(x)
    change(block)
    assert (block(x) - before).norm() > 0.1 * before.norm()


def test_rank_one_identity_is_a_stock_llama_mlp():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    block = random_block(bias=True)
    sizes = dict(hidden_size=12, intermediate_size=20, num_attention_heads=2)
    config = LlamaConfig(**sizes, hidden_act="linear", mlp_bias=True)
    stock = LlamaMLP(config).double()
    stock.load_state_dict(block.state_dict())
    x = torch.randn(3, 12, dtype=torch.float64)
    assert torch.equal(block(x), stock(x))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 0}, "bilinear_rank is 0"),
        ({"activation": "swoosh"}, "'swoosh'"),
        ({"form": "cubic"}, "'cubic'"),
        ({"form": "gated", "rank": 2}, "a gated layer has rank 1"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        BilinearMLP(12, 20, **options)
