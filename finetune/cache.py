"""A teacher computed once: the log-probabilities of its likeliest tokens, on disk.

For every position of the packed windows the folder holds the `top_k` largest log-probabilities at
the temperature of the loss (`*.values.f32`), their tokens (`*.tokens.i32`), and the log-probability
of the token that follows at temperature 1 (`*.labels.f32`); `teacher.json` says of which teacher
and which windows. What all other tokens have together, the tail, follows from the values.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import nn
from torch.nn.functional import log_softmax
from tqdm import tqdm

from bilinearize.finetune.data import Windows
from bilinearize.finetune.teacher import head_of, last_hidden, load_whole
from bilinearize.model.errors import InputError

DESCRIPTION = "teacher.json"


class CachedTeacher(nn.Module):
    """Stands for a teacher whose log-probabilities come with the batch."""

    mode = "cached"


class CachedWindows(Windows):
    """Windows that bring the teacher's log-probabilities: `teacher_values` and `teacher_tokens`
    (window - 1, k), `teacher_labels` (window - 1)."""

    def __init__(self, windows: Windows, folder: Path, names: list[str], top_k: int):
        """`names` are those of the files of packed windows, in the order of `windows.rows`."""
        super().__init__(windows.rows, windows.order, windows.separator)
        shapes = [len(rows) for rows in windows.rows]
        length = windows.rows[0].shape[1] - 1
        self.cached = [
            _open(folder, name, (size, length, top_k), "r")
            for name, size in zip(names, shapes, strict=True)
        ]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, row = self.order[index]
        found = {
            name: torch.from_numpy(array[row].copy()) for name, array in self.cached[source].items()
        }
        found["teacher_tokens"] = found["teacher_tokens"].long()
        return super().__getitem__(index) | found


def ensure_cache(
    folder: Path, sets: dict[str, Windows], teacher: Path, expected: dict[str, Any]
) -> None:
    """Compute the cache, shared out over the processes, or check the one that is there.

    Args:
        sets: the packed windows by the names of their files, each in the order of its rows.
        expected: what `teacher.json` has to hold; `top_k` and `temperature` among it.

    Raises:
        InputError: if the folder belongs to other windows or another teacher.
    """
    processes = PartialState()
    if folder.exists():
        check_cache(folder, expected)
        return
    partial = folder.with_name(folder.name + ".partial")
    arrays = {}
    with processes.main_process_first():
        if processes.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        for name, windows in sets.items():
            shape = len(windows), windows.rows[0].shape[1] - 1, expected["top_k"]
            arrays[name] = _open(partial, name, shape, "w+" if processes.is_main_process else "r+")
    model: Any = load_whole(teacher)
    model.to(processes.device)
    if expected["top_k"] > model.config.vocab_size:
        raise InputError(f"--top_k {expected['top_k']} is more than the vocabulary has; use less.")
    for name, windows in sets.items():
        mine = range(processes.process_index, len(windows), processes.num_processes)
        for index in tqdm(mine, f"teacher, {name}", disable=not processes.is_main_process):
            found = _compute(model, windows[index], expected["temperature"], expected["top_k"])
            for part, values in found.items():
                arrays[name][part][index] = values
        for array in arrays[name].values():
            array.flush()
    processes.wait_for_everyone()
    if processes.is_main_process:
        (partial / DESCRIPTION).write_text(json.dumps(expected, indent=2) + "\n")
        os.rename(partial, folder)
    processes.wait_for_everyone()


def check_cache(folder: Path, expected: dict[str, Any]) -> None:
    """Raise InputError unless `folder` is the cache that is expected, naming what differs."""
    if not (folder / DESCRIPTION).is_file():
        raise InputError(f"{folder}: no cached teacher; remove it or name another --teacher_cache.")
    found = json.loads((folder / DESCRIPTION).read_text())
    for name in {**found, **expected}:
        if found.get(name) != expected.get(name):
            raise InputError(
                f"{folder}: cached with {name} {found.get(name)!r}, not {expected.get(name)!r}; "
                "remove it or name another --teacher_cache."
            )


@torch.no_grad()
def _compute(
    model: Any, item: dict[str, torch.Tensor], temperature: float, top_k: int
) -> dict[str, np.ndarray]:
    device = next(model.parameters()).device
    places = item.get("position_ids")
    ids = item["input_ids"][None].to(device)
    options = {} if places is None else {"position_ids": places[None].to(device)}
    logits = head_of(model)(last_hidden(model, ids, **options)[0, :-1]).float()
    values, tokens = log_softmax(logits / temperature, -1).topk(top_k)
    labels = log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    found = {"teacher_values": values, "teacher_tokens": tokens.int(), "teacher_labels": labels}
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}


def _open(folder: Path, name: str, shape: tuple[int, int, int], mode: Any) -> dict[str, np.ndarray]:
    kinds = {
        "teacher_values": ("values.f32", np.float32, shape),
        "teacher_tokens": ("tokens.i32", np.int32, shape),
        "teacher_labels": ("labels.f32", np.float32, shape[:2]),
    }
    return {
        part: np.memmap(folder / f"{name}.{suffix}", dtype=kind, mode=mode, shape=size)
        for part, (suffix, kind, size) in kinds.items()
    }
