"""The folders a finetune writes: plain Hugging Face checkpoints that say how they were made."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.data import data_sha256
from bilinearize.finetune.trainer import RecoveryTrainer
from bilinearize.finetune.work import DATA, HISTORY, RESULT, RUNS, SETTINGS, stage_folder
from bilinearize.model.card import write_card
from bilinearize.model.checkpoint import atomic_folder, carry_files, list_tensors
from bilinearize.model.families import CONVERTED_TYPES

RECORD = "finetune.json"
MADE = "bilinearize.json"
LOSSES = ("step", "loss", "kl", "gap", "cross_entropy", "hidden")


def write_stage(
    model: PreTrainedModel, trainer: RecoveryTrainer, student: Path, stage: Path
) -> None:
    """Write what a stage ends with, in fp32, as `STAGE/result`, whole or not at all."""
    with atomic_folder(stage / RESULT) as partial:
        _write_model(model, student, partial, torch.float32)
        _write_json(partial / RECORD, stage_record(trainer))


def write_result(
    model: PreTrainedModel, trainer: RecoveryTrainer, student: Path, work: Path, out: Path
) -> None:
    """Write the finished student to `out`, whole or not at all, in the dtype it was stored in.

    Args:
        model: what the last stage ended with, in fp32.
        trainer: that of the last stage, after training.
        student: the checkpoint that the first stage started from; its tokenizer and record are
            carried on.
        work: the run's work folder.

    Raises:
        InputError: if `out` exists.
    """
    dtype = stored_dtype(student)
    number = 0
    stages = []
    while (folder := stage_folder(work, number) / RESULT).is_dir():
        stages.append(json.loads((folder / RECORD).read_text()))
        number += 1
    stages.append(stage_record(trainer))
    with atomic_folder(out) as partial:
        _write_model(model, student, partial, dtype)
        lines = [
            {"stage": stage} | json.loads(line)
            for stage in range(len(stages))
            for line in (stage_folder(work, stage) / HISTORY).read_text().splitlines()
        ]
        (partial / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))
        _write_json(partial / RECORD, _record(stages, work, dtype))
        if (work / RUNS).is_dir():
            shutil.copytree(work / RUNS, partial / RUNS)
        if (partial / "bilinearize.json").is_file():  # not so for a control
            write_card(partial)


def _write_model(model: PreTrainedModel, student: Path, folder: Path, dtype: torch.dtype) -> None:
    model.to(dtype).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    config = json.loads((folder / "config.json").read_text())
    family = CONVERTED_TYPES.get(config["model_type"])
    if family is not None:
        config["auto_map"] = family.auto_map  # save_pretrained leaves AutoModel out
        _write_json(folder / "config.json", config)
    carry_files(student, folder)
    if (student / MADE).is_file() and family is not None:
        shutil.copyfile(student / MADE, folder / MADE)
        record = json.loads((folder / MADE).read_text())
        if record.get("form") == "gated" != config["bilinear_form"]:  # annealed
            record["method"] = "annealed"
            for entry in (record, *record.get("layers", ())):
                entry |= {"form": "bilinear", "activation": "identity"}
            _write_json(folder / MADE, record)


def stage_record(trainer: RecoveryTrainer) -> dict[str, Any]:
    """What one stage did, in numbers."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    windows: Any = trainer.train_dataset
    tokens = len(windows) * len(windows[0]["input_ids"])
    teacher = trainer.pair.teacher
    watched = [entry for entry in trainer.state.log_history if "heldout_loss" in entry]
    record = {
        "steps": trainer.state.global_step,
        "tokens": tokens,
        "seconds": round(history[-1]["seconds"], 3),
        "teacher": teacher.mode if teacher is not None else None,
        "trained_parameters": sum(p.numel() for p in trainer.trained_parameters().values()),
        "first": {name: history[0][name] for name in LOSSES if name in history[0]},
        "last": {name: history[-1][name] for name in LOSSES if name in history[-1]},
    }
    if watched:
        record["heldout_first"], record["heldout_last"] = watched[0], watched[-1]
    if trainer.state.best_metric is not None:
        best = (e for e in watched if e["heldout_loss"] == trainer.state.best_metric)
        record["heldout_best"] = next(best)
    return record


def _record(stages: list[dict[str, Any]], work: Path, dtype: torch.dtype) -> dict[str, Any]:
    totals = {name: sum(stage[name] for stage in stages) for name in ("steps", "tokens", "seconds")}
    return {
        "settings": json.loads((work / SETTINGS).read_text()),
        **stages[-1],
        **totals,
        "tokens_per_second": round(totals["tokens"] / totals["seconds"], 1),
        "stages": stages,
        "data_sha256": data_sha256(work / DATA),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            name: version(name)
            for name in ("bilinearize", "torch", "transformers", "accelerate", "safetensors")
        },
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def stored_dtype(folder: Path) -> torch.dtype:
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
