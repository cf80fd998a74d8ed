"""Training text: mixtures, document masks, held-out documents, positions."""

import json

import numpy as np
import pytest
import torch

from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.data import (
    Windows,
    heldout_windows,
    shares_of,
    training_order,
    training_windows,
)
from bilinearize.finetune.packing import load_rows, pack_all, split_documents
from bilinearize.finetune.run import finetune
from bilinearize.finetune.teacher import last_hidden
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer
from bilinearize.model.errors import InputError
from bilinearize.model.text import fingerprint, pack_windows, read_documents

OPTIONS = {
    "column": "text",
    "split": "train",
    "window": 32,
    "tokens": 2000,
    "bos": "auto",
    "document_mask": False,
    "heldout": 0.0,
    "heldout_text": None,
    "heldout_tokens": 640,
}


def pack(folder, tokenizer, text, **changes):
    folder.mkdir(exist_ok=True)
    return pack_all(folder, tokenizer, shares_of(text), **OPTIONS | changes)


@pytest.fixture(scope="module")
def tokenizer(pico_llama):
    return load_tokenizer(pico_llama)


@pytest.mark.parametrize("bos", ["never", "always"])
def test_one_source_is_packed_as_everywhere_else(tokenizer, documents_file, tmp_path, bos):
    found = pack(tmp_path, tokenizer, str(documents_file), bos=bos)
    documents = read_documents(str(documents_file))
    expected = pack_windows(documents, tokenizer, 32, 2000 + 32, bos)[:63]
    rows = load_rows(tmp_path, "training-0", 32)
    assert torch.equal(torch.tensor(np.array(rows)), expected.int())
    assert found["sources"][0]["sha256"] == fingerprint(expected)
    items = training_windows(tmp_path, 10, seed=0)
    assert isinstance(items.rows[0], np.memmap) and items[3]["input_ids"].dtype == torch.int64
    assert items[3].keys() == {"input_ids", "labels"}


def test_a_mixture_has_its_shares_in_every_stretch(
    tokenizer, text_file, documents_file, tmp_path, job
):
    mixture = {str(text_file): 3.0, str(documents_file): 1.0}
    found = pack(tmp_path, tokenizer, mixture)
    assert [source["share"] for source in found["sources"]] == [0.75, 0.25]
    order = training_order([47, 16], [0.75, 0.25], 400, seed=1)
    for start in (0, 8, 200):
        assert (order[start : start + 8, 0] == 1).sum() == 2
    assert len(set(order[order[:, 0] == 1, 1][:16])) == 16  # a pass over the smaller source
    part = training_order([47, 16], [0.75, 0.25], 100, seed=1, start=40)
    assert (part == order[40:100]).all()
    out = finetune(**job | {"text": mixture, "tokens": 32 * 4 * 2}, out=tmp_path / "out")
    record = json.loads((out / "finetune.json").read_text())
    assert record["settings"]["text"] == mixture and len(record["settings"]["text_sha256"]) == 2


def test_no_token_sees_another_document(tokenizer, pico_llama):
    eos = tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(2, 300, (32,), generator=generator)
    row[[9, 10, 20]] = eos  # among them a document of one token
    other = row.clone()
    other[:9] = torch.randint(2, 300, (9,), generator=generator)
    model = load_causal_lm(pico_llama)
    logits = {}
    for mask in (eos, None):
        items = Windows([torch.stack([row, other]).int().numpy()], np.array([[0, 0], [0, 1]]), mask)
        batch = [items[i] for i in (0, 1)]
        places = [x.get("position_ids", torch.arange(32)) for x in batch]
        ids = torch.stack([item["input_ids"] for item in batch])
        hidden = last_hidden(model, ids, position_ids=torch.stack(places))
        logits[mask] = model.lm_head(hidden)
        labels = batch[0]["labels"]
    assert torch.equal(logits[eos][0, 10:], logits[eos][1, 10:])
    assert not torch.allclose(logits[eos][0, :9], logits[eos][1, :9], atol=0.1)
    assert not torch.allclose(logits[None][0, 10:], logits[None][1, 10:], atol=0.1)
    # A document alone, in a window of its own, has the same logits.
    alone = model(row[None, 11:21]).logits
    assert torch.allclose(alone[0], logits[eos][0, 11:21], atol=1e-5)
    masked = Windows([row[None].int().numpy()], np.array([[0, 0]]), eos)[0]
    assert (masked["labels"] == -100).nonzero().flatten().tolist() == [0, 10, 11, 21]
    assert masked["position_ids"][[0, 9, 10, 11, 20, 21]].tolist() == [0, 9, 0, 0, 9, 0]
    assert (labels != -100).all()


