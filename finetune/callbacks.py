"""What happens beside training: the progress bar, the log file, the homotopy's t."""

import json
import time
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from bilinearize.finetune.riding import Homotopy


class LossBar(ProgressCallback):
    """Trainer's progress bar, with the newest loss behind it instead of a line per entry."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            shown = {k: f"{logs[k]:.4f}" for k in ("loss", "kl", "gap", "t") if k in logs}
            self.training_bar.set_postfix(shown)


class HistoryFile(TrainerCallback):
    """Writes each log entry to a .jsonl file, with the seconds of training so far.

    A resumed run first cuts the file back to the checkpoint. An entry closes at every save, so that
    the entries after a resume cover the same steps as in an undisturbed run.
    """

    def __init__(self, file: Path | None):
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        past = state.log_history[-1].get("seconds", 0.0) if state.log_history else 0.0
        self.begun = time.monotonic() - past
        if self.file is not None and state.is_world_process_zero:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("".join(json.dumps(entry) + "\n" for entry in state.log_history))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = control.should_log or control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        state.log_history[-1]["seconds"] = time.monotonic() - self.begun
        if self.file is not None and state.is_world_process_zero:
            with self.file.open("a") as lines:
                lines.write(json.dumps(state.log_history[-1]) + "\n")


class HomotopySchedule(TrainerCallback):
    """Moves the homotopy at the beginning of each step."""

    def __init__(self, homotopy: Homotopy):
        self.homotopy = homotopy

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.homotopy.set(self.homotopy.at(state.global_step, state.max_steps))
