"""Ranks, widths and chosen layers through the whole converter."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bilinearize import InputError
from bilinearize.convert.run import convert
from bilinearize.model.checkpoint import load_causal_lm

OPTIONS = dict(tokens=2048, window=32)


@pytest.fixture(scope="module")
def conversions(pico_llama, text_file, tmp_path_factory):
    """Records and folders by name: ranks 1 to 6, and widths 2 and 3."""
    found = {}
    forms = {f"rank {rank}": {"rank": rank} for rank in (1, 2, 3, 4, 6)}
    forms |= {f"expand {expand}": {"expand": expand} for expand in (2, 3)}
    for name, form in forms.items():
        out = tmp_path_factory.mktemp("forms") / "out"
        found[name] = convert(str(pico_llama), out, text=str(text_file), **OPTIONS, **form), out
    return found


def first_errors(conversions, names):
    # Layer 0 sees the same inputs whatever comes after, so its errors compare.
    return [conversions[name][0]["layers"][0]["heldout_error"] for name in names]


def test_no_rank_fits_worse_than_a_lower_one(conversions):
    errors = first_errors(conversions, [f"rank {rank}" for rank in (1, 2, 3, 4, 6)])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_wider_layers_fit_better(conversions):
    errors = first_errors(conversions, ["rank 1", "expand 2", "expand 3"])
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("name", ["rank 2", "rank 4", "rank 6", "expand 3"])
def test_forms_survive_a_reload(conversions, name):
    _, out = conversions[name]
    model = load_causal_lm(out)
    mlp = model.model.layers[1].mlp
    rank, slots = {"rank 2": (2, 64), "rank 4": (4, 64), "rank 6": (6, 64), "expand 3": (1, 192)}[
        name
    ]
    assert mlp.rank == rank and mlp.down_proj.in_features == slots
    prompt = torch.arange(5)[None] + 100
    mask = torch.ones_like(prompt)
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=1)
    cached = model.generate(prompt, use_cache=True, **options)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))


def test_chosen_layers_are_converted_and_the_others_kept(pico_llama, text_file, tmp_path):
    record = convert(
        str(pico_llama), tmp_path / "part", text=str(text_file), layers="0,2", **OPTIONS
    )
    assert [layer["form"] for layer in record["layers"]] == ["bilinear", "gated", "bilinear"]
    part = AutoModelForCausalLM.from_pretrained(tmp_path / "part")
    source = load_causal_lm(pico_llama)
    assert [layer.mlp.form for layer in part.model.layers] == ["bilinear", "gated", "bilinear"]
    kept, original = part.model.layers[1].mlp, source.model.layers[1].mlp
    x = torch.randn(4, 32)
    assert torch.equal(kept(x), original(x))
    assert "left as it was" in (tmp_path / "part" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 0}, "--rank is 0; use 1 or more"),
        ({"rank": 5, "activation": "relu"}, "--rank is 5; with --activation relu use 1 to 4"),
        ({"rank": [1, 2]}, "--rank has 2 entries; the source has 3 layers"),
        ({"expand": 9}, "--expand is 9"),
        ({"layers": "0-3"}, "--layers 0-3: the source has layers 0 to 2"),
        ({"layers": "first"}, "--layers is 'first'"),
        ({"rank": 2, "method": "taylor"}, "--method taylor has rank 1"),
    ],
)
def test_forms_that_do_not_exist_are_named(pico_llama, text_file, tmp_path, options, named):
    with pytest.raises(InputError, match=named):
        convert(str(pico_llama), tmp_path / "out", text=str(text_file), **options)
    assert not (tmp_path / "out").exists()
