"""What happens beside training: progress bar, log file, the homotopy's t, SIGTERM."""

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, TrainerCallback

from bilinearize.finetune.riding import Homotopy


class LossBar(ProgressCallback):
    """Trainer's progress bar, with the newest figures behind it instead of a line per entry.

    `gap` is that of the training tokens, `heldout_gap` that of the held-out ones.
    """

    SHOWN = ("loss", "kl", "hidden", "gap", "heldout_gap", "t")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.newest = getattr(self, "newest", {}) | {
                name: f"{logs[name]:.4f}" for name in self.SHOWN if name in logs
            }
            self.training_bar.set_postfix(self.newest)


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
        if "loss" not in logs and "heldout_loss" not in logs:
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


class SavesOnSignal(TrainerCallback):
    """On SIGTERM, as a batch system sends it: the step in progress is finished and saved, and
    training ends."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.caught = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.caught = False
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = signal.signal(signal.SIGTERM, self._catch)

    def _catch(self, number: int, frame: Any) -> None:
        self.caught = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.accelerator.num_processes > 1:  # all stop at the same step
            flag = torch.tensor(float(self.caught), device=self.accelerator.device)
            self.caught = bool(self.accelerator.reduce(flag, "sum").item() > 0)
        if self.caught:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.main:
            signal.signal(signal.SIGTERM, self.before)
