"""transformers' Trainer with a loss per token and checkpoints that are never torn."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from bilinearize.finetune.teacher import StudentWithTeacher
from bilinearize.model.errors import InputError

WEIGHTS = "model.safetensors"
SAVING = "saving"
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def training_arguments(
    output: Path,
    learning_rate: float,
    warmup: float,
    schedule: str,
    weight_decay: float,
    max_grad_norm: float,
    batch_size: int,
    accumulation: int,
    save_every: int,
    log_every: int,
    bf16: bool,
    seed: int,
) -> TrainingArguments:
    """Trainer's arguments; making them also joins the process group. Nothing is written."""
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    on_cpu = forced or not torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=str(output),
        learning_rate=learning_rate,
        warmup_steps=warmup,  # below 1, a share of all steps
        lr_scheduler_type=SCHEDULES[schedule],
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,  # the dataset lays out the whole run
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=save_every,
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        bf16=bf16,
        seed=seed,
        use_cpu=on_cpu,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        report_to="none",
    )
    if arguments.n_gpu > 1:
        raise InputError(
            f"{arguments.n_gpu} GPUs in one process; start one process per GPU with "
            "`accelerate launch`, or show only one by CUDA_VISIBLE_DEVICES."
        )
    return arguments


class RecoveryTrainer(Trainer):
    """Trains a `StudentWithTeacher`.

    The loss of a step is a sum over its tokens divided by their number, over all micro-batches and
    processes, so it does not depend on how the step is cut. A checkpoint holds what trains, written
    aside and renamed when all processes are done with it.

    Raises:
        InputError: when the loss or a weight stops being finite.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: StudentWithTeacher,
        args: TrainingArguments,
        train_dataset: Any,
        keep_checkpoints: int = 1,
        history: Path | None = None,
        **kwargs: Any,
    ):
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self.pair = model
        self.folder = Path(str(args.output_dir))
        self.keep_checkpoints = keep_checkpoints
        self._parts = torch.zeros(4, dtype=torch.float32, device=args.device)
        self.remove_callback(ProgressCallback)
        if not args.disable_tqdm:
            self.add_callback(LossBar)
        self.add_callback(HistoryFile(history))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's share of the step's loss, times the processes DDP averages over."""
        outputs = model(**inputs)
        if not math.isfinite(outputs["loss"].item()):
            raise InputError(
                f"the loss is {outputs['loss'].item()} at step {self.state.global_step + 1}; "
                f"lower --learning_rate or --max_grad_norm.{self._last_good()}"
            )
        self._parts += torch.cat([outputs["parts"].float(), outputs["count"].float()[None]])
        items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        loss = outputs["loss"] * self.accelerator.num_processes / items
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss since the last entry, in nats per token."""
        if "loss" in logs:
            parts: Any = self.accelerator.reduce(self._parts, "sum")
            kl, ours, theirs, count = parts.tolist()
            self._parts.zero_()
            count = max(count, 1.0)
            logs["cross_entropy"] = ours / count
            if self.pair.teacher is not None:
                logs |= {"kl": kl / count, "gap": (ours - theirs) / count}
        super().log(logs, start_time)

    # Trainer saves into this folder; `_save_checkpoint` moves the result to where resuming looks.
    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder / SAVING)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        saving, final = self.folder / SAVING, self.folder
        self.check_weights()
        if self.args.should_save:
            shutil.rmtree(saving, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            name = f"checkpoint-{self.state.global_step}"
            shutil.rmtree(final / name, ignore_errors=True)
            os.rename(saving / name, final / name)
            shutil.rmtree(saving)
            checkpoints = sorted(final.glob("checkpoint-*"), key=lambda x: int(x.name[11:]))
            for folder in checkpoints[: -self.keep_checkpoints]:
                shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """What trains, by its name in the student."""
        named = self.pair.student.named_parameters()
        return {name: tensor.data for name, tensor in named if tensor.requires_grad}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.trained_tensors(), folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        saved, ours = (
            load_file(os.path.join(resume_from_checkpoint, WEIGHTS)),
            self.trained_tensors(),
        )
        if saved.keys() != ours.keys():
            name = sorted(saved.keys() ^ ours.keys())[0]
            raise InputError(
                f"{resume_from_checkpoint}: {name} does not fit; remove the checkpoint."
            )
        for name, tensor in ours.items():
            tensor.copy_(saved[name])

    def check_weights(self) -> None:
        """Raise InputError if a trained weight is not finite."""
        for name, tensor in self.trained_tensors().items():
            if not tensor.isfinite().all():
                raise InputError(
                    f"{name} is no longer finite at step {self.state.global_step}; "
                    f"lower --learning_rate or --max_grad_norm.{self._last_good()}"
                )

    def _last_good(self) -> str:
        last = get_last_checkpoint(str(self.folder)) if self.folder.is_dir() else None
        return f" Last good checkpoint: {last}" if last else " No checkpoint had been written."


class LossBar(ProgressCallback):
    """Trainer's progress bar, with the newest loss behind it instead of a line per entry."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in logs:
            shown = {k: f"{logs[k]:.4f}" for k in ("loss", "kl", "gap") if k in logs}
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
