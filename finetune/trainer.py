"""transformers' Trainer with a loss per token and checkpoints that are never torn."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from bilinearize.finetune.callbacks import HistoryFile, HomotopySchedule, LossBar
from bilinearize.finetune.groups import optimizer_groups
from bilinearize.finetune.pair import PARTS, StudentWithTeacher
from bilinearize.finetune.riding import plain_name
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
        rates: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        super().__init__(model=model, args=args, train_dataset=train_dataset, **kwargs)
        self.pair = model
        self.folder = Path(str(args.output_dir))
        self.keep_checkpoints = keep_checkpoints
        self.rates = rates or {}
        self._parts = torch.zeros(len(PARTS) + 1, dtype=torch.float32, device=args.device)
        self.remove_callback(ProgressCallback)
        if not args.disable_tqdm:
            self.add_callback(LossBar)
        self.add_callback(HistoryFile(history))
        if model.homotopy is not None:
            self.add_callback(HomotopySchedule(model.homotopy))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW, with a learning rate for each group and no decay on biases and norms."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args)
            student: Any = self.pair.student
            decayed = set(self.get_decay_parameter_names(student))
            rate = self.args.learning_rate
            groups = optimizer_groups(student, decayed, self.args.weight_decay, rate, self.rates)
            self.optimizer = kind(groups, **options)
        return self.optimizer

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
            sums: Any = self.accelerator.reduce(self._parts, "sum")
            *parts, count = sums.tolist()
            self._parts.zero_()
            logs |= self.pair.describe(parts, count)
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
        return {plain_name(name): tensor.data for name, tensor in named if tensor.requires_grad}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.folder)
            folder.mkdir(parents=True, exist_ok=True)
            homotopy = self.pair.homotopy
            metadata = {} if homotopy is None else {"t": repr(homotopy.t)}
            save_file(self.trained_tensors(), folder / WEIGHTS, metadata)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        ours = self.trained_tensors()
        with safe_open(os.path.join(resume_from_checkpoint, WEIGHTS), framework="pt") as saved:
            different = sorted(set(saved.keys()) ^ ours.keys())
            if different:
                raise InputError(
                    f"{resume_from_checkpoint}: {different[0]} does not fit; remove the checkpoint."
                )
            for name, tensor in ours.items():
                tensor.copy_(saved.get_tensor(name))
            if self.pair.homotopy is not None:
                self.pair.homotopy.set(float(saved.metadata()["t"]))

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
