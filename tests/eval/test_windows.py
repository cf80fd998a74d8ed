"""Slices, protocols and strides: which tokens are scored, in which context, and per what."""

import json
import math
import re

import numpy as np
import pytest
import torch

from bilinearize import InputError
from bilinearize.eval.compare import evaluate
from bilinearize.eval.detokenise import detokenise_wikitext
from bilinearize.eval.windows import plan_reading, read_slices, roll
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer

OPTIONS = {"text_column": None, "split": None, "window": None, "stride": None}
OPTIONS |= {"tokens": None, "bos": "auto"}


def slices(pico_llama, text, protocol="windows", **changes):
    reading = plan_reading(protocol, text, **OPTIONS | changes)
    return read_slices(load_tokenizer(pico_llama), reading)


def losses(model, ids: list[int]) -> list[float]:
    """An independent float64 loss of every token but the first."""
    with torch.no_grad():
        scores = model(torch.tensor(ids)[None]).logits[0].double().numpy()
    totals = [np.logaddexp.reduce(row) for row in scores]
    return [totals[i] - scores[i][token] for i, token in enumerate(ids[1:])]


@pytest.fixture(scope="module")
def sliced(pico_llama, half, text_file, documents_file, tmp_path_factory):
    """One evaluation on two slices."""
    out = tmp_path_factory.mktemp("sliced") / "out"
    text = {"web": str(documents_file), "words": str(text_file)}
    options = dict(window=64, tokens=1024, prompts=2, sample_tokens=4)
    return evaluate(str(pico_llama), {"half": str(half)}, out, text=text, **options), out


def test_slices_are_what_they_are_alone_and_add_up(sliced, pico_llama, half, text_file, tmp_path):
    result, out = sliced
    alone = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "alone",
        text=str(text_file),
        window=64,
        tokens=1024,
        prompts=0,
    )
    assert list(alone["slices"]) == ["words"] and alone["slices"]["words"]["teacher"] == {
        key: alone["teacher"][key] for key in alone["slices"]["words"]["teacher"]
    }
    assert result["slices"]["words"] == alone["slices"]["words"]
    facts = result["protocol"]["slices"]
    tokens = [facts[name]["tokens_scored"] for name in ("web", "words")]
    assert sum(tokens) == result["protocol"]["tokens_scored"] == 2 * 16 * 63
    for key in ("nll", "gap", "kl", "top1_agreement"):
        each = [result["slices"][name]["candidates"]["half"][key] for name in ("web", "words")]
        whole = result["candidates"]["half"][key]
        assert whole == pytest.approx(np.average(each, weights=tokens), rel=1e-12)
    assert each[0] != each[1]
    text = (out / "eval.md").read_text()
    assert "### web, 1,008 tokens" in text and "### words, 1,008 tokens" in text


def test_a_stride_scores_every_token_once_in_its_context(pico_llama, half, text_file, tmp_path):
    result = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "out",
        text=str(text_file),
        window=64,
        stride=16,
        tokens=320,
        prompts=0,
    )
    ids = load_tokenizer(pico_llama)(text_file.read_text()).input_ids[:320]
    model, expected = load_causal_lm(pico_llama), []
    for first in range(0, 320 - 64 + 1, 16):
        found = losses(model, ids[first : first + 64])
        expected += found if first == 0 else found[-16:]
    assert result["protocol"]["tokens_scored"] == len(expected) == 319
    assert result["teacher"]["nll"] == pytest.approx(np.mean(expected), rel=1e-6)
    # Negative control: windows that don't overlap give other contexts, so another loss.
    apart = [loss for first in range(0, 320, 64) for loss in losses(model, ids[first : first + 64])]
    assert abs(np.mean(apart) / result["teacher"]["nll"] - 1) > 1e-4


