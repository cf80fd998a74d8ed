"""The cost of single layers, against the same model assembled by the converter."""

import json

import pytest
import torch
from matplotlib.image import imread
from transformers import AutoTokenizer

from bilinearize import InputError
from bilinearize.convert.options import parse_layers
from bilinearize.convert.run import convert
from bilinearize.convert.scan import scan, spans, suggest_ranks
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.text import pack_windows, read_documents

OPTIONS = dict(tokens=1024, window=32)


@pytest.fixture(scope="module")
def scanned(pico_llama, text_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("scan") / "out"
    return scan(str(pico_llama), out, text=str(text_file), eval_tokens=512, leave=1, **OPTIONS), out


@torch.no_grad()
def mean_loss(folder, windows) -> float:
    logits = load_causal_lm(folder)(windows[:, :-1]).logits.double().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item()


def test_cost_is_that_of_the_model_with_one_layer_converted(
    scanned, pico_llama, text_file, tmp_path
):
    result, _ = scanned
    tokenizer = AutoTokenizer.from_pretrained(pico_llama)
    windows = pack_windows(read_documents(str(text_file)), tokenizer, 32, 1024 + 512)[32:]
    base = mean_loss(pico_llama, windows)
    assert result["source_loss"] == pytest.approx(base, rel=1e-5)
    costs = []
    for layer in (0, 2):
        out = tmp_path / str(layer)
        convert(str(pico_llama), out, text=str(text_file), layers=str(layer), **OPTIONS)
        cost = mean_loss(out, windows) - base
        assert result["layers"][layer]["cost"] == pytest.approx(cost, abs=5e-5)
        costs.append(abs(cost))
    assert max(costs) > 3e-4  # or the agreement would say nothing


def test_report_is_whole(scanned):
    result, out = scanned
    assert json.loads((out / "scan.json").read_text()) == result
    dearest = max(result["layers"], key=lambda each: each["cost"])["layer"]
    assert result["left"] == [dearest]
    assert parse_layers(result["convert_layers"], 3) == {0, 1, 2} - {dearest}
    assert f"| {dearest} |" in (out / "scan.md").read_text().splitlines()[2]
    assert imread(out / "scan.png").std() > 0


def test_spans_are_what_layers_takes():
    for layers in ({0}, {0, 1, 2}, {0, 2, 3, 4, 9}, {1, 3, 5}):
        assert parse_layers(spans(layers), 10) == layers
    assert spans({0, 1, 2, 5}) == "0-2,5"


def test_bad_options_are_named(pico_llama, text_file, tmp_path):
    source, out = str(pico_llama), tmp_path / "out"
    cases = [
        ({"leave": 3}, "--leave is 3"),
        ({"tokens": 10**6, "leave": 1}, "two windows to evaluate"),
    ]
    for options, named in cases:
        with pytest.raises(InputError, match=named):
            scan(source, out, text=str(text_file), **({"window": 32} | options))
        assert not out.exists()


def test_ranks_are_raised_where_it_saves_most(pico_llama, text_file, tmp_path):
    options = OPTIONS | {"eval_tokens": 512, "higher_rank": 2, "budget": 0.25}
    result = scan(str(pico_llama), tmp_path / "out", text=str(text_file), **options, leave=1)
    # One of three layers at rank 2 adds 2/9 of the MLPs' weights, two would be too many.
    gains = [each["cost"] - each["higher_cost"] for each in result["layers"]]
    expected = [1, 1, 1]
    if max(gains) > 0:
        expected[gains.index(max(gains))] = 2
    assert result["ranks"] == expected
    assert f"--rank '{expected}'" in (tmp_path / "out" / "scan.md").read_text()
    for bad in ({"higher_rank": 1}, {"budget": 0.0}, {"higher_rank": 0}):
        with pytest.raises(InputError, match="rank"):
            scan(str(pico_llama), tmp_path / "bad", text=str(text_file), **options | bad, leave=1)


def test_suggested_ranks_follow_the_gains_and_the_budget():
    layers = [
        {"layer": index, "cost": cost, "higher_cost": higher}
        for index, (cost, higher) in enumerate([(0.3, 0.1), (0.2, 0.19), (0.5, 0.2), (0.1, 0.2)])
    ]
    assert suggest_ranks(layers, 1, 2, 0.34) == [2, 1, 2, 1]
    assert suggest_ranks(layers, 1, 2, 9.0) == [2, 2, 2, 1]  # never where it costs more
    assert suggest_ranks(layers, 1, 2, 0.1) == [1, 1, 1, 1]
