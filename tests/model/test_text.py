"""Readers and the packer: what goes in comes out, in order, in whole windows."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

from bilinearize import InputError
from bilinearize.model.text import adds_bos, fingerprint, pack_windows, read_documents

DOCUMENTS = ["the tree stands. ", "a river runs. ", "light falls over stone. "]


@pytest.fixture
def tokenizer(pico_llama):
    return AutoTokenizer.from_pretrained(pico_llama)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_readers_give_the_documents(tmp_path, kind):
    path = tmp_path / f"text.{kind}"
    if kind == "txt":
        path.write_text("".join(DOCUMENTS))
        assert list(read_documents(str(path))) == ["".join(DOCUMENTS)]
        return
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n\n" for text in DOCUMENTS))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS}), path)
    assert list(read_documents(str(path), column="body")) == DOCUMENTS


def test_a_dataset_is_read_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    name = tmp_path / "tales"  # `datasets` takes a local folder where it takes a name
    name.mkdir()
    for split, texts in (("train", DOCUMENTS), ("test", DOCUMENTS[:1])):
        rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
        (name / f"{split}.jsonl").write_text(rows)
    assert list(read_documents(str(name), column="body")) == DOCUMENTS
    assert list(read_documents(str(name), column="body", split="test")) == DOCUMENTS[:1]
    with pytest.raises(InputError, match="row 0: no text under 'text'"):
        list(read_documents(str(name)))


def test_windows_are_the_stream_cut(tokenizer):
    windows = pack_windows(DOCUMENTS, tokenizer, window=4)
    stream = []
    for text in DOCUMENTS:
        stream += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    stream = stream[:-1]  # EOS goes between documents
    assert windows.flatten().tolist() == stream[: windows.numel()]
    assert len(stream) - windows.numel() < 4
    assert pack_windows(DOCUMENTS, tokenizer, 4, tokens=9).equal(windows[:2])


def test_bos_starts_every_window_when_asked(tokenizer):
    assert not adds_bos(tokenizer, "auto")
    windows = pack_windows(DOCUMENTS, tokenizer, window=4, bos="always")
    assert (windows[:, 0] == tokenizer.bos_token_id).all()
    body = windows[:, 1:].flatten()
    plain = pack_windows(DOCUMENTS, tokenizer, window=4).flatten()
    count = min(len(body), len(plain))
    assert torch.equal(body[:count], plain[:count])


def test_fingerprint_sees_one_changed_token(tokenizer):
    windows = pack_windows(DOCUMENTS, tokenizer, window=4)
    changed = windows.clone()
    changed[-1, -1] += 1
    assert fingerprint(windows) == fingerprint(windows.clone())
    assert fingerprint(windows) != fingerprint(changed)


def test_bad_text_is_one_clear_line(tokenizer, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "broken.parquet").write_text("no parquet")
    (tmp_path / "book.pdf").write_text("x")
    cases = {
        "missing.txt": "no such text file",
        "rows.jsonl": "line 1: no text under 'text'",
        "broken.jsonl": "not readable as jsonl",
        "broken.parquet": "not readable as parquet",
        "book.pdf": "text is read from",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            list(read_documents(str(tmp_path / name)))
        assert name in str(caught.value)
    empty = read_documents(str(tmp_path / "empty.txt"))
    with pytest.raises(InputError, match="no text in it"):
        pack_windows(empty, tokenizer, 8)
    with pytest.raises(InputError, match="fewer than one window of 512"):
        pack_windows(DOCUMENTS, tokenizer, 512)
    with pytest.raises(InputError, match="neither a text file nor a dataset"):
        list(read_documents("nobody/no-such-dataset"))
