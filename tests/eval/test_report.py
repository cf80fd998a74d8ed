"""The three files of a report, the table, and the text samples."""

import inspect
import json
import re
from copy import deepcopy

import matplotlib.image
import pytest
import torch
from transformers import GenerationConfig

from bilinearize.eval.compare import evaluate
from bilinearize.eval.config import EvalConfig
from bilinearize.eval.generate import (
    choose_prompts,
    common_length,
    continue_greedily,
    distinct,
    repetition,
)
from bilinearize.eval.plot import draw
from bilinearize.eval.report import format_markdown, format_table
from bilinearize.eval.windows import Window
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer
from bilinearize.model.tables import format_gap, format_size
from bilinearize.model.text import fingerprint


def test_files(report):
    result, out = report
    assert sorted(file.name for file in out.iterdir()) == [
        *("eval.html", "eval.json", "eval.md", "eval.png")
    ]
    assert not out.with_name(out.name + ".partial").exists()
    assert json.loads((out / "eval.json").read_text()) == result


def test_the_protocol_is_in_the_result(report, windows):
    facts = report[0]["protocol"]
    assert report[0]["schema"] == 2
    assert facts["windows"] == len(windows) and facts["window"] == windows.shape[1]
    assert facts["tokens_scored"] == windows[:, 1:].numel()
    assert facts["slices"]["documents"]["tokens_sha256"] == fingerprint(windows)
    assert len(facts["tokens_sha256"]) == len(facts["slices"]["documents"]["text_sha256"]) == 64
    assert len(facts["tokenizer_sha256"]) == 64
    assert (facts["bos"], facts["bos_in_every_window"]) == ("auto", False)
    assert (facts["dtype"], facts["device"], facts["attention"]) == ("float32", "cpu", "sdpa")
    assert set(facts["versions"]) == {"python", "bilinearize", "torch", "transformers", "numpy"}
    assert facts["interval"]["level"] == 0.95


def test_the_markdown_has_the_numbers_of_the_json(report):
    result, out = report
    text = (out / "eval.md").read_text()
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for cells in (line.strip("|").split("|") for line in text.splitlines() if "|" in line)
        if len(cells) == 6 and cells[0].strip() not in ("model", "")
    }
    assert float(rows["teacher"][0].replace(",", "")) == pytest.approx(
        result["teacher"]["perplexity"], rel=0.005
    )
    for name, record in result["candidates"].items():
        perplexity, gap, ratio, kl, top1 = rows[name]
        assert float(perplexity.replace(",", "")) == pytest.approx(record["perplexity"], rel=0.005)
        numbers = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", gap)]
        assert numbers == pytest.approx([record["gap"], *record["gap_interval"]], abs=6e-4)
        assert float(ratio) == pytest.approx(record["ratio"], abs=6e-4)
        assert float(kl) == pytest.approx(record["kl"], abs=6e-5)
        assert float(top1.rstrip("%")) == pytest.approx(100 * record["top1_agreement"], abs=0.06)
    assert f"{result['protocol']['tokens_scored']:,} scored tokens" in text
    assert "without BOS" in text and result["protocol"]["tokens_sha256"] in text


def test_the_table_is_printed_and_is_that_of_the_markdown(
    report, pico_llama, half, documents_file, tmp_path, capsys
):
    result, out = report
    table = format_table(result)
    assert table in (out / "eval.md").read_text()
    assert len({len(line) for line in table.splitlines()}) == 1  # aligned
    assert len(table.splitlines()) == 3 + len(result["candidates"])
    source, candidates = str(pico_llama), {"half": str(half)}
    text = str(documents_file)
    again = evaluate(
        source, candidates, tmp_path / "o", text=text, window=64, tokens=256, prompts=1
    )
    printed, progress = capsys.readouterr()
    assert format_table(again) in printed and "252 scored tokens" in printed
    assert "4/4" in progress  # the bar, on stderr


def test_no_value_is_lost_in_the_markdown_of_hostile_text(report):
    result = deepcopy(report[0])
    result["samples"][0]["teacher"] = "```\n# not a heading | <b>"
    text = format_markdown(result)
    assert "    # not a heading" in text and "\n# not a heading" not in text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (41.532, "41.53"),
        (412.64, "412.6"),
        (138214.3, "138,214"),
        (1.0, "1.00"),
        (0.0123, "0.01"),
        (0.0, "0.00"),
        (3.2e12, "3.20e+12"),
        (None, "over 1e300"),
    ],
)
def test_sizes(value, written):
    assert format_size(value) == written


def test_gaps_show_the_width_of_their_interval():
    assert format_gap(0.12345, [0.119, 0.1279]) == "+0.1235 [0.1190, 0.1279]"
    assert format_gap(-8.1, [-8.4, -7.8]) == "-8.100 [-8.400, -7.800]"
    assert format_gap(0.0, [0.0, 0.0]) == "+0.000 [0.000, 0.000]"
    assert format_gap(0.5, None) == "+0.500 [n/a]"


