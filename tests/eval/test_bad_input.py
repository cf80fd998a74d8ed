"""Each bad input gets one line that names it, and nothing is written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from bilinearize import BilinearLlamaForCausalLM, InputError
from bilinearize.eval.compare import evaluate


def refuse(match: str, tmp_path, teacher, candidates, text, **changes) -> str:
    """Evaluate into `tmp_path / "out"`, expect an InputError, return its message."""
    out = changes.pop("out", tmp_path / "out")
    values = {"text": str(text), "window": 64, "prompts": 0, **changes}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=match) as caught:
        evaluate(
            str(teacher), {name: str(path) for name, path in candidates.items()}, out, **values
        )
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)


def copy_of(folder, target):
    shutil.copytree(folder, target)
    return target


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; use one of float32"),
        ({"bos": "sometimes"}, "bos is 'sometimes'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prompts": -1}, "prompts is -1"),
        ({"sample_tokens": 0}, "sample_tokens is 0"),
        ({"bootstrap_samples": 10}, "bootstrap_samples is 10"),
        ({"window": 1}, "window is 1"),
        ({"window": 257}, "teacher: a window of 257 tokens is longer than the context.*256"),
        ({"tokens": 63}, "63 tokens asked for"),
        ({"device": "nonsense"}, "device 'nonsense' can't be used"),
        ({"text_column": "body"}, "documents.jsonl, line 1: no text under 'body'"),
    ],
)
def test_values(changes, match, pico_llama, half, documents_file, tmp_path):
    refuse(match, tmp_path, pico_llama, {"half": half}, documents_file, **changes)


@pytest.mark.parametrize(
    ("content", "match"), [("", "no text in it"), ("a tree", "fewer than one window of 64")]
)
def test_text_too_short(content, match, pico_llama, half, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text(content)
    message = refuse(match, tmp_path, pico_llama, {"half": half}, text)
    assert "short.txt" in message


def test_names_and_paths(pico_llama, half, documents_file, tmp_path):
    refuse("no candidate", tmp_path, pico_llama, {}, documents_file)
    refuse("called 'teacher'", tmp_path, pico_llama, {"teacher": half}, documents_file)
    refuse("no such checkpoint", tmp_path, pico_llama, {"x": tmp_path / "none"}, documents_file)
    refuse("no such checkpoint", tmp_path, tmp_path / "none.gguf", {"x": half}, documents_file)
    refuse("no such text file", tmp_path, pico_llama, {"x": half}, tmp_path / "none.txt")


def test_out_exists(pico_llama, half, documents_file, tmp_path):
    out = tmp_path / "mine"
    out.mkdir()
    refuse("mine: exists already", tmp_path, pico_llama, {"x": half}, documents_file, out=out)


def test_a_tokenizer_with_another_vocabulary(pico_llama, half, documents_file, tmp_path):
    other = copy_of(half, tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    match = "other: .* 301 tokens against 300, '<new>' is 300 against None"
    refuse(match, tmp_path, pico_llama, {"half": half, "other": other}, documents_file)


def test_a_tokenizer_with_the_same_vocabulary_that_cuts_otherwise(
    pico_llama, half, documents_file, tmp_path
):
    other = copy_of(half, tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))
    match = "other: .*the same vocabulary, but other tokens for .*documents.jsonl"
    refuse(match, tmp_path, pico_llama, {"other": other}, documents_file)


def test_a_tokenizer_with_another_eos(pico_llama, half, documents_file, tmp_path):
    other = copy_of(half, tmp_path / "other")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(other)
    tokenizer.eos_token = "a"
    tokenizer.save_pretrained(other)
    refuse("eos_token_id", tmp_path, pico_llama, {"other": other}, documents_file)


def test_a_tokenizer_saved_otherwise_that_does_the_same_is_accepted(
    pico_llama, half, documents_file, tmp_path
):
    other = copy_of(half, tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = None
    content["model"]["fuse_unk"] = not content["model"]["fuse_unk"]
    file.write_text(json.dumps(content))
    result = evaluate(
        str(pico_llama),
        {"other": str(other)},
        tmp_path / "out",
        text=str(documents_file),
        window=64,
        tokens=128,
        prompts=0,
    )
    assert result["protocol"]["windows"] == 2


def test_a_candidate_that_is_not_whole(pico_llama, half, documents_file, tmp_path):
    lacking = copy_of(half, tmp_path / "lacking")
    weights = load_file(lacking / "model.safetensors")
    del weights["model.layers.1.mlp.gate_proj.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    match = "missing keys: model.layers.1.mlp.gate_proj.weight"
    refuse(match, tmp_path, pico_llama, {"lacking": lacking}, documents_file)
    cut = copy_of(half, tmp_path / "cut")
    shard = cut / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refuse("truncated or damaged", tmp_path, pico_llama, {"cut": cut}, documents_file)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_logits_that_are_not_finite(
    batch_size, pico_llama, half, documents_file, windows, tmp_path
):
    # One rare token's embedding is NaN, with an output layer of its own: only windows in which the
    # token is read are broken.
    first = {}
    for number, row in reversed(list(enumerate(windows[:, :-1].tolist(), 1))):
        first |= dict.fromkeys(row, number)
    token = next(token for token, number in first.items() if number == 3)
    student = BilinearLlamaForCausalLM.from_pretrained(half)
    student.config.tie_word_embeddings = False
    student.lm_head.weight = torch.nn.Parameter(student.lm_head.weight.detach().clone())
    student.model.embed_tokens.weight.data[token] = torch.nan
    student.save_pretrained(tmp_path / "broken")
    broken = copy_of(half, tmp_path / "tokenizer")
    for file in (tmp_path / "broken").iterdir():
        file.replace(broken / file.name)
    candidates = {"half": half, "broken": broken}
    match = f"broken, window 3 of {len(windows)} in documents: the logits are not finite"
    refuse(match, tmp_path, pico_llama, candidates, documents_file, batch_size=batch_size)
    match = f"the teacher, window 3 of {len(windows)}"
    refuse(match, tmp_path, broken, {"half": half}, documents_file, batch_size=batch_size)


def test_a_vocabulary_too_narrow(pico_llama, half, documents_file, tmp_path):
    narrow = copy_of(half, tmp_path / "narrow")
    student = BilinearLlamaForCausalLM.from_pretrained(narrow)
    student.resize_token_embeddings(290)
    student.save_pretrained(narrow)
    match = "narrow: 290 logits for a tokenizer of 300 tokens"
    refuse(match, tmp_path, pico_llama, {"narrow": narrow}, documents_file)
