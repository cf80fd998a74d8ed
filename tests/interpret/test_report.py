"""The commands on a pico model: reports whole or not at all, looked at in headless Chromium."""

import json
import re
from pathlib import Path

import pytest

from bilinearize import InputError
from bilinearize.interpret.gallery import gallery, honest_comment
from bilinearize.interpret.hosvd import find_hosvd
from bilinearize.interpret.layers import layer_tensor, mlp_inputs
from bilinearize.interpret.lowrank import truncation_correlations
from bilinearize.interpret.measure import correlate_layers, symmetry, windows_of
from bilinearize.interpret.run import attribution, spectrum
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer
from bilinearize.model.page import Page, Tokens, show_token

NAMES = ("spectrum", "attribute", "symmetry", "correlate", "gallery")
PROBE = """<script>addEventListener("load", () => { document.title = JSON.stringify({
  pictures: [...document.images].map(i => i.naturalWidth),
  overflow: document.documentElement.scrollWidth - innerWidth}) })</script>"""


@pytest.fixture(scope="module")
def reports(converted_pico, text_file, tmp_path_factory) -> dict[str, Path]:
    """One report of each command."""
    folder, model = tmp_path_factory.mktemp("reports"), str(converted_pico)
    out = {name: folder / name for name in NAMES}
    spectrum(model, out["spectrum"], [" house", " house -  blue", "hosvd:0"], eigenvectors=3)
    attribution(model, out["attribute"], "a house turns blue", " house", layer=2)
    symmetry(model, out["symmetry"], str(text_file), tokens=128, window=64)
    correlate_layers(model, out["correlate"], str(text_file), tokens=256, window=64, directions=3)
    gallery(model, out["gallery"], str(text_file), directions=[], tokens=256, window=64)
    return out


