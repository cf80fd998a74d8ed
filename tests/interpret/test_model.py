"""On a pico model: norms folded, inputs captured, tokens read, attributions exact."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from bilinearize import InputError
from bilinearize.interpret.attribution import attribute
from bilinearize.interpret.layers import (
    converted_layers,
    layer_tensor,
    mlp_inputs,
    norm_before,
    norm_behind,
    norm_weight,
)
from bilinearize.interpret.readout import named_directions, token_reader
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer

TOKENS = torch.tensor([0, 40, 265, 270, 33, 280, 261, 44])


@pytest.fixture(scope="module")
def model(converted_pico):
    return load_causal_lm(converted_pico)


@pytest.fixture(scope="module")
def reader(model, converted_pico):
    return token_reader(model, load_tokenizer(converted_pico))


def block_io(model, layer: int) -> dict[str, torch.Tensor]:
    """Input and output of one block on TOKENS, float64."""
    seen = {}

    def hook(module, args, output):
        seen.update(x=args[0][0].double(), y=output[0].double())

    handle = model.model.layers[layer].mlp.register_forward_hook(hook)
    with torch.no_grad():
        model(TOKENS[None])
    handle.remove()
    return seen


@pytest.mark.parametrize("fold", [True, False])
def test_tensor_of_a_layer_equals_its_block(model, fold):
    x = mlp_inputs(model, TOKENS[None], [0, 2], fold)
    for layer in (0, 2):
        y = layer_tensor(model, layer, fold).output(x[layer])
        right = block_io(model, layer)["y"]
        assert float((y - right).norm() / right.norm()) < 1e-6  # the model computes in fp32
    assert not torch.allclose(x[0], mlp_inputs(model, TOKENS[None], [0], not fold)[0])


def test_positions_can_be_skipped(model):
    windows = TOKENS.view(2, 4)
    whole = mlp_inputs(model, windows, [1])[1].view(2, 4, -1)
    assert torch.equal(mlp_inputs(model, windows, [1], skip=1)[1], whole[:, 1:].flatten(0, 1))


def test_layers(model):
    assert converted_layers(model) == [0, 2]
    with pytest.raises(InputError, match="there is no layer 3; the model has layers 0 to 2"):
        layer_tensor(model, 3)
    with pytest.raises(InputError, match="layer 1 is gated"):
        layer_tensor(model, 1)
    with pytest.raises(InputError, match="there is no layer 9"):
        mlp_inputs(model, TOKENS[None], [0, 9])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_norms_of_another_family():
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    layer = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, pad_token_id=0)).model.layers[0]
    assert norm_before(layer) is layer.pre_feedforward_layernorm
    assert norm_behind(layer) is layer.post_feedforward_layernorm
    with torch.no_grad():
        layer.pre_feedforward_layernorm.weight.uniform_(-0.5, 0.5)
        weight = norm_weight(layer.pre_feedforward_layernorm, 16, "layer 0")
        assert torch.allclose(weight, 1 + layer.pre_feedforward_layernorm.weight, atol=1e-5)
    with pytest.raises(InputError, match="layer 0: LayerNorm is no RMSNorm"):
        norm_weight(nn.LayerNorm(16), 16, "layer 0")


def test_tokens(reader, model, tmp_path):
    house, blue = reader.token_id(" house"), reader.token_id(" blue")
    assert reader.text(house) == " house"
    difference = reader.direction(" house -  blue")
    rows = model.lm_head.weight * model.model.norm.weight
    assert torch.allclose(difference, rows[house] - rows[blue], atol=1e-4)
    embedding = model.model.embed_tokens.weight[house]
    first = reader.reads(torch.cat([embedding, torch.ones(1)])[None], 3)[0]
    assert first["most"][0][0] == " house" and first["most"][0][1] > first["most"][1][1]
    assert first["least"][0][1] < first["least"][1][1] < first["most"][2][1]
    assert reader.writes(rows[blue][None], 2)[0]["most"][0][0] == " blue"
    tensor = layer_tensor(model, 0)
    np.save(tmp_path / "probe.npy", np.ones((2, 32)))
    specs = [" house", "hosvd:1", str(tmp_path / "probe.npy")]
    named = named_directions(specs, reader, tensor)
    assert [name for name, _ in named] == [" house", "hosvd:1", "probe.npy[0]", "probe.npy[1]"]


def test_bad_directions(reader, model, tmp_path):
    tensor = layer_tensor(model, 0)
    with pytest.raises(InputError, match="'qqqq' is not one token but 4"):
        named_directions(["qqqq"], reader, tensor)
    with pytest.raises(InputError, match="use hosvd:0 to hosvd:31"):
        named_directions(["hosvd:32"], reader, tensor)
    np.save(tmp_path / "small.npy", np.ones(5))
    with pytest.raises(InputError, match=r"small.npy: holds \[5\]; vectors of 32 are read"):
        named_directions([str(tmp_path / "small.npy")], reader, tensor)
    np.save(tmp_path / "nan.npy", np.full(32, np.nan))
    with pytest.raises(InputError, match="nan.npy: holds NaN"):
        named_directions([str(tmp_path / "nan.npy")], reader, tensor)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(InputError, match="text.npy: not a readable .npy file"):
        named_directions([str(tmp_path / "text.npy")], reader, tensor)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("position", [-1, 3])
def test_attribution_adds_up_to_the_output(model, reader, layer, position):
    direction = reader.direction(" house")
    found = attribute(model, TOKENS, layer, direction, position)
    exact = float(block_io(model, layer)["y"][position] @ direction.double())
    assert float(found.eigenvectors.sum()) == pytest.approx(found.total, rel=1e-10)
    assert float(found.pairs.sum()) == pytest.approx(found.total, rel=1e-10)
    assert found.model_total == pytest.approx(exact, rel=1e-5)  # eager against fused attention
    assert found.total == pytest.approx(exact, rel=1e-5)
    assert torch.allclose(found.pairs, found.pairs.T)
    # Rounding is a part like any other, and small; no other part is.
    sizes = dict(zip(found.labels, found.pairs.abs().sum(1), strict=True))
    rounding = sizes.pop("rounding")
    if layer == 0:
        assert sizes.pop("MLPs below") == 0
    assert rounding < 1e-5 * max(sizes.values()) and min(sizes.values()) > 100 * rounding
    assert found.source[2] == 0 and found.source[-1] is None


def test_attention_setting_is_put_back(model):
    before = model.config._attn_implementation
    attribute(model, TOKENS, 0, torch.ones(32))
    assert model.config._attn_implementation == before


def test_bad_attributions(model):
    with pytest.raises(InputError, match="layer 1 is gated"):
        attribute(model, TOKENS, 1, torch.ones(32))
    with pytest.raises(InputError, match="position 8 of a prompt of 8 tokens"):
        attribute(model, TOKENS, 0, torch.ones(32), 8)
    with pytest.raises(InputError, match=r"direction of size \[31\]; the last must be 32"):
        attribute(model, TOKENS, 0, torch.ones(31))


def test_a_stream_that_is_no_plain_sum_is_refused(model):
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(InputError, match="no plain sum"):
        attribute(model, TOKENS, 2, torch.ones(32))
    handle.remove()