def test_wikitext_2_is_one_stream_joined_by_empty_lines(pico_llama, documents_file):
    (part,) = slices(pico_llama, str(documents_file), "wikitext-2", window=128)
    rows = [json.loads(line)["text"] for line in documents_file.read_text().splitlines()]
    ids = load_tokenizer(pico_llama)("\n\n".join(rows)).input_ids
    assert len(part.windows) == len(ids) // 128
    assert (
        torch.cat([window.ids for window in part.windows]).tolist() == ids[: len(ids) // 128 * 128]
    )
    assert {window.scored for window in part.windows} == {127}
    reading = plan_reading("wikitext-2", None, **OPTIONS)
    assert reading.window == 2048
    assert reading.sources == {
        "wikitext:wikitext-2-raw-v1": "Salesforce/wikitext:wikitext-2-raw-v1"
    }


def test_lm_eval_scores_every_token_of_a_document_by_word_and_byte(
    pico_llama, half, documents_file, tmp_path
):
    result = evaluate(
        str(pico_llama),
        {"half": str(half)},
        tmp_path / "out",
        text=str(documents_file),
        text_column="text",
        protocol="lm-eval",
        window=50,
        batch_size=3,
        prompts=1,
        sample_tokens=2,
    )
    tokenizer, model = load_tokenizer(pico_llama), load_causal_lm(pico_llama)
    total, words, length, tokens = 0.0, 0, 0, 0
    for line in documents_file.read_text().splitlines():
        text = json.loads(line)["text"]
        ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids]
        done = 0
        while done < len(ids) - 1:
            end = min(done + 50, len(ids) - 1)
            total += sum(losses(model, ids[max(0, end - 50) : end + 1])[done - end :])
            done = end
        words, length = words + len(re.split(r"\s+", text)), length + len(text.encode())
        tokens += len(ids) - 1
    facts = result["protocol"]["slices"]["documents"]
    assert (facts["words"], facts["bytes"], facts["tokens_scored"]) == (words, length, tokens)
    assert facts["documents"] == 40 and result["protocol"]["interval"]["unit"] == "document"
    record = result["teacher"]
    assert record["word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-6)
    assert record["byte_perplexity"] == pytest.approx(math.exp(total / length), rel=1e-6)
    assert record["bits_per_byte"] == pytest.approx(total / length / math.log(2), rel=1e-6)


def test_windows_of_a_document():
    def shown(length, context):
        found = roll(torch.arange(length), context, 3)
        assert all(window.document == 3 for window in found)
        return [(window.ids.tolist(), window.scored) for window in found]

    assert shown(4, 5) == [([0, 1, 2, 3], 3)]
    assert shown(6, 2) == [([0, 1, 2], 2), ([2, 3, 4], 2), ([3, 4, 5], 1)]
    assert shown(2, 1) == [([0, 1], 1)]
    assert shown(1, 5) == []


def test_wikitext_is_set_as_people_write_it():
    stored = 'The " quick " fox ( Vulpes ) ran 1 @,@ 200 @.@ 5 m at 3 ° C ; well @-@ known .\n'
    written = 'The "quick" fox (Vulpes) ran 1,200.5 m at 3°C; well-known .\n'
    assert detokenise_wikitext(stored) == written


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"protocol": "c4"}, "protocol is 'c4'; use one of windows, wikitext-2, lm-eval"),
        ({"text": None}, "no text to evaluate on; name it with --text"),
        ({"text": {}}, "no text to evaluate on"),
        ({"text": {"all": "a.txt"}}, "a slice of text can't be called 'all'"),
        ({"stride": 64, "window": 64}, "stride is 64; use 1 to 63"),
        ({"stride": 0}, "stride is 0"),
        ({"protocol": "lm-eval", "stride": 8}, "'lm-eval' sets stride itself; leave --stride out"),
        ({"protocol": "wikitext-2", "bos": "never"}, "'wikitext-2' sets bos itself"),
        ({"text_column": {"b": "text"}}, "text_column: there is no slice 'b', only a"),
    ],
)
def test_what_a_protocol_refuses(changes, match):
    values = {"protocol": "windows", "text": {"a": "a.txt"}, **OPTIONS, **changes}
    with pytest.raises(InputError, match=match):
        plan_reading(**values)
