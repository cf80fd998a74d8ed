"""`bilinearize finetune`: train a converted model towards its teacher, resumably.

    finetune("converted", "HuggingFaceTB/SmolLM2-135M-Instruct", Path("out"), text="book.txt")

Runs in one process, or in each process of `accelerate launch` or `torchrun`.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune import data, work
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.losses import LossWeights
from bilinearize.finetune.result import write_result
from bilinearize.finetune.teacher import (
    SeparateTeacher,
    SharedTeacher,
    StudentWithTeacher,
    decoder_layers,
    load_teacher,
)
from bilinearize.finetune.trainer import RecoveryTrainer, training_arguments
from bilinearize.model.checkpoint import (
    check_new,
    list_tensors,
    load_causal_lm,
    load_config,
    load_tokenizer,
    resolve_checkpoint,
)
from bilinearize.model.errors import InputError
from bilinearize.model.families import CONVERTED_TYPES
from bilinearize.model.symmetry import balance_


def finetune(student: str, teacher: str, out: Path, **settings: Any) -> Path:
    """Train `student` towards `teacher` and write the result as one plain Hugging Face folder.

    While training, `OUT.work` holds the packed text and the checkpoints. The same call goes on from
    the last checkpoint there, to the same weights as without the interruption.

    Args:
        student: a converted checkpoint: folder or hub id.
        teacher: the model it was converted from: folder, hub id or GGUF file.
        out: the folder to make.
        **settings: the fields of `FinetuneConfig`; `text` is required.

    Returns:
        `out`, which also holds `finetune.json` and `log.jsonl`.

    Raises:
        InputError: for bad input (nothing has been written by then), or when training diverges (the
            last checkpoint stays).
    """
    config = FinetuneConfig(**settings)
    out = Path(out)
    check_new(out)
    folder = work.work_folder(out)
    arguments = _arguments(config, folder / work.CHECKPOINTS)
    processes = PartialState()
    with processes.main_process_first():
        sources = resolve_checkpoint(student), resolve_checkpoint(teacher)
    _check_sources(*sources, config.window)
    windows_per_step = config.batch_size * config.accumulation * processes.num_processes
    steps = data.steps_in(config.tokens, config.window, windows_per_step)
    packed = _prepare(config, *sources, folder, processes)
    model = _build(config, *sources, processes)
    if packed is not None:
        work.make_work(folder, *packed)
    processes.wait_for_everyone()
    windows = data.TrainingWindows(data.load_windows(folder), steps * windows_per_step, config.seed)
    history = folder / work.HISTORY
    trainer = RecoveryTrainer(model, arguments, windows, config.keep_checkpoints, history)
    last = work.last_checkpoint(folder)
    if last is not None:
        processes.print(f"Going on from {last}")
    trainer.train(resume_from_checkpoint=last)
    trainer.check_weights()
    if processes.is_main_process:
        write_result(trainer, sources[0], folder, out)
        shutil.rmtree(folder)
    processes.wait_for_everyone()
    return out


def _arguments(config: FinetuneConfig, output: Path) -> TrainingArguments:
    return training_arguments(
        output,
        config.learning_rate,
        config.warmup,
        config.schedule,
        config.weight_decay,
        config.max_grad_norm,
        config.batch_size,
        config.accumulation,
        config.save_every,
        config.log_every,
        config.bf16,
        config.seed,
    )


def _check_sources(student: Path, teacher: Path, window: int) -> None:
    """Raise InputError unless `student` is converted, fits `window` and uses the same tokens."""
    ours, theirs = load_config(student), load_config(teacher)
    if ours.model_type not in CONVERTED_TYPES:
        raise InputError(
            f"{student}: model_type is {ours.model_type}, not a converted model; convert it first."
        )
    if window > ours.max_position_embeddings:
        raise InputError(
            f"--window {window} is longer than the {ours.max_position_embeddings} positions of "
            f"{student}; use at most that."
        )
    if ours.vocab_size != theirs.vocab_size:
        raise InputError(
            f"{teacher}: vocab_size {theirs.vocab_size}, but {student} has {ours.vocab_size}; "
            "name the model that the student was converted from."
        )
    if load_tokenizer(student).get_vocab() != load_tokenizer(teacher).get_vocab():
        raise InputError(
            f"{teacher}: its tokenizer has other tokens than that of {student}; "
            "name the model that the student was converted from."
        )
    for folder in (student, teacher):
        list_tensors(folder)


def _prepare(
    config: FinetuneConfig, student: Path, teacher: Path, folder: Path, processes: PartialState
) -> tuple[dict[str, Any], torch.Tensor] | None:
    """What the work folder is to hold, in the main process and unless it holds it already."""
    if not processes.is_main_process:
        return None
    settings = {
        **asdict(config),
        "student_sha256": data.checkpoint_sha256(student),
        "teacher_sha256": data.checkpoint_sha256(teacher),
        "text_sha256": data.text_sha256(config.text),
        "processes": processes.num_processes,
    }
    if work.check_work(folder, settings):
        return None
    windows = data.pack_text(
        student,
        config.text,
        config.text_column,
        config.split,
        config.window,
        config.tokens,
        config.bos,
    )
    return settings, windows


def _build(
    config: FinetuneConfig, student: Path, teacher: Path, processes: PartialState
) -> StudentWithTeacher:
    """Load both models in fp32, balance and free what trains, and say so."""
    model = load_causal_lm(student)
    original, difference = None, None
    if config.kl_weight > 0:
        original, difference = load_teacher(teacher, model, share=config.train == "mlp")
    for layer in decoder_layers(model):
        if layer.mlp.form == "bilinear":
            balance_(layer.mlp)
    if config.train == "mlp":
        model.requires_grad_(False)
        for layer in decoder_layers(model):
            layer.mlp.requires_grad_(True)
    if config.gradient_checkpointing:
        model.activation_checkpointing_enable()
    processes.print(_describe(config, model, original))
    if difference is not None:
        processes.print(f"The teacher is loaded whole, not shared: {difference} differs.")
    weights = LossWeights(config.kl_weight, config.cross_entropy_weight, config.temperature)
    return StudentWithTeacher(model, original, weights, config.kl_chunk)


def _describe(
    config: FinetuneConfig,
    model: PreTrainedModel,
    teacher: SharedTeacher | SeparateTeacher | None,
) -> str:
    trained = [p for p in model.parameters() if p.requires_grad]
    ours, all_ = sum(p.numel() for p in trained), sum(p.numel() for p in model.parameters())
    what = "the MLPs" if config.train == "mlp" else "every weight"
    return (
        f"Trains {what}: {ours:,} of {all_:,} parameters in {len(trained)} tensors; "
        f"teacher: {teacher.mode if teacher is not None else 'none'}."
    )
