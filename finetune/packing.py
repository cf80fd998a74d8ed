"""Text packed once into fixed windows on disk, and split into training and held-out documents.

A folder of packed text holds one file of int32 token ids a source, `training-0.i32`, ..., perhaps
`heldout.i32`, and `data.json`, which describes them. Windows are cut from one stream of documents
with an EOS token between two; BOS starts every window if the policy says so, and with a document
mask every document too.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.model.errors import InputError
from bilinearize.model.text import adds_bos, read_documents

DESCRIPTION = "data.json"


def pack_all(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    shares: dict[str, float],
    column: str,
    split: str,
    window: int,
    tokens: int,
    bos: str,
    document_mask: bool,
    heldout: float,
    heldout_text: str | None,
    heldout_tokens: int,
) -> dict[str, Any]:
    """Pack each source, and the held-out text if any, into `folder`.

    Args:
        shares: each source's share of the tokens (they sum to 1).
        heldout: share of the documents, chosen by their hash, that is held out.
        heldout_text: another source to take the held-out text from, whole.

    Returns:
        What `data.json` holds.

    Raises:
        InputError: if a source can't be had or has too little text.
    """
    if document_mask and not isinstance(tokenizer.eos_token_id, int):
        raise InputError("--document_mask needs a tokenizer with an EOS token; go without it.")
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer, bos) else []
    cut = {"window": window, "start": start, "document_mask": document_mask}
    sources = []
    for number, (name, share) in enumerate(shares.items()):
        documents = split_documents(read_documents(name, column, split), heldout, False)
        count = -(-round(tokens * share) // window)
        file = folder / f"training-{number}.i32"
        sources.append(
            {"name": name, "share": share} | _pack(file, documents, name, tokenizer, count, **cut)
        )
    description = cut | {"eos": tokenizer.eos_token_id, "sources": sources}
    if heldout or heldout_text is not None:
        kept: list[Iterable[str]] = (
            [read_documents(heldout_text, column, split)]
            if heldout_text is not None
            else [split_documents(read_documents(n, column, split), heldout, True) for n in shares]
        )
        name = heldout_text or f"held-out documents ({heldout:g} of all)"
        stream = (document for documents in kept for document in documents)
        file = folder / "heldout.i32"
        count = heldout_tokens // window
        description["heldout"] = {"name": name} | _pack(file, stream, name, tokenizer, count, **cut)
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    return description


def split_documents(documents: Iterable[str], share: float, held_out: bool) -> Iterator[str]:
    """One side of the split: a document whose SHA-256, as a fraction, is below `share` is held out.

    Equal documents fall on the same side, whatever source or order they come in.
    """
    for document in documents:
        digest = hashlib.sha256(document.encode()).digest()
        if (int.from_bytes(digest[:8], "big") < share * 2**64) == held_out:
            yield document


def load_rows(folder: Path, name: str, window: int) -> np.ndarray:
    """Packed windows, int32 (windows, window), memory-mapped."""
    return np.memmap(folder / f"{name}.i32", dtype=np.int32, mode="r").reshape(-1, window)


def _pack(
    file: Path,
    documents: Iterable[str],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    window: int,
    start: list[int],
    document_mask: bool,
) -> dict[str, Any]:
    """Write at most `count` windows; returns their number and the SHA-256 of their int64 ids."""
    digest, written, seen = hashlib.sha256(), 0, 0
    buffer: list[int] = []
    with file.open("wb") as stream:
        for ids in _token_lists(documents, tokenizer, start if document_mask else []):
            buffer += ids
            seen += len(ids)
            while written < count and len(buffer) >= window - len(start):
                head = [] if document_mask and buffer[:1] == start else start
                body = window - len(head)
                if len(buffer) < body:
                    break
                row = np.array(head + buffer[:body], dtype=np.int64)
                del buffer[:body]
                stream.write(row.astype(np.int32).tobytes())
                digest.update(row.tobytes())
                written += 1
            if written == count:
                break
    if written == 0:
        what = f"{seen} tokens, fewer than one window of {window}" if seen else "no text in it"
        raise InputError(f"{name}: {what}.")
    return {"windows": written, "sha256": digest.hexdigest()}


def _token_lists(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, start: list[int]
) -> Iterator[list[int]]:
    """Each document's tokens, after the first with EOS and `start` before them."""
    separator: list[int] = []
    for document in documents:
        if document.strip():
            ids = tokenizer(document, add_special_tokens=False, verbose=False).input_ids
            yield separator + ids
            end = tokenizer.eos_token_id
            separator = [end, *start] if isinstance(end, int) else []
