"""`bilinearize finetune`: train a converted model towards its teacher, resumably.

    finetune("converted", "HuggingFaceTB/SmolLM2-135M-Instruct", Path("out"), text="book.txt")

Runs in one process, or in each process of `accelerate launch` or `torchrun`.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from bilinearize.finetune import data, work
from bilinearize.finetune.arguments import training_arguments
from bilinearize.finetune.cache import CachedTeacher, CachedWindows, ensure_cache
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.packing import DESCRIPTION, pack_all
from bilinearize.finetune.pair import StudentWithTeacher
from bilinearize.finetune.result import write_result, write_stage
from bilinearize.finetune.stage import build_stage, finished_model
from bilinearize.finetune.trainer import RecoveryTrainer
from bilinearize.model.checkpoint import (
    check_new,
    list_tensors,
    load_config,
    load_tokenizer,
    resolve_checkpoint,
)
from bilinearize.model.errors import InputError
from bilinearize.model.families import CONVERTED_TYPES


def finetune(student: str, teacher: str, out: Path, **settings: Any) -> Path:
    """Train `student` towards `teacher` and write the result as one plain Hugging Face folder.

    While training, `OUT.work` holds the packed text, the checkpoints, and the result of each stage
    but the last. The same call goes on from the last checkpoint there, to the same weights as
    without the interruption.

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
    stages = config.stage_list()
    _check_optimizer(stages)
    arguments = [
        _arguments(stage, work.stage_folder(folder, number) / work.CHECKPOINTS)
        for number, stage in enumerate(stages)
    ]
    processes = PartialState()
    with processes.main_process_first():
        original = resolve_checkpoint(teacher)
        begun = original if config.control else resolve_checkpoint(student)
    _check_sources(begun, original, config)
    per_step = config.batch_size * config.accumulation * processes.num_processes
    counts = [data.steps_in(stage.tokens, config.window, per_step) * per_step for stage in stages]
    packed = _prepare(config, stages, begun, original, folder, processes)
    # Of what has been done, the result of the last stage that is over is where to go on.
    results = [work.stage_folder(folder, number) / work.RESULT for number in range(len(stages))]
    first = next(number for number, result in enumerate(results) if not result.is_dir())
    source = begun if first == 0 else results[first - 1]
    for number in range(first, len(stages)):
        stage, done = stages[number], sum(counts[:number])
        pair, described = build_stage(stage, source, original)
        if packed is not None:
            work.make_work(folder, *packed)
            packed = None
        processes.wait_for_everyone()
        if isinstance(pair.teacher, CachedTeacher):
            _ensure_cache(stage, folder, original)
        heading = f"Stage {number + 1} of {len(stages)}. " if len(stages) > 1 else ""
        processes.print(heading + described)
        trainer = _train(stage, pair, arguments[number], (done, counts[number]), processes)
        tensors = trainer.best_tensors()
        if processes.is_main_process:
            model = finished_model(stage, source, tensors)
            if number + 1 < len(stages):
                write_stage(model, trainer, source, work.stage_folder(folder, number))
                shutil.rmtree(str(arguments[number].output_dir))
            else:
                write_result(model, trainer, begun, folder, out)
                shutil.rmtree(folder)
        processes.wait_for_everyone()
        source = results[number]
        del pair, trainer  # before the next stage's are loaded
    return out


def _train(
    stage: FinetuneConfig,
    pair: StudentWithTeacher,
    arguments: TrainingArguments,
    span: tuple[int, int],
    processes: PartialState,
) -> RecoveryTrainer:
    """Train a stage to its end, from its last checkpoint if there is one.

    Args:
        span: how many windows were trained on in the stages before, and how many are in this one.

    Raises:
        SystemExit: with status 143, after SIGTERM and a checkpoint.
    """
    folder = Path(str(arguments.output_dir)).parent
    packed = folder.parent / work.DATA
    windows = data.training_windows(packed, sum(span), stage.seed, span[0])
    held_out = data.heldout_windows(packed)
    if isinstance(pair.teacher, CachedTeacher):
        windows = _cached(stage, folder.parent, windows, "training-")
        held_out = held_out and _cached(stage, folder.parent, held_out, "heldout")
    trainer = RecoveryTrainer(
        pair,
        arguments,
        windows,
        eval_dataset=held_out,
        keep_checkpoints=stage.keep_checkpoints,
        history=folder / work.HISTORY,
        rates=stage.rates,
        tokens_before=span[0] * stage.window,
        keep_best=stage.keep_best,
        muon=stage.optimizer == "muon",
    )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
            callback.logging_dir = str(folder.parent / work.RUNS / folder.name)
    if trainer.is_fsdp_enabled:
        processes.print(f"The model is sharded over {processes.num_processes} processes.")
    last = work.last_checkpoint(folder)
    if last is not None:
        processes.print(f"Going on from {last}")
    trainer.train(resume_from_checkpoint=last)
    if trainer.state.global_step < trainer.state.max_steps:
        processes.print(f"Stopped at step {trainer.state.global_step}; the same command goes on.")
        raise SystemExit(143)
    trainer.check_weights()
    if pair.homotopy is not None and pair.homotopy.t != 1:
        raise RuntimeError(f"the homotopy ended at t = {pair.homotopy.t}")
    return trainer