def test_with_a_mask_every_document_starts_with_bos(tokenizer, documents_file, tmp_path):
    pack(tmp_path, tokenizer, str(documents_file), bos="always", document_mask=True)
    rows = torch.tensor(np.array(load_rows(tmp_path, "training-0", 32))).long()
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert (rows[:, 0] == bos).all() and not (rows[:, 1] == bos).any()
    after = rows[:, 1:][rows[:, :-1] == eos]
    assert len(after) > 5 and (after == bos).all()


def test_a_masked_run_trains(job, documents_file, tmp_path, history):
    run = job | {"text": str(documents_file), "document_mask": True}
    out = finetune(**run, out=tmp_path / "out")
    plain = finetune(**run | {"document_mask": False}, out=tmp_path / "plain")
    assert history(out)[-1]["kl"] < history(out)[0]["kl"]
    kls = [[entry["kl"] for entry in history(folder)] for folder in (out, plain)]
    assert kls[0] != kls[1]


def test_held_out_documents_are_never_trained_on(tokenizer, tmp_path):
    words = ["tree", "house", "river", "stone", "light", "water"]
    rows = [f"{a} {b} {c} {a} {c} {b} " * 3 for a in words for b in words for c in words]
    for name, part in (("a", rows), ("b", rows[:100])):  # the second repeats documents
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    mixture = {str(tmp_path / "a.jsonl"): 1.0, str(tmp_path / "b.jsonl"): 1.0}
    sides = [set(split_documents(rows, 0.2, side)) for side in (False, True)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 216
    assert 20 < len(sides[1]) < 70
    assert set(split_documents(reversed(rows), 0.2, True)) == sides[1]
    pack(tmp_path / "data", tokenizer, mixture, heldout=0.2, tokens=10**6)
    kept = "".join(tokenizer.decode(x["input_ids"]) for x in heldout_windows(tmp_path / "data"))
    trained = ""
    for number in (0, 1):
        trained += tokenizer.decode(
            load_rows(tmp_path / "data", f"training-{number}", 32).flatten()
        )
    assert sum(text in trained for text in sides[0]) > 100
    assert not any(text in trained for text in sides[1])
    assert sum(text in kept for text in sides[1]) > 3
    assert not any(text in kept for text in sides[0])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"text": {}}, "give each text a weight"),
        ({"text": {"a.txt": 0.0}}, "give each text a weight"),
        ({"heldout": 1.0}, "--heldout is 1.0; use a share from 0 to below 1"),
        (
            {"heldout": 0.1, "heldout_tokens": 16},
            "--heldout_tokens is 16; use at least one --window",
        ),
        ({"heldout": 0.1}, "held-out documents .0.1 of all.: no text in it"),
        ({"heldout_text": "none.txt"}, "none.txt: no such text file"),
    ],
)
def test_bad_text_is_one_line(job, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        finetune(**job | changes, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_held_out_gap_is_watched_and_the_best_weights_are_kept(
    job, documents_file, pico_llama, weights, history, tmp_path, tokenizer
):
    run = job | {"heldout_text": str(documents_file), "heldout_tokens": 640, "eval_every": 3}
    run |= {"schedule": "constant", "learning_rate": 3e-2, "tokens": 32 * 4 * 20}
    out = finetune(**run, out=tmp_path / "out")
    watched = [entry for entry in history(out) if "heldout_gap" in entry]
    assert [entry["step"] for entry in watched] == [0, 3, 6, 9, 12, 15, 18, 20]
    record = json.loads((out / "finetune.json").read_text())
    best = min(watched, key=lambda entry: entry["heldout_loss"])
    assert record["heldout_best"]["step"] == best["step"] < 20
    rows = pack_windows(read_documents(str(documents_file)), tokenizer, 32, 640)
    loss = {}
    with torch.no_grad():
        for name, folder in (("out", out), ("teacher", pico_llama)):
            logits = load_causal_lm(folder)(rows[:, :-1]).logits.flatten(0, 1)
            loss[name] = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten()).item()
    assert best["heldout_gap"] == pytest.approx(loss["out"] - loss["teacher"], abs=1e-4)
    last = finetune(**run | {"keep_best": False}, out=tmp_path / "last")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(last)[name], weights(out)[name])
    assert "heldout_best" not in json.loads((last / "finetune.json").read_text())


def test_text_may_be_one_source_or_a_mixture():
    assert shares_of("a.txt") == {"a.txt": 1.0}
    assert FinetuneConfig(text={"a": 1, "b": 3}).text == {"a": 1, "b": 3}
