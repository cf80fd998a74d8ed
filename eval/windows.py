"""Text cut into windows as a named protocol says, one slice of text at a time.

- `windows`: one stream, EOS between documents, a window every `stride` tokens, each with BOS first
  if `bos` says so.
- `wikitext-2`: documents joined by empty lines, one stream that starts as the tokenizer says, cut.
- `lm-eval`: each document by itself, BOS (else EOS) first, every token of it scored once; numbers
  per word and byte.

`wikitext-2` is what tables of quantised and pruned models print; `lm-eval` is the rolling
log-likelihood of lm-evaluation-harness with a context of `window` tokens.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.eval.detokenise import detokenise_wikitext
from bilinearize.model.errors import InputError
from bilinearize.model.text import adds_bos, pack_windows, read_documents, token_stream


@dataclass(frozen=True)
class Window:
    """Tokens that a model reads at once."""

    ids: torch.Tensor
    """int64 (length,)."""
    scored: int
    """Of these the last so many are scored."""
    document: int | None = None
    """The document they are of, where no window crosses documents."""


@dataclass(frozen=True)
class Slice:
    """One named part of the evaluated text."""

    name: str
    windows: list[Window]
    bytes: int
    """UTF-8 bytes that the scored tokens stand for."""
    words: int | None
    """Words they stand for, where whole documents are scored."""
    facts: dict
    """Where the text is from, as it stands in `eval.json`."""

    @property
    def tokens(self) -> int:
        """How many tokens are scored."""
        return sum(window.scored for window in self.windows)


@dataclass(frozen=True)
class Protocol:
    """How text becomes windows, and what is read unless another text is named."""

    name: str
    window: int
    text: str | None = None
    text_column: str = "text"
    split: str = "test"
    scored: str = ""


PROTOCOLS = {
    "windows": Protocol(
        "windows",
        512,
        scored="every token of a window but the first; with a stride, those not scored before",
    ),
    "wikitext-2": Protocol(
        "wikitext-2",
        2048,
        "Salesforce/wikitext:wikitext-2-raw-v1",
        scored="every token of a window but the first; windows don't overlap",
    ),
    "lm-eval": Protocol(
        "lm-eval",
        2048,
        "EleutherAI/wikitext_document_level:wikitext-2-raw-v1",
        "page",
        scored="every token of every document; the last window of a document reaches back",
    ),
}


@dataclass(frozen=True)
class Reading:
    """How the slices are read: all that shapes the windows but the tokenizer."""

    protocol: Protocol
    sources: Mapping[str, str]
    text_column: Mapping[str, str]
    split: Mapping[str, str]
    window: int
    stride: int
    tokens: int | None
    bos: str


def plan_reading(
    protocol: str,
    text: str | Mapping[str, str] | None,
    text_column: str | Mapping[str, str] | None,
    split: str | Mapping[str, str] | None,
    window: int | None,
    stride: int | None,
    tokens: int | None,
    bos: str,
) -> Reading:
    """Fill in what the protocol sets, and check the rest.

    Raises:
        InputError: for an unknown protocol, no text, or what the protocol doesn't leave open.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"protocol is {protocol!r}; use one of {', '.join(PROTOCOLS)}.")
    kind = PROTOCOLS[protocol]
    text = kind.text if text is None else text
    if not text:
        raise InputError("no text to evaluate on; name it with --text.")
    sources = {slice_name(text): text} if isinstance(text, str) else dict(text)
    for name in sources:
        if not name.strip() or "\n" in name or name == "all":
            raise InputError(f"a slice of text can't be called {name!r}; choose another name.")
    window = kind.window if window is None else window
    if window < 2:
        raise InputError(f"window is {window}; use at least 2 tokens.")
    if protocol != "windows" and (stride is not None or bos != "auto"):
        given = "bos" if stride is None else "stride"
        raise InputError(f"protocol {protocol!r} sets {given} itself; leave --{given} out.")
    if stride is not None and not 1 <= stride < window:
        raise InputError(f"stride is {stride}; use 1 to {window - 1}, less than the window.")
    columns = _by_slice(sources, text_column, kind.text_column, "text_column")
    splits = _by_slice(sources, split, kind.split, "split")
    step = window if stride is None else stride
    return Reading(kind, sources, columns, splits, window, step, tokens, bos)


def slice_name(source: str) -> str:
    """A name for a text: that of the file without its ending, or of the dataset."""
    return Path(source).stem if Path(source).suffix else source.rpartition("/")[2]


def _by_slice(
    sources: Mapping[str, str], value: str | Mapping[str, str] | None, default: str, key: str
) -> dict[str, str]:
    if value is None or isinstance(value, str):
        return dict.fromkeys(sources, default if value is None else value)
    if unknown := sorted(set(value) - set(sources)):
        raise InputError(f"{key}: there is no slice {unknown[0]!r}, only {', '.join(sources)}.")
    return {name: value.get(name, default) for name in sources}