def _cache_folder(stage: FinetuneConfig, work_folder: Path) -> Path:
    return Path(stage.teacher_cache or work_folder / work.TEACHER).expanduser()


def _cached(stage: FinetuneConfig, folder: Path, windows: data.Windows, kind: str) -> data.Windows:
    """The windows with what the cached teacher knows; `kind` begins the names of their files."""
    names = [name for name in data.packed_rows(folder / work.DATA) if name.startswith(kind)]
    return CachedWindows(windows, _cache_folder(stage, folder), names, stage.top_k)


def _ensure_cache(stage: FinetuneConfig, folder: Path, teacher: Path) -> None:
    """Compute the cached teacher of these windows, or check that it is that."""
    description = json.loads((folder / work.DATA / DESCRIPTION).read_text())
    expected = {
        "top_k": stage.top_k,
        "temperature": stage.temperature,
        "document_mask": stage.document_mask,
        "teacher_sha256": data.checkpoint_sha256(teacher),
        "data_sha256": [source["sha256"] for source in description["sources"]],
        "heldout_sha256": description.get("heldout", {}).get("sha256"),
    }
    rows = data.packed_rows(folder / work.DATA)
    ensure_cache(_cache_folder(stage, folder), rows, teacher, expected)


def _arguments(config: FinetuneConfig, output: Path) -> TrainingArguments:
    kl, cross_entropy, _ = config.weights()
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
        eval_every=config.eval_every if config.watches() else 0,
        beta2=config.beta2,
        unused_parameters=kl == cross_entropy == 0,  # the head, and what follows the last layer
        report_to=config.report_to,
    )


def _check_optimizer(stages: list[FinetuneConfig]) -> None:
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if deepspeed and any(stage.optimizer == "muon" for stage in stages):
        raise InputError(
            "--optimizer muon does not run under DeepSpeed, which cuts matrices into pieces; use "
            "adamw, or FSDP."
        )


def _check_sources(student: Path, teacher: Path, config: FinetuneConfig) -> None:
    """Raise InputError unless the student is what the run needs and uses the same tokens."""
    ours, theirs = load_config(student), load_config(teacher)
    if ours.model_type not in CONVERTED_TYPES and not config.control:
        raise InputError(
            f"{student}: model_type is {ours.model_type}, not a converted model; convert it first."
        )
    if config.window > ours.max_position_embeddings:
        raise InputError(
            f"--window {config.window} is longer than the {ours.max_position_embeddings} positions "
            f"of {student}; use at most that."
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
    config: FinetuneConfig,
    stages: list[FinetuneConfig],
    student: Path,
    teacher: Path,
    folder: Path,
    processes: PartialState,
) -> tuple[dict[str, Any], Callable[[Path], Any]] | None:
    """What the work folder is to hold, in the main process and unless it holds it already."""
    if not processes.is_main_process:
        return None
    settings = {
        **asdict(config),
        "student_sha256": data.checkpoint_sha256(student),
        "teacher_sha256": data.checkpoint_sha256(teacher),
        "text_sha256": data.text_sha256(config.text),
        "heldout_sha256": data.text_sha256(config.heldout_text),
        "processes": processes.num_processes,
    }
    if work.check_work(folder, settings):
        return None
    pack = partial(
        pack_all,
        tokenizer=load_tokenizer(student),
        shares=data.shares_of(config.text),
        column=config.text_column,
        split=config.split,
        window=config.window,
        tokens=sum(stage.tokens for stage in stages),
        bos=config.bos,
        document_mask=config.document_mask,
        heldout=config.heldout,
        heldout_text=config.heldout_text,
        heldout_tokens=config.heldout_tokens,
    )
    return settings, pack
