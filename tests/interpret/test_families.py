"""Every convertible family: its block, read from the residual stream or as it stands."""

from dataclasses import fields

import pytest
import torch

from bilinearize import InputError
from bilinearize.interpret.attribution import attribute
from bilinearize.interpret.layers import layer_tensor, mlp_inputs, norm_behind, norm_weight
from bilinearize.model.families import FAMILIES

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.2,
}
CENTRED = ("olmo", "stablelm", "cohere", "cohere2")
"""These have LayerNorms, which no weights of an RMSNorm can stand for."""
TOKENS = torch.arange(2, 26).view(2, 12)


@pytest.fixture(params=FAMILIES)
def converted(request):
    """A random converted model of one family, norms uneven; and the family's name."""
    family = FAMILIES[request.param]
    known = {field.name for field in fields(family.config)}
    values = {name: value for name, value in SMALL.items() if name in known}
    if request.param == "hyperclovax":
        values["use_post_norm"] = True
    torch.manual_seed(0)
    model = family.causal_lm(family.config(**values, bilinear_bias=True)).eval()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return request.param, model


@torch.no_grad()
def test_layers_are_read_as_they_stand_and_from_the_stream(converted):
    kind, model = converted
    layer, seen = model.base_model.layers[1], {}

    def keep(module, args, output):
        seen["y"] = output.flatten(0, -2).double()

    handle = layer.mlp.register_forward_hook(keep)
    rows = []
    for window in TOKENS:
        model(window[None])
        rows.append(seen["y"])
    handle.remove()
    right = torch.cat(rows)
    plain = layer_tensor(model, 1, fold=False)
    assert relative(plain.output(mlp_inputs(model, TOKENS, [1], fold=False)[1]), right) < 1e-5
    if kind in CENTRED:
        with pytest.raises(InputError, match="layer 1: .*Norm is no RMSNorm"):
            layer_tensor(model, 1)
        return
    folded = layer_tensor(model, 1)
    behind = norm_behind(layer)
    if behind is not None:
        right = right * norm_weight(behind, 32, "behind").double()
    assert relative(folded.output(mlp_inputs(model, TOKENS, [1])[1]), right) < 1e-5
    assert relative(plain.output(mlp_inputs(model, TOKENS, [1])[1]), right) > 1e-2 or kind in (
        "olmo2",
        "olmo3",
        "exaone4",
    )


def relative(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours - right).norm() / right.norm())


def test_the_norm_behind_is_found_where_the_family_has_one(converted):
    kind, model = converted
    modules = [name for name in FAMILIES[kind].row.joins if "norm" in name]
    assert (norm_behind(model.base_model.layers[0]) is not None) == bool(modules)


NO_PARTS = {
    "olmo2": "norm behind",
    "olmo3": "norm behind",
    "exaone4": "norm behind",
    "gemma2": "norm behind",
    "gemma3_text": "norm behind",
    "hyperclovax": "norm behind",
    "glm4": "norm behind",
    "phi3": "no v_proj",
} | dict.fromkeys(CENTRED, "no RMSNorm")
"""What can't be attributed to parts, and why."""


def test_attributions_are_exact_or_refused(converted):
    kind, model = converted
    if kind == "granite":
        model.config.residual_multiplier = 0.5
        model = type(model)(model.config).eval()
        NO_PARTS[kind] = "no plain sum"
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))
    hooks_before = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    if kind in NO_PARTS:
        with pytest.raises(InputError, match=NO_PARTS[kind]):
            attribute(model, TOKENS[0], 1, direction)
    else:
        found = attribute(model, TOKENS[0], 1, direction)
        assert float(found.pairs.sum()) == pytest.approx(found.total, rel=1e-9)
        assert float(found.eigenvectors.sum()) == pytest.approx(found.total, rel=1e-9)
        scale = float(found.pairs.abs().max())
        assert found.model_total == pytest.approx(found.total, abs=1e-4 * scale)
        rounding = found.pairs[found.labels.index("rounding")]
        assert float(rounding.abs().max()) < 1e-4 * scale
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == hooks_before
