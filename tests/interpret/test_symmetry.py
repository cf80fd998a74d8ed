"""Both symmetries fail on gated blocks as the theory says and hold on bilinear ones."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from bilinearize import InputError
from bilinearize.interpret.symmetry import absorption_gap, layer_symmetry

X = torch.randn(50, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
SIZES = {"hidden_size": 10, "intermediate_size": 14, "num_attention_heads": 1}


def test_bilinear_blocks_are_symmetric(block):
    assert max(layer_symmetry(block, X).values()) < 1e-13


@pytest.mark.parametrize("act", ["relu", "silu", "gelu"])
def test_sigma_on_the_product_keeps_both(make_block, act):
    assert max(layer_symmetry(make_block(2, True, act=act), X).values()) < 1e-13


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_smooth_gates_break_both(make_block, act):
    changes = layer_symmetry(make_block(1, False, form="gated", act=act), X)
    assert len(changes) == 3 and min(changes.values()) > 0.01


def test_relu_gates_keep_scaling_and_break_exchange(make_block):
    changes = layer_symmetry(make_block(1, False, form="gated", act="relu"), X)
    assert changes.pop("exchange") > 0.1 and max(changes.values()) < 1e-13


def test_source_blocks_fused_or_not():
    torch.manual_seed(0)
    plain = LlamaMLP(LlamaConfig(**SIZES))
    fused = Phi3MLP(Phi3Config(**SIZES, pad_token_id=0))
    fused.gate_up_proj.weight.data = torch.cat([plain.gate_proj.weight, plain.up_proj.weight]).data
    fused.down_proj.weight.data = plain.down_proj.weight.data
    changes = layer_symmetry(plain, X)
    assert changes == pytest.approx(layer_symmetry(fused, X)) and min(changes.values()) > 0.01
    matrix = torch.randn(10, 10)
    for block in (plain, fused):
        assert absorption_gap(block, X, matrix) < 1e-13


def test_absorption(make_block, block, monkeypatch):
    matrix = torch.randn(10, 10, generator=torch.Generator().manual_seed(2))
    assert absorption_gap(block, X, matrix) < 1e-13
    gated = make_block(1, False, form="gated", act="silu")
    assert absorption_gap(gated, X, matrix) < 1e-13
    # What is not linear in x can't be absorbed: the measure sees it.
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: self[1](self[0](x).tanh()))
    assert absorption_gap(gated, X, matrix) > 0.1


def test_refusals(block):
    with pytest.raises(InputError, match="layer 4: Linear is no gated MLP"):
        layer_symmetry(nn.Linear(10, 10), X, "layer 4")
    with pytest.raises(InputError, match=r"a query matrix of \[3, 3\]"):
        absorption_gap(block, X, torch.eye(3))