def read_slices(tokenizer: PreTrainedTokenizerBase, reading: Reading) -> list[Slice]:
    """All slices in windows.

    Raises:
        InputError: as `read_documents` and `pack_windows` do.
    """
    return [read_slice(tokenizer, reading, name) for name in reading.sources]


def read_slice(tokenizer: PreTrainedTokenizerBase, reading: Reading, name: str) -> Slice:
    """One slice in windows; raises InputError as above."""
    source, column = reading.sources[name], reading.text_column[name]
    documents = read_documents(source, column, reading.split[name])
    facts: dict = {"text": source, "text_column": column, "split": reading.split[name]}
    facts["text_sha256"] = file_hash(source)
    part = Slice(name, [], 0, None, facts)
    if reading.protocol.name == "lm-eval":
        plain = source == reading.protocol.text
        part = _cut_documents(part, documents, tokenizer, reading, detokenise=plain)
    elif reading.protocol.name == "wikitext-2":
        part = _cut_joined(part, documents, tokenizer, reading)
    else:
        part = _cut_stream(part, documents, tokenizer, reading)
    spelled = part.bytes or count_bytes(tokenizer, part.windows)
    facts |= {"windows": len(part.windows), "tokens_scored": part.tokens}
    facts |= {"bytes": spelled, "words": part.words, "tokens_sha256": windows_hash(part.windows)}
    return replace(part, bytes=spelled)


def _cut_stream(
    part: Slice, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, reading: Reading
) -> Slice:
    window, source = reading.window, part.facts["text"]
    if reading.stride == window:
        rows = pack_windows(documents, tokenizer, window, reading.tokens, reading.bos, source)
        return replace(part, windows=[Window(row, window - 1) for row in rows])
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer, reading.bos) else []
    stream = token_stream(documents, tokenizer, reading.tokens, source)[: reading.tokens]
    body = window - len(start)
    if reading.stride > body:
        raise InputError(f"stride is {reading.stride}; BOS leaves room for {body} tokens.")
    if len(stream) < body:
        raise InputError(f"{source}: {len(stream)} tokens, fewer than one window of {window}.")
    windows = []
    for first in range(0, len(stream) - body + 1, reading.stride):
        ids = torch.tensor(start + stream[first : first + body])
        windows.append(Window(ids, window - 1 if first == 0 else reading.stride))
    return replace(part, windows=windows)


def _cut_joined(
    part: Slice, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, reading: Reading
) -> Slice:
    text, window, source = "\n\n".join(documents), reading.window, part.facts["text"]
    if not text.strip():
        raise InputError(f"{source}: no text in it.")
    stream = tokenizer(text, verbose=False).input_ids[: reading.tokens]
    if len(stream) < window:
        raise InputError(f"{source}: {len(stream)} tokens, fewer than one window of {window}.")
    rows = torch.tensor(stream[: len(stream) // window * window]).view(-1, window)
    return replace(part, windows=[Window(row, window - 1) for row in rows])


def _cut_documents(
    part: Slice,
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading,
    detokenise: bool,
) -> Slice:
    """Words and bytes are those of the documents as they are stored, as lm-eval counts them."""
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if not isinstance(prefix, int):
        raise InputError("protocol 'lm-eval' needs a tokenizer with a BOS or EOS token.")
    windows: list[Window] = []
    words = length = number = taken = 0
    for document in documents:
        if not document.strip():
            continue
        plain = detokenise_wikitext(document) if detokenise else document
        ids = [prefix, *tokenizer(plain, verbose=False).input_ids]
        taken += len(ids) - 1
        if reading.tokens is not None and taken > reading.tokens:
            break
        windows += roll(torch.tensor(ids), reading.window, number)
        words += len(re.split(r"\s+", document))
        length += len(document.encode())
        number += 1
    if not windows:
        raise InputError(f"{part.facts['text']}: no whole document within the tokens asked for.")
    part.facts["documents"] = number
    return replace(part, windows=windows, words=words, bytes=length)


def roll(ids: torch.Tensor, context: int, document: int) -> list[Window]:
    """Windows that score every token of a document but its prefix once, by at most `context`.

    All but the last are disjoint; the last is as long as the others and scores what is left.
    """
    windows, done, last = [], 0, len(ids) - 1
    while done < last:
        end = min(done + context, last)
        windows.append(Window(ids[max(0, end - context) : end + 1], end - done, document))
        done = end
    return windows


def count_bytes(tokenizer: PreTrainedTokenizerBase, windows: Iterable[Window]) -> int:
    """UTF-8 bytes of the text that the scored tokens spell, special tokens left out."""
    texts = tokenizer.batch_decode(
        [window.ids[-window.scored :].tolist() for window in windows],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return sum(len(text.encode()) for text in texts)


def windows_hash(windows: Iterable[Window]) -> str:
    """SHA-256 of the token ids, window by window: of equal windows that of `fingerprint`."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(window.ids.numpy().tobytes())
    return digest.hexdigest()


def file_hash(source: str) -> str | None:
    """SHA-256 of a local text file; None for a dataset that is named."""
    path = Path(source).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
