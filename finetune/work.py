"""The folder beside the result that holds a run in progress: settings, packed text, checkpoints.

It appears whole or not at all, and serves only the run whose settings it records.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from bilinearize.model.checkpoint import atomic_folder
from bilinearize.model.errors import InputError

SETTINGS = "settings.json"
CHECKPOINTS = "checkpoints"
HISTORY = "log.jsonl"
RESULT = "result"
DATA = "data"
TEACHER = "teacher"
RUNS = "runs"
"""Where tensorboard's files are, a folder for each stage."""


def work_folder(out: Path) -> Path:
    """Where the run that makes `out` keeps its state."""
    return out.with_name(out.name + ".work")


def check_work(work: Path, settings: dict[str, Any]) -> bool:
    """Whether `work` is there to go on from.

    Raises:
        InputError: if it belongs to other settings (the first that differs is named) or is no work
            folder at all.
    """
    if not work.exists():
        return False
    if not (work / SETTINGS).is_file():
        raise InputError(f"{work}: no work folder of a finetune; move it or name another result.")
    recorded = json.loads((work / SETTINGS).read_text())
    for name in {**recorded, **settings}:
        before, now = recorded.get(name), settings.get(name)
        if before != now:
            raise InputError(
                f"{work}: made with {name} {before!r}, not {now!r}; "
                "repeat the settings to go on from it, or remove it to start afresh."
            )
    return True


def make_work(work: Path, settings: dict[str, Any], pack: Callable[[Path], Any]) -> None:
    """Write a new work folder, whole or not at all; `pack` fills the folder of the data."""
    with atomic_folder(work) as partial:
        (partial / DATA).mkdir()
        pack(partial / DATA)
        (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def stage_folder(work: Path, stage: int) -> Path:
    """Where a stage keeps its checkpoints, its log and, once it is over, its result."""
    return work / f"stage-{stage}"


def last_checkpoint(stage: Path) -> str | None:
    """The newest checkpoint. The trainer gives a folder its name only when it is whole."""
    folder = stage / CHECKPOINTS
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None
