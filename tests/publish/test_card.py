"""The model card: every number from a file of the run, metadata as the hub wants it."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from bilinearize import InputError
from bilinearize.convert.export import export
from bilinearize.model import card
from bilinearize.publish.card import choose_license, describe_results, format_card
from bilinearize.publish.plan import cut_paths, plan_upload


@pytest.fixture(scope="module")
def plan(finished):
    return plan_upload(finished / "finetuned", finished / "eval")


@pytest.fixture(scope="module")
def text(plan):
    return format_card(plan, "me/pico-bilinear", choose_license(plan, None))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_metadata(text, finished):
    metadata = yaml.safe_load(text[4:].partition("\n---")[0])
    assert metadata["license"] == "mit" and metadata["library_name"] == "transformers"
    assert "bilinearize" in metadata["tags"] and "base_model" not in metadata  # a local folder
    parsed = ModelCard(text).data  # the hub's own reader, model-index included
    report = read(finished / "eval" / "eval.json")
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in parsed.eval_results}
    assert set(name for name, _ in found) == {"words", "more"}
    for name, part in report["slices"].items():
        for key in ("perplexity", "gap", "kl", "top1_agreement"):
            assert found[name, key] == part["candidates"]["finetuned"][key]
    assert parsed.model_name == "pico-bilinear"


def test_tasks_are_in_the_card(plan):
    record = {"score": 0.5, "difference": -0.125, "difference_interval": [-0.25, 0.0]}
    record |= {"gained": 1, "lost": 2, "mcnemar_p": 0.03125}
    facts = {"questions": 1234, "teacher": 0.625, "candidates": {"finetuned": record}}
    report = plan.report | {"tasks": {"arc_easy": {"acc": facts}}}
    text = "\n".join(describe_results(report, "finetuned", plot=False))
    row = next(line for line in text.splitlines() if "arc_easy, acc" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        *("arc_easy, acc", "1,234", "0.6250", "0.5000", "-0.125 [-0.250, 0.000]", "0.0312")
    ]


def test_a_hub_source_is_the_base_model(plan):
    made = plan.records.made | {"source": "HuggingFaceTB/SmolLM2-135M", "revision": "abc"}
    made["calibration"] = made["calibration"] | {"text": "Salesforce/wikitext:wikitext-2-raw-v1"}
    records = card.Records(plan.records.folder, plan.records.config, made, None)
    metadata = card.metadata_of(records, "apache-2.0")
    assert metadata["base_model"] == ["HuggingFaceTB/SmolLM2-135M"]
    assert metadata["base_model_relation"] == "finetune"
    assert metadata["datasets"] == ["Salesforce/wikitext"]
    assert "`HuggingFaceTB/SmolLM2-135M` at revision `abc`" in card.describe_change(records)


def test_every_number_is_from_a_file_of_the_run(text, plan, finished):
    files = [finished / "eval" / "eval.json"]
    files += [finished / "finetuned" / name for name in ("bilinearize.json", "finetune.json")]
    known = [number for file in files for number in numbers_of(read(file))]
    body = text.partition("\n---\n")[2]
    for fixed in (card.CITATIONS, card.LIMITS, card.LOADING.format(name="me/pico-bilinear")):
        assert fixed in body
        body = body.replace(fixed, "")
    body = re.sub(r"`[^`]*`|bilinearize \d\S*|95 %|Top-1|top-1|\(.*?\)", "", body)
    found = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?", body)
    assert len(found) > 60
    for shown in found:
        assert is_rounded(shown, known), shown
    # Negative control: a number of no file is seen.
    assert not is_rounded("123.456", known)


def numbers_of(value) -> list[float]:
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers_of(entry)]
    if isinstance(value, list):
        extra = [float(len(value)), float(sum(_converted(entry) for entry in value))]
        return extra + [number for entry in value for number in numbers_of(entry)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _converted(entry) -> bool:
    return isinstance(entry, dict) and entry.get("form") == "bilinear"


def is_rounded(shown: str, known: list[float]) -> bool:
    """Whether a printed number is one of the known ones to its last digit."""
    plain = shown.rstrip("%").replace(",", "")
    step = 10.0 ** -len(plain.partition(".")[2]) if "e" not in plain else 0.01 * abs(float(plain))
    scale = 100 if shown.endswith("%") else 1
    return any(abs(number * scale - float(plain)) <= 0.51 * step for number in known)


def test_the_card_says_what_was_done_and_how_to_load_it(text, plan):
    before = plan.report["teacher"]["parameters"]
    after = plan.records.made["parameters"]
    assert f"{after:,} parameters, {before:,} before" in text
    assert "3 of its 3 layers" in text and "Method `refit`" in text
    assert "**finetuned (this one)**" in text and "| taylor" in text and "| refit" in text
    assert "trust_remote_code=True" in text and "import bilinearize" in text
    assert "2410.08417" in text and "2606.22172" in text
    assert "](eval/eval.png)" in text and "## Limits" in text


def test_no_local_path_is_published(text, plan, finished):
    assert str(finished.parent) not in text
    for name, content in plan.files.items():
        if name.endswith(".json") or name.endswith(".jsonl"):
            data = content if isinstance(content, bytes) else content.read_bytes()
            assert str(finished.parent).encode() not in data, name
            assert b"/tmp" not in data or name.startswith("tokenizer"), name
    assert cut_paths({"source": "/a/b/c", "x": ["/a/b"], "text": {"w": "d/e"}}) == {
        **{"source": "c", "x": ["/a/b"], "text": {"w": "d/e"}}
    }


def test_a_conversion_writes_a_first_card(finished):
    first = (finished / "converted" / "README.md").read_text()
    assert first.startswith("---\n") and "license: mit" in first
    assert card.UNMEASURED in first and "| layer" in first and "model-index" not in first
    second = (finished / "finetuned" / "README.md").read_text()
    assert "## Finetune" in second and "Distilled from the source on 1,024 tokens" in second
    assert "## Finetune" not in first and card.UNMEASURED not in second


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\n: : :\n---\n", None),
        ("# no metadata", None),
    ],
)
def test_licences_are_read_from_a_card(content, found, tmp_path):
    assert card.read_license(tmp_path) is None
    (tmp_path / "README.md").write_text(content)
    assert card.read_license(tmp_path) == found


def test_a_stock_export_loads_without_custom_code(finished, tmp_path):
    export(str(finished / "finetuned"), tmp_path / "stock", format="stock")
    stock = plan_upload(tmp_path / "stock", None)
    text = format_card(stock, "me/stock", "mit")
    assert "no custom code is needed" in text and "trust_remote_code" not in text
    assert "custom_code" not in text.partition("\n---")[0]
    assert f"(`{stock.records.exported['class']}`)" in text
    assert f"{stock.records.exported['parameters']:,} parameters" in text
    assert "export.json" in stock.files and not [f for f in stock.files if f.endswith(".py")]


def test_an_unknown_licence_is_asked_for(plan, tmp_path):
    made = plan.records.made | {"license": None, "source": str(tmp_path)}
    plan = type(plan)(card.Records(plan.records.folder, {}, made, None))
    with pytest.raises(InputError, match="its licence is not known; name it with --license"):
        choose_license(plan, None)
    assert choose_license(plan, "mit") == "mit"
