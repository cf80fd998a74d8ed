"""Text to windows of tokens: one reader and one packer for calibration, training and evaluation."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.model.errors import InputError

BOS_POLICIES = ("auto", "always", "never")


def read_documents(source: str, column: str = "text", split: str = "train") -> Iterator[str]:
    """Stream the documents of a text source.

    Args:
        source: a `.txt` file (one document), a `.jsonl` or `.parquet` file (one document a row), or
            the name of a `datasets` dataset, `name` or `name:config`.
        column: the field that holds the text, for all but `.txt`.
        split: the split, for a `datasets` name.

    Raises:
        InputError: if the file or dataset can't be had, or a row lacks `column`.
    """
    path = Path(source).expanduser()
    if path.suffix in (".txt", ".jsonl", ".json", ".parquet") or path.is_file():
        if not path.is_file():
            raise InputError(f"{source}: no such text file.")
        yield from _read_file(path, column)
    else:
        yield from _read_dataset(source, column, split)


def _read_file(path: Path, column: str) -> Iterator[str]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(path) as file:
                if column not in file.schema_arrow.names:
                    raise InputError(
                        f"{path}: no column {column!r}, only {file.schema_arrow.names}."
                    )
                for batch in file.iter_batches(columns=[column]):
                    yield from (text for text in batch.column(0).to_pylist() if text is not None)
        elif path.suffix in (".jsonl", ".json"):
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _field(json.loads(line), column, f"{path}, line {number}")
        elif path.suffix == ".txt":
            yield path.read_text(encoding="utf-8")
        else:
            raise InputError(f"{path}: text is read from .txt, .jsonl and .parquet files.")
    except (UnicodeDecodeError, json.JSONDecodeError, OSError) as error:
        raise InputError(f"{path}: not readable as {path.suffix[1:]}: {error}") from error
    except ValueError as error:  # pyarrow's errors are ValueErrors
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not readable as {path.suffix[1:]}: {error}") from error


def _field(row: dict, column: str, where: str) -> str:
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{where}: no text under {column!r}; name the field that holds it.")
    return text


def _read_dataset(name: str, column: str, split: str) -> Iterator[str]:
    from datasets import load_dataset

    path, _, config = name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split, streaming=True)
    except Exception as error:  # datasets raises many kinds, all of them about the name or the net
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{name}: neither a text file nor a dataset that loads: {reason}"
        ) from error
    for number, row in enumerate(rows):
        yield _field(row, column, f"{name}, row {number}")


def adds_bos(tokenizer: PreTrainedTokenizerBase, policy: str) -> bool:
    """Whether each window starts with BOS; `auto` follows what the tokenizer itself does.

    Raises:
        InputError: for an unknown policy, or `always` with a tokenizer that has no BOS token.
    """
    if policy not in BOS_POLICIES:
        raise InputError(f"bos is {policy!r}; use one of {', '.join(BOS_POLICIES)}.")
    if policy == "never":
        return False
    if policy == "always":
        if tokenizer.bos_token_id is None:
            raise InputError("bos is 'always', but the tokenizer has no BOS token; use 'never'.")
        return True
    first = tokenizer("a").input_ids[:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]


def pack_windows(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    tokens: int | None = None,
    bos: str = "auto",
    name: str = "text",
) -> torch.Tensor:
    """Tokenise documents into one stream, an EOS token between two, and cut it into whole windows.

    Args:
        window: tokens per window, BOS included.
        tokens: stop after this many tokens (rounded down to whole windows); None takes all.
        bos: `auto`, `always` or `never`: see `adds_bos`. BOS then starts every window.
        name: the text's name in messages.

    Returns:
        int64 (windows, window). Deterministic: the same text and tokenizer give the same windows.

    Raises:
        InputError: if the text is empty or has fewer tokens than one window.
    """
    if window < 2:
        raise InputError(f"window is {window}; use at least 2 tokens.")
    if tokens is not None and tokens < window:
        raise InputError(
            f"{tokens} tokens asked for from {name}, fewer than one window of {window}."
        )
    start = [tokenizer.bos_token_id] if adds_bos(tokenizer, bos) else []
    body = window - len(start)
    wanted = None if tokens is None else tokens // window * body
    stream = token_stream(documents, tokenizer, wanted, name)
    count = len(stream[:wanted]) // body
    if count == 0:
        raise InputError(f"{name}: {len(stream)} tokens, fewer than one window of {window}.")
    rows = torch.tensor(stream[: count * body], dtype=torch.int64).view(count, body)
    return torch.cat([torch.tensor(start * count, dtype=torch.int64).view(count, -1), rows], 1)


def token_stream(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    wanted: int | None = None,
    name: str = "text",
) -> list[int]:
    """The tokens of all documents in one list, an EOS token between two, no BOS.

    Args:
        wanted: read no further document once there are so many; None reads all.
        name: the text's name in messages.

    Raises:
        InputError: if there is no text.
    """
    stream: list[int] = []
    end = tokenizer.eos_token_id
    for document in documents:
        if not document.strip():
            continue
        if stream and isinstance(end, int):
            stream.append(end)
        stream += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        if wanted is not None and len(stream) >= wanted:
            break
    if not stream:
        raise InputError(f"{name}: no text in it.")
    return stream


def fingerprint(windows: torch.Tensor) -> str:
    """SHA-256 of the token ids: two runs with the same value saw the same tokens."""
    return hashlib.sha256(windows.contiguous().numpy().tobytes()).hexdigest()