def read(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_pages_are_self_contained(reports):
    for folder in reports.values():
        page = (folder / "index.html").read_text()
        sources = re.findall(r'(?:src|href)="([^"]*)"', page)
        assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
        assert len(sources) == len(list(folder.glob("*.png")))
        assert "http" not in re.sub(r'src="[^"]*"', "", page)


def test_spectrum_report(reports):
    data = read(reports["spectrum"])
    assert set(data["layers"]) == {"0", "2"} == set(data["overview"]["effective_rank"])
    first = data["layers"]["0"][0]
    assert first["direction"] == "␣house" and len(first["eigenvectors"]) == 3
    sizes = [abs(vector["eigenvalue"]) for vector in first["eigenvectors"]]
    assert sizes == sorted(sizes, reverse=True)
    matrix = first["token_interactions"]["matrix"]
    assert (
        len(matrix) == len(first["token_interactions"]["tokens"]) and matrix[0][1] == matrix[1][0]
    )


def test_attribution_report_adds_up(reports):
    data = read(reports["attribute"])
    assert sum(data["eigenvectors"]) == pytest.approx(data["total"], rel=1e-10)
    assert sum(map(sum, data["pairs"])) == pytest.approx(data["total"], rel=1e-10)
    assert data["model_total"] == pytest.approx(data["total"], rel=1e-4)


def test_symmetry_report_tells_converted_layers_from_gated_ones(reports):
    changes = read(reports["symmetry"])["changes"]
    for kind, layers in changes.items():
        assert max(layers["0"], layers["2"]) < 1e-12
        assert layers["1"] < 1e-12 if kind == "absorbed query" else layers["1"] > 0.01


def test_correlation_report(reports):
    data = read(reports["correlate"])
    assert set(data["shares"]) == {
        kind + suffix
        for kind in ("tokens", "strongest", "Gaussian")
        for suffix in ("", ", shuffled")
    }
    values = [row["all"] for row in data["correlations"]["tokens"].values()]
    flat = [value for row in values for value in row]
    share = sum(value > 0.75 for value in flat) / len(flat)
    assert data["shares"]["tokens"]["all"] == pytest.approx(share) and len(flat) == 6


def test_gallery(reports, converted_pico, text_file):
    data, readme = read(reports["gallery"]), (reports["gallery"] / "README.md").read_text()
    assert set(data["layers"]) == {"0", "2"}
    names = [record["direction"] for record in data["layers"]["0"]]
    # Of the usual tokens the pico vocabulary has none.
    assert names == ["hosvd:0", "hosvd:1"]
    first = data["layers"]["0"][0]
    token = re.findall("⟨(.*?)⟩", first["eigenvectors"][0]["place"])
    assert len(token) == 1 and token[0].strip() in text_file.read_text()
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", readme):
        assert (reports["gallery"] / picture).is_file()
    model, tokenizer = load_causal_lm(converted_pico), load_tokenizer(converted_pico)
    windows = windows_of(tokenizer, str(text_file), "text", "test", 256, 64)
    tensor, x = layer_tensor(model, 0), mlp_inputs(model, windows, [0], skip=1)[0]
    direction = find_hosvd(tensor).directions[:1]
    right = truncation_correlations(tensor, x, direction, 2)["all"]
    assert first["correlation"] == pytest.approx(float(right), rel=1e-6)


def test_the_comment_counts_what_the_table_shows():
    def record(correlation):
        return {"correlation": correlation, "effective_rank": 5.0, "share_of_two": 0.5}

    first, second, _ = honest_comment({0: [record(0.9), record(0.1)], 3: [record(0.0)]})
    assert "in 1 of 3 cases" in first and "layer 0: 1 of 2; layer 3: 0 of 1" in second


def test_bad_input_leaves_nothing(converted_pico, pico_llama, text_file, tmp_path):
    model, out = str(converted_pico), tmp_path / "out"
    with pytest.raises(InputError, match="is not one token"):
        spectrum(model, out, ["qqqq"])
    with pytest.raises(InputError, match="layer 1 is gated"):
        spectrum(model, out, [" house"], layers=[1])
    with pytest.raises(InputError, match="no layer of this model is converted"):
        spectrum(str(pico_llama), out, [" house"])
    with pytest.raises(InputError, match="there is no layer 7"):
        attribution(model, out, "a house", " house", layer=7)
    with pytest.raises(InputError, match="prompt is empty"):
        attribution(model, out, " ", " house", layer=0)
    with pytest.raises(InputError, match="at least 1"):
        correlate_layers(model, out, str(text_file), directions=0)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    with pytest.raises(InputError, match="exists already"):
        symmetry(model, out, str(text_file))


def test_tokens_are_shown_so_that_nothing_is_markup():
    page = Page("a < b")
    page.table(["x | y"], [[Tokens([" |", "`", "</td>", "\n", ""])], [0.12345], ["*bold*"]])
    assert show_token(" a\n") == "␣a⏎" and show_token("") == "(empty)"
    assert "<code>&lt;/td&gt;</code>" in page.to_html() and "<h1>a &lt; b</h1>" in page.to_html()
    row = page.to_markdown().splitlines()[4]
    assert row == "| `␣¦` `ˋ` `</td>` `⏎` `(empty)` |"
    assert r"\*bold\*" in page.to_markdown() and "| 0.123 |" in page.to_markdown()


@pytest.mark.parametrize("name", NAMES)
def test_pages_load_in_chromium(reports, browse, name, tmp_path):
    page = tmp_path / "page.html"
    page.write_text((reports[name] / "index.html").read_text() + PROBE)
    facts = json.loads(re.findall("<title>(.*?)</title>", browse(page, "--dump-dom"))[0])
    assert len(facts["pictures"]) == len(list(reports[name].glob("*.png")))
    assert min(facts["pictures"]) > 300 and facts["overflow"] <= 0


def test_pages_as_seen_in_chromium(reports, colours):
    text = (reports["attribute"] / "index.html").read_text()
    whole, without = colours(text), colours(re.sub("<img[^>]*>", "", text))
    # Text is dark on white in both; what the pictures add is colour.
    assert whole["dark"] > 0.003 and without["dark"] > 0.001
    assert whole["colour"] > 10 * without["colour"]
