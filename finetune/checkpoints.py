"""Checkpoints that appear whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import get_last_checkpoint

from bilinearize.finetune.shards import like
from bilinearize.model.errors import InputError

WEIGHTS = "model.safetensors"


def put(
    final: Path, write: Callable[[Path], Any], saving: Path, accelerator: Any, is_main: bool
) -> None:
    """Have `write` fill a folder of the name of `final` in `saving`, and move it there when all
    processes are done.

    Args:
        is_main: whether this process makes and moves folders.

    Raises:
        InputError: if it can't be written; what was there before stays.
    """
    if is_main:
        shutil.rmtree(saving, ignore_errors=True)
        (saving / final.name).mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        write(saving / final.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        shutil.rmtree(saving, ignore_errors=True)
        raise InputError(
            f"{final}: can't be written ({reason}); make room and give the same command again."
            f"{last_good(final.parent)}"
        ) from error
    accelerator.wait_for_everyone()
    if is_main:
        shutil.rmtree(final, ignore_errors=True)
        os.rename(saving / final.name, final)
        shutil.rmtree(saving)
    accelerator.wait_for_everyone()


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    for path in found[:-keep]:
        shutil.rmtree(path)


def read_weights(folder: Path, into: dict[str, torch.Tensor]) -> dict[str, str]:
    """Copy the weights saved in `folder` into these tensors, sharded ones too.

    Returns:
        The file's metadata.

    Raises:
        InputError: if other weights were saved.
    """
    with safe_open(folder / WEIGHTS, framework="pt") as saved:
        different = sorted(set(saved.keys()) ^ into.keys())
        if different:
            raise InputError(f"{folder}: {different[0]} does not fit; remove the checkpoint.")
        with torch.no_grad():
            for name, tensor in into.items():
                tensor.copy_(like(tensor, saved.get_tensor(name)))
        return saved.metadata()


def last_good(folder: Path) -> str:
    """What an error says of the checkpoints in a folder."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    return f" Last good checkpoint: {last}" if last else " No checkpoint had been written."
