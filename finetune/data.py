"""Training windows: packed once, saved, and laid out as one exact sequence for the whole run."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from bilinearize.model.checkpoint import load_tokenizer
from bilinearize.model.errors import InputError
from bilinearize.model.text import fingerprint, pack_windows, read_documents

WINDOWS = "windows.safetensors"


class TrainingWindows(Dataset):
    """Windows in training order, every pass over the text shuffled anew.

    The whole run is one epoch of this sequence, so that position `i` is the same window however
    often the run was interrupted, and however a step is cut into micro-batches and processes.
    """

    def __init__(self, windows: torch.Tensor, count: int, seed: int, start: int = 0):
        """`windows` is int64 (m, window); the whole sequence has `count` items, and this part of it
        begins at `start`."""
        generator = torch.Generator().manual_seed(seed)
        passes = -(-count // len(windows))
        orders = [torch.randperm(len(windows), generator=generator) for _ in range(passes)]
        self.windows = windows
        self.order = torch.cat(orders)[start:count]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.windows[self.order[index]]
        return {"input_ids": row, "labels": row}


def pack_text(
    student: Path, text: str, column: str, split: str, window: int, tokens: int, bos: str
) -> torch.Tensor:
    """The text as int64 (windows, window), at most `tokens` tokens, by the student's tokenizer.

    Raises:
        InputError: if there is no such text, or less of it than one window.
    """
    documents = read_documents(text, column, split)
    return pack_windows(documents, load_tokenizer(student), window, tokens, bos, name=text)


def save_windows(folder: Path, windows: torch.Tensor) -> None:
    """Write the windows and their fingerprint into `folder`."""
    save_file({"windows": windows}, folder / WINDOWS, {"sha256": fingerprint(windows)})


def load_windows(folder: Path) -> torch.Tensor:
    """Read what `save_windows` wrote: int64 (windows, window)."""
    return load_file(folder / WINDOWS)["windows"]


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


def text_sha256(text: str) -> str | None:
    """The hash of a local text file, or None for a `datasets` name."""
    path = Path(text).expanduser()
    return file_sha256(path) if path.is_file() else None


def checkpoint_sha256(folder: Path) -> str:
    """The hash of a checkpoint's configuration, tokenizer and weights."""
    files = (*folder.glob("*.safetensors"), *folder.glob("*.json"))
    return file_sha256(*sorted(files))
