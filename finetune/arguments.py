"""The arguments of transformers' Trainer."""

import os
from pathlib import Path

import torch
from accelerate import DistributedType, PartialState
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from bilinearize.model.errors import InputError

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def _cpu_forced() -> bool:
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


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
    eval_every: int = 0,
    beta2: float = 0.999,
    unused_parameters: bool = False,
    report_to: list[str] | None = None,
) -> TrainingArguments:
    """Trainer's arguments; making them also joins the process group. Nothing is written.

    Args:
        eval_every: steps between two evaluations on the held-out text; 0 is none.
        beta2: AdamW's; beta1 is 0.9.
        unused_parameters: whether some that train may have no part in a loss.
        report_to: names of Trainer's integrations.

    Raises:
        InputError: if this process sees several GPUs, or a tracker can't be used.
    """
    _check_trackers(report_to or [])
    on_cpu = _cpu_forced() or not torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=str(output),
        learning_rate=learning_rate,
        warmup_steps=warmup,  # below 1, a share of all steps
        lr_scheduler_type=SCHEDULES[schedule],
        adam_beta2=beta2,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,  # the dataset lays out the whole run
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=save_every,
        eval_strategy="steps" if eval_every else "no",
        eval_steps=eval_every or None,
        eval_on_start=bool(eval_every),
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        bf16=bf16,
        seed=seed,
        use_cpu=on_cpu,
        ddp_find_unused_parameters=unused_parameters,
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        report_to=report_to or "none",
    )
    _let_cpus_shard()
    if arguments.n_gpu > 1:
        raise InputError(
            f"{arguments.n_gpu} GPUs in one process; start one process per GPU with "
            "`accelerate launch`, or show only one by CUDA_VISIBLE_DEVICES."
        )
    return arguments


def _check_trackers(names: list[str]) -> None:
    """Raise InputError for a name that Trainer does not know, or whose library is missing."""
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise InputError(f"--report_to is {name!r}; Trainer knows {known}.")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError) as error:
            raise InputError(f"--report_to {name}: not installed here ({error}).") from error


def _let_cpus_shard() -> None:
    """Let accelerate shard by FSDP2 on CPUs too, if its environment asks for FSDP.

    accelerate 1.15 does so on accelerators only; torch's `fully_shard` works over gloo as well.
    """
    state = PartialState()
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
