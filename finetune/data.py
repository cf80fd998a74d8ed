"""Training windows laid out as one exact sequence for the whole run, and hashes of what is read."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from bilinearize.finetune.packing import DESCRIPTION, load_rows
from bilinearize.model.errors import InputError

IGNORE = -100


class Windows(Dataset):
    """Packed windows as a model takes them.

    With a document mask, positions begin anew in each document (transformers then lets no token
    attend to another document), and no label is the first token of a document.
    """

    def __init__(self, rows: list[np.ndarray], order: np.ndarray, separator: int | None = None):
        """`rows` are int32 (m_i, window); `order` is int64 (n, 2): source and row of each item;
        `separator` is the EOS token, if documents are to be masked."""
        self.rows, self.order, self.separator = rows, order, separator

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, row = self.order[index]
        ids = torch.from_numpy(self.rows[source][row].astype(np.int64))
        item = {"input_ids": ids, "labels": ids}
        if self.separator is not None:
            begins = torch.cat([torch.tensor([True]), ids[:-1] == self.separator])
            places = torch.arange(len(ids))
            item["labels"] = torch.where(begins, IGNORE, ids)
            item["position_ids"] = places - torch.where(begins, places, 0).cummax(0).values
        return item


def training_order(
    sizes: list[int], shares: list[float], count: int, seed: int, start: int = 0
) -> np.ndarray:
    """The items `start` to `count` of the run's sequence: int64 (count - start, 2), source and row.

    Sources alternate so that every stretch has them by their shares; each source's rows are passed
    over again and again, every pass shuffled anew. The whole run is one epoch of this sequence, so
    that a position is the same window however often the run was interrupted, and however a step is
    cut into micro-batches and processes. A longer run begins with a shorter one.
    """
    orders, times = [], []
    for source, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        wanted = min(count, int(share * count) + 2)
        generator = torch.Generator().manual_seed(seed + source)
        passes = [torch.randperm(size, generator=generator) for _ in range(-(-wanted // size))]
        rows = torch.cat(passes)[:wanted].numpy()
        orders.append(np.stack([np.full(wanted, source), rows], 1))
        times.append((np.arange(wanted) + 0.5) / share)
    merged = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(orders)[merged][start:count]


def training_windows(folder: Path, count: int, seed: int, start: int = 0) -> Windows:
    """The part from `start` to `count` of the sequence over the text packed in `folder`."""
    description = json.loads((folder / DESCRIPTION).read_text())
    sources = description["sources"]
    window = description["window"]
    rows = [load_rows(folder, f"training-{n}", window) for n in range(len(sources))]
    shares = [source["share"] for source in sources]
    order = training_order([len(r) for r in rows], shares, count, seed, start)
    return Windows(rows, order, _separator(description))


def packed_rows(folder: Path) -> dict[str, Windows]:
    """Every file of packed windows by its name, row by row."""
    description = json.loads((folder / DESCRIPTION).read_text())
    names = [f"training-{number}" for number in range(len(description["sources"]))]
    names += ["heldout"] if "heldout" in description else []
    found = {}
    for name in names:
        rows = load_rows(folder, name, description["window"])
        order = np.stack([np.zeros(len(rows), dtype=np.int64), np.arange(len(rows))], 1)
        found[name] = Windows([rows], order, _separator(description))
    return found


def heldout_windows(folder: Path) -> Windows | None:
    """All held-out windows in their order, if any are."""
    return packed_rows(folder).get("heldout")


def _separator(description: dict[str, Any]) -> int | None:
    return description["eos"] if description["document_mask"] else None


def shares_of(text: str | dict[str, float]) -> dict[str, float]:
    """Each source's share of the tokens; one source has all."""
    weights = {text: 1.0} if isinstance(text, str) else text
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def data_sha256(folder: Path) -> str:
    """The fingerprint of the training windows: one source's own, or that of all together."""
    sources = json.loads((folder / DESCRIPTION).read_text())["sources"]
    if len(sources) == 1:
        return sources[0]["sha256"]
    return hashlib.sha256("".join(source["sha256"] for source in sources).encode()).hexdigest()


def steps_in(tokens: int, window: int, windows_per_step: int) -> int:
    """Whole steps that `tokens` pay for.

    Raises:
        InputError: if they don't pay for one.
    """
    steps = tokens // (window * windows_per_step)
    if steps == 0:
        raise InputError(
            f"--tokens {tokens} is less than one step of {windows_per_step} windows of {window}; "
            "ask for more tokens or a smaller --batch_size or --accumulation."
        )
    return steps


def file_sha256(*files: Path) -> str:
    """SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def text_sha256(text: str | dict[str, float] | None) -> str | list[str | None] | None:
    """The hash of a local text file, or None for a `datasets` name; of each in a mixture."""
    if isinstance(text, dict):
        return [file_sha256(Path(n).expanduser()) if Path(n).is_file() else None for n in text]
    path = Path(text).expanduser() if text else None
    return file_sha256(path) if path is not None and path.is_file() else None


def checkpoint_sha256(folder: Path) -> str:
    """The hash of a checkpoint's configuration, tokenizer and weights."""
    files = (*folder.glob("*.safetensors"), *folder.glob("*.json"))
    return file_sha256(*sorted(files))
