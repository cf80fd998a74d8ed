"""The page of a report: self-contained, made of the numbers, looked at in headless Chromium."""

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest

from bilinearize import InputError
from bilinearize.eval.compare import evaluate
from bilinearize.eval.html import format_html
from bilinearize.eval.origin import read_origin

PROBE = """<script>addEventListener("load", () => { document.title = JSON.stringify({
  pictures: [...document.images].map(i => i.naturalWidth),
  tables: document.querySelectorAll("table").length,
  overflow: document.documentElement.scrollWidth - innerWidth}) })</script>"""


@pytest.fixture(scope="module")
def trained(half, tmp_path_factory) -> Path:
    """A candidate with the records of a conversion and of a finetune in two stages."""
    folder = tmp_path_factory.mktemp("trained") / "trained"
    shutil.copytree(half, folder)
    layers = [
        {"layer": 0, "affine_error": 0.4, "heldout_error": 0.2},
        {"layer": 1, "form": "gated"},
        {"layer": 2, "affine_error": 0.3, "heldout_error": 0.1},
    ]
    made = {"source": "pico", "method": "refit", "form": "bilinear", "rank": 1}
    made |= {"activation": "identity", "calibration": {"tokens": 4096}, "layers": layers}
    (folder / "bilinearize.json").write_text(json.dumps(made))
    stages = [{"steps": 2, "tokens": 200}, {"steps": 4, "tokens": 1000}]
    (folder / "finetune.json").write_text(json.dumps({"tokens": 1200, "stages": stages}))
    log = [
        {"stage": 0, "step": 2, "loss": 3.0},
        {"stage": 1, "step": 1, "loss": 2.0, "kl": 1.5, "gap": 1.25},
        {"stage": 1, "step": 4, "loss": 1.0, "kl": 0.5, "gap": 0.25},
        {"stage": 1, "step": 4, "heldout_loss": 1.5, "heldout_kl": 0.75, "heldout_gap": 0.5},
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


@pytest.fixture(scope="module")
def page(pico_llama, half, trained, documents_file, text_file, tmp_path_factory):
    """The result of an evaluation on two slices, and its page."""
    out = tmp_path_factory.mktemp("page") / "out"
    candidates = {"copy": str(pico_llama), "half": str(half), "trained <b>": str(trained)}
    text = {"web": str(documents_file), "words": str(text_file)}
    options = dict(window=64, tokens=512, sample_tokens=8, prompts=4)
    result = evaluate(str(pico_llama), candidates, out, text=text, **options)
    return result, out / "eval.html"


def test_origin_counts_tokens_over_stages(trained, half, tmp_path):
    made = read_origin(trained)
    assert made["training"] == {
        "tokens": [200, 450, 1200, 1200],
        "loss": [3.0, 2.0, 1.0, None],
        "kl": [None, 1.5, 0.5, None],
        "gap": [None, 1.25, 0.25, None],
        "heldout_kl": [None, None, None, 0.75],
        "heldout_gap": [None, None, None, 0.5],
    }
    assert (made["converted_layers"], made["layers"], made["calibration_tokens"]) == (2, 3, 4096)
    assert made["fit"]["heldout_error"] == [0.2, 0.1] and made["training_tokens"] == 1200
    assert read_origin(half) is None
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    (broken / "log.jsonl").write_text('{"stage": 5, "step": 1}\n')
    with pytest.raises(InputError, match="log.jsonl: not the log of a finetune"):
        read_origin(broken)
    (broken / "bilinearize.json").write_text("{")
    with pytest.raises(InputError, match="bilinearize.json: not readable as JSON"):
        read_origin(broken)


def test_the_page_is_self_contained_and_has_every_part(page):
    result, file = page
    text = file.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(sources) == 5  # eval, divergence, slices, fits, training
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    bare = re.sub(r'src="[^"]*"', "", text)
    assert "http" not in bare and "trained <b>" not in bare and "trained &lt;b&gt;" in bare
    for title in ("By slice of text", "How the candidates were made", "What they write"):
        assert f"<h2>{title}</h2>" in bare
    gap = result["slices"]["words"]["candidates"]["half"]["gap"]
    assert f"{gap:+.3f}"[:6] in bare
    assert result["protocol"]["tokens_sha256"] in bare


def test_parts_without_data_are_left_out(page):
    result = deepcopy(page[0])
    del result["candidates"]["half"], result["candidates"]["trained <b>"]
    result["slices"] = {"web": result["slices"]["web"]}
    result["slices"]["web"]["candidates"] = {"copy": {}}
    result["generation"] = result["tasks"] = None
    text = format_html(result, b"png", "")
    assert text.count("<img") == 1 and text.count("<h2>") == 1  # a copy diverges nowhere


def test_the_page_loads_in_chromium(page, browse, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page[1].read_text() + PROBE)
    facts = json.loads(re.findall("<title>(.*?)</title>", browse(file, "--dump-dom"))[0])
    assert len(facts["pictures"]) == 5 and min(facts["pictures"]) > 600
    assert facts["tables"] == 7 and facts["overflow"] <= 0


def test_the_page_as_seen_in_chromium(page, colours):
    text = page[1].read_text()
    whole, without = colours(text), colours(re.sub("<img[^>]*>", "", text))
    # Text is dark on white in both; what the pictures add is colour.
    assert whole["dark"] > 0.003 and without["dark"] > 0.001
    assert whole["colour"] > 10 * without["colour"]
