"""Fits for blocks with an activation on their scores, on planted and on real problems."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from bilinearize import InputError
from bilinearize.convert.block import term_features, value_and_slope
from bilinearize.convert.options import ACTIVATIONS
from bilinearize.convert.run import convert
from bilinearize.convert.scores import fit_slots
from bilinearize.model.checkpoint import load_causal_lm

ACTIVE = [name for name in ACTIVATIONS if name != "identity"]


@pytest.mark.parametrize("activation", ACTIVE)
def test_planted_slots_are_found(activation):
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(500, 4, generator=generator) + 0.3 for _ in range(2))
    weight = torch.rand(500, 1, generator=generator) + 0.1
    features = term_features(gate, up, 2).unflatten(1, (2, 4))
    truth = torch.tensor([[0.9, 0.5, -0.7, 1.2], [0.2, 0.6, 0.1, -0.4]])
    act = ACT2FN[activation]
    target = 1.7 * act((features * truth).sum(1))
    start = (truth + 0.2 * torch.randn(2, 4, generator=generator)).double()

    def error(coefficients, amplitude):
        found = amplitude * act((features * coefficients).sum(1))
        left = (weight * (target - found).square()).sum(0)
        return left / (weight * target.square()).sum(0)

    coefficients, amplitude = fit_slots(features, target, weight, start, act)
    assert (error(coefficients, amplitude) < 1e-3).all()
    assert (error(start, 1.7) > 5e-3).any()  # negative control: there was something to find


@pytest.mark.parametrize("activation", ACTIVE)
def test_slopes_are_derivatives(activation):
    act = ACT2FN[activation]
    score = torch.linspace(-3, 3, 50, dtype=torch.float64) + 0.01
    value, slope = value_and_slope(act, score)
    expected = (act(score + 1e-6) - act(score - 1e-6)) / 2e-6
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(value, act(score))


@pytest.fixture(scope="module")
def conversions(pico_llama, text_file, tmp_path_factory):
    found = {}
    for activation in ACTIVE:
        out = tmp_path_factory.mktemp("scores") / "out"
        options = dict(tokens=2048, window=32, activation=activation)
        found[activation] = convert(str(pico_llama), out, text=str(text_file), **options), out
    return found


@pytest.mark.parametrize("activation", ACTIVE)
def test_the_fit_is_good_and_loads(conversions, activation, pico_llama):
    record, out = conversions[activation]
    assert record["activation"] == activation
    for layer in record["layers"]:
        assert layer["heldout_error"] <= layer["affine_error"] < 1
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {layer.mlp.activation for layer in model.model.layers} == {activation}
    source, x = load_causal_lm(pico_llama), torch.randn(200, 32)
    wanted, found = source.model.layers[0].mlp(x), model.model.layers[0].mlp(x)
    assert (wanted - found).square().sum() < 0.7 * wanted.square().sum()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_smooth_activation_fits_no_worse_than_none(conversions, activation):
    # Scores near 0 make it as good as linear, so it has the identity's fit within reach.
    first = conversions[activation][0]["layers"][0]
    assert first["heldout_error"] < 1.02 * first["identity_error"]


def test_an_activation_nobody_knows_is_named(pico_llama, text_file, tmp_path):
    with pytest.raises(InputError, match="--activation is 'swosh'; use one of identity, relu"):
        convert(str(pico_llama), tmp_path / "out", text=str(text_file), activation="swosh")
    assert not (tmp_path / "out").exists()
