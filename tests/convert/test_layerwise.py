"""The per-layer optimisation: better than the closed form, repeatable, and safe."""

import pytest
import torch

from bilinearize import InputError
from bilinearize.convert.layerwise import optimise
from bilinearize.convert.run import convert
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.modeling_bilinear import BilinearMLP

OPTIONS = dict(tokens=2048, window=32, method="layerwise", epochs=8)


class Planted:
    """Calibration tokens whose targets a known block made."""

    def __init__(self, block, count: int = 2048):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.target = block(self.x)
        self.weight = torch.rand(count, 1, generator=generator) + 0.1

    def steps(self, tokens):
        return len(self.x) // tokens

    def shuffled(self, tokens, seed):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        for picked in order.split(tokens):
            yield self.x[picked], self.target[picked], self.weight[picked]

    def energy(self):
        return (self.weight * self.target.square()).sum().item() / len(self.x)

    def error(self, block):
        left = (self.weight * (block(self.x) - self.target).square()).sum().item()
        return left / len(self.x) / self.energy()


@torch.no_grad()
def test_a_planted_block_is_found():
    torch.manual_seed(0)
    truth = BilinearMLP(8, 16, bias=True)
    planted = Planted(truth)
    start = BilinearMLP(8, 16, bias=True)
    start.load_state_dict(truth.state_dict())
    for parameter in start.parameters():
        parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    before = planted.error(start)
    found, errors = optimise(start, planted, 60, 0.01)
    assert before > 0.02 and planted.error(start) == before  # the start itself is not touched
    assert planted.error(found) < 0.02 * before
    # What it reports is the error written out here: the mean over the last epoch's steps.
    assert errors[-1] == pytest.approx(planted.error(found), rel=0.2)


@pytest.fixture(scope="module")
def conversions(pico_llama, text_file, tmp_path_factory):
    records = {}
    for method in ("refit", "layerwise"):
        out = tmp_path_factory.mktemp("layerwise") / "out"
        options = OPTIONS | {"method": method}
        records[method] = convert(str(pico_llama), out, text=str(text_file), **options), out
    return records


def test_it_beats_the_closed_form_on_held_out_tokens(conversions):
    first = conversions["layerwise"][0]["layers"][0]
    refitted = conversions["refit"][0]["layers"][0]["heldout_error"]
    assert first["closed_form_error"] == pytest.approx(refitted, rel=1e-6)
    assert first["heldout_error"] < 0.95 * refitted
    for layer in conversions["layerwise"][0]["layers"]:
        assert layer["heldout_error"] <= layer["closed_form_error"]


def test_it_repeats(conversions, pico_llama, text_file, tmp_path):
    again = convert(str(pico_llama), tmp_path / "again", text=str(text_file), **OPTIONS)
    first = conversions["layerwise"][0]
    assert [layer["heldout_error"] for layer in again["layers"]] == [
        layer["heldout_error"] for layer in first["layers"]
    ]
    one, two = load_causal_lm(tmp_path / "again"), load_causal_lm(conversions["layerwise"][1])
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name])


@pytest.mark.parametrize(
    "form", [{"rank": 2}, {"expand": 3}, {"activation": "relu"}, {"rank": 4, "activation": "silu"}]
)
def test_every_form_can_be_trained(pico_llama, text_file, tmp_path, form):
    record = convert(str(pico_llama), tmp_path / "out", text=str(text_file), **OPTIONS, **form)
    first = record["layers"][0]
    assert first["heldout_error"] < first["closed_form_error"]
    load_causal_lm(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epochs": 0}, "--epochs is 0; use 1 or more"),
        ({"learning_rate": 0.0}, "--learning_rate is 0.0; use a share between 0 and 1"),
        ({"tokens": 64}, "32 of them to fit on.*about 128 tokens are needed"),
    ],
)
def test_bad_settings_are_named(pico_llama, text_file, tmp_path, options, named):
    with pytest.raises(InputError, match=named):
        convert(str(pico_llama), tmp_path / "out", text=str(text_file), **OPTIONS | options)
    assert not (tmp_path / "out").exists()
