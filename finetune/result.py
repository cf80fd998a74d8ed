"""The result of a finetune: one plain Hugging Face folder that says how it was made."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bilinearize.finetune.data import WINDOWS
from bilinearize.finetune.trainer import RecoveryTrainer
from bilinearize.finetune.work import HISTORY, SETTINGS
from bilinearize.model.checkpoint import atomic_folder, carry_files, list_tensors
from bilinearize.model.families import CONVERTED_TYPES

RECORD = "finetune.json"


def write_result(trainer: RecoveryTrainer, student: Path, work: Path, out: Path) -> None:
    """Write the trained student to `out`, whole or not at all, in the dtype it was stored in.

    Args:
        trainer: after training.
        student: the checkpoint that training started from; its tokenizer and record are carried on.
        work: the run's work folder.

    Raises:
        InputError: if `out` exists.
    """
    model: Any = trainer.pair.student
    family = CONVERTED_TYPES[model.config.model_type]
    dtype = _stored_dtype(student)
    with atomic_folder(out) as partial:
        model.to(dtype).save_pretrained(partial)
        config = json.loads((partial / "config.json").read_text())
        config["auto_map"] = family.auto_map  # save_pretrained leaves AutoModel out
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        carry_files(student, partial)
        if (student / "bilinearize.json").is_file():
            shutil.copyfile(student / "bilinearize.json", partial / "bilinearize.json")
        shutil.copyfile(work / HISTORY, partial / HISTORY)
        record = _record(trainer, work, dtype)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _record(trainer: RecoveryTrainer, work: Path, dtype: torch.dtype) -> dict[str, Any]:
    settings = json.loads((work / SETTINGS).read_text())
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    windows: Any = trainer.train_dataset
    tokens = len(windows) * settings["window"]
    seconds = history[-1]["seconds"]
    losses = ("step", "loss", "kl", "gap", "cross_entropy")
    teacher = trainer.pair.teacher
    with safe_open(work / WINDOWS, framework="pt") as file:
        sha256 = file.metadata()["sha256"]
    return {
        "settings": settings,
        "steps": trainer.state.global_step,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "teacher": teacher.mode if teacher is not None else None,
        "trained_parameters": sum(p.numel() for p in trainer.trained_tensors().values()),
        "first": {name: history[0][name] for name in losses if name in history[0]},
        "last": {name: history[-1][name] for name in losses if name in history[-1]},
        "data_sha256": sha256,
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            name: version(name)
            for name in ("bilinearize", "torch", "transformers", "accelerate", "safetensors")
        },
    }


def _stored_dtype(folder: Path) -> torch.dtype:
    """The widest dtype among a checkpoint's tensors."""
    dtypes = set()
    for file in set(list_tensors(folder).values()):
        with safe_open(file, framework="pt") as shard:
            dtypes |= {shard.get_slice(name).get_dtype() for name in shard.keys()}
    order = {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
    }
    return next((dtype for name, dtype in order.items() if name in dtypes), torch.float32)