def test_the_picture_shows_something(report, tmp_path):
    result, out = report
    picture = matplotlib.image.imread(out / "eval.png")
    assert picture.ndim == 3 and min(picture.shape[:2]) > 400
    assert picture[..., :3].std() > 0.05
    # A much worse candidate moves the points: the picture is drawn from the numbers.
    changed = deepcopy(result)
    changed["candidates"]["half"]["nll"] += 5
    changed["candidates"]["half"]["gap"] += 5
    draw(changed, tmp_path / "changed.png")
    other = matplotlib.image.imread(tmp_path / "changed.png")
    assert other.shape == picture.shape and abs(other - picture).max() > 0.5


def test_samples(report, pico_llama, half, windows):
    result, _ = report
    tokenizer = load_tokenizer(pico_llama)
    teacher, student = load_causal_lm(pico_llama), load_causal_lm(half)
    prompts, _ = choose_prompts([Window(row, 63) for row in windows], 16, 12)
    assert len(result["samples"]) == len(prompts) == 16
    for sample, prompt in zip(result["samples"], prompts, strict=True):
        assert sample["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
        written = [_greedy_without_cache(model, prompt, 12) for model in (teacher, student)]
        assert sample["teacher"] == tokenizer.decode(written[0])
        assert sample["candidates"]["half"] == tokenizer.decode(written[1])
        shared = sample["tokens_until_divergence"]
        assert shared["copy"] == 12
        assert shared["half"] == common_length(*written)


def _greedy_without_cache(model, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    ids = prompt[None]
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :]


def test_generation_takes_nothing_from_the_checkpoints_settings(pico_llama, windows):
    model = load_causal_lm(pico_llama)
    prompts, _ = choose_prompts([Window(row, 63) for row in windows], 2, 12)
    plain = continue_greedily(model, prompts, 12, 300)
    settings = GenerationConfig(repetition_penalty=5.0, eos_token_id=plain[0, 1].item())
    model.generation_config = settings
    assert continue_greedily(model, prompts, 12, 300).equal(plain)
    assert model.generation_config is settings
    # Negative control: they do change what `generate` gives by itself.
    own = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12)
    assert not own[:, prompts.shape[1] :].equal(plain)


def test_generation_in_numbers(report, pico_llama, half, windows):
    facts = report[0]["generation"]
    teacher, student = load_causal_lm(pico_llama), load_causal_lm(half)
    starts, real = choose_prompts([Window(row, 63) for row in windows], 16, 12)
    assert (facts["prompts"], facts["prompt_tokens"], facts["tokens"]) == (16, 32, 12)
    written = {"text": real}
    for name, model in (("teacher", teacher), ("half", student)):
        rows = [_greedy_without_cache(model, prompt, 12) for prompt in starts]
        written[name] = torch.stack(rows)
    loss = {}
    for name, rows in written.items():
        ids = torch.cat([starts, rows], 1)
        with torch.no_grad():
            scores = teacher(ids).logits[:, 31:-1].double().log_softmax(-1)
        loss[name] = -scores.gather(-1, rows[..., None])[..., 0].sum(1)
    record = facts["candidates"]["half"]
    assert facts["text"]["teacher_nll"] == pytest.approx(float(loss["text"].mean()) / 12)
    assert facts["teacher"]["teacher_nll"] == pytest.approx(float(loss["teacher"].mean()) / 12)
    gap = (loss["half"] - loss["teacher"]) / 12
    assert record["teacher_nll_gap"] == pytest.approx(float(gap.mean()), rel=1e-5)
    low, high = record["teacher_nll_gap_interval"]
    reach = 2.13145 * float(gap.std()) / 4  # Student's t for 16 prompts
    assert (high - low) / 2 == pytest.approx(reach, rel=0.05)
    shared = [
        common_length(*pair) for pair in zip(written["half"], written["teacher"], strict=True)
    ]
    assert record["first_divergence_mean"] == pytest.approx(sum(shared) / 16)
    assert record["identical"] == sum(length == 12 for length in shared) / 16
    assert record["distinct_2"] == distinct(written["half"].tolist(), 2)
    copy = facts["candidates"]["copy"]
    assert (copy["teacher_nll_gap"], copy["teacher_nll_gap_interval"]) == (0, [0, 0])
    assert (copy["first_divergence_median"], copy["identical"]) == (12, 1)
    assert "| (held-out text)" in (report[1] / "eval.md").read_text()


def test_distinct_and_repeated_n_grams_by_hand():
    rows = [[1, 2, 1, 2, 1], [1, 2, 3, 4, 5]]
    assert distinct(rows, 1) == 5 / 10
    assert distinct(rows, 2) == 5 / 8  # 12, 21, 23, 34, 45
    assert repetition(rows, 2) == pytest.approx((2 / 4 + 0) / 2)
    assert repetition([[7] * 10], 4) == pytest.approx(6 / 7)
    assert distinct([[1]], 2) is None and repetition([[1]], 2) is None


def test_common_length():
    first = torch.tensor([1, 2, 3, 4])
    assert common_length(first, first) == 4
    assert common_length(first, torch.tensor([1, 2, 9, 4])) == 2
    assert common_length(first, torch.tensor([9, 2, 3, 4])) == 0


def test_the_config_is_what_evaluate_takes():
    parameters = inspect.signature(evaluate).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert vars(EvalConfig()) == keywords
