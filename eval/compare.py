"""Evaluate converted models against their teacher on the same tokens, and write the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bilinearize.eval.facts import interval_facts, model_facts, run_facts, text_facts
from bilinearize.eval.generate import compare_texts
from bilinearize.eval.inputs import TEACHER, Setup, prepare
from bilinearize.eval.processes import gather, own_share, team, together
from bilinearize.eval.report import SCHEMA, format_protocol, format_table, write_report
from bilinearize.eval.scores import Pass, score_windows
from bilinearize.eval.summary import KL_EDGES, summarise
from bilinearize.eval.tasks import compare_tasks, plan_tasks
from bilinearize.eval.windows import Slice, plan_reading
from bilinearize.model.checkpoint import check_new
from bilinearize.model.device import choose_device
from bilinearize.model.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate(
    teacher: str,
    candidates: Mapping[str, str],
    out: Path,
    *,
    text: str | Mapping[str, str] | None = None,
    text_column: str | Mapping[str, str] | None = None,
    split: str | Mapping[str, str] | None = None,
    protocol: str = "windows",
    window: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    bos: str = "auto",
    dtype: str = "float32",
    device: str = "auto",
    batch_size: int = 1,
    prompts: int = 16,
    sample_tokens: int = 48,
    tasks: Sequence[str] | None = None,
    task_limit: int | None = None,
    task_fewshot: int | None = None,
    bootstrap_samples: int = 2000,
    seed: int = 0,
    revision: str | None = None,
) -> dict:
    """Score the same windows with the teacher and every candidate; write `out`, print the table.

    Under `accelerate launch` or `torchrun` the windows are split over the processes, each of which
    holds all models; the result is the same, and the main process writes it.

    Args:
        teacher: folder, hub id (at `revision`) or GGUF file.
        candidates: names for the report, and the folder, hub id or GGUF file of each.
        out: new folder for `eval.json`, `eval.md` and `eval.png`.

    The others are the fields of `bilinearize.eval.config.EvalConfig`.

    Returns:
        What `eval.json` holds. All losses, gaps and divergences are nats per token.

    Raises:
        InputError: for bad values, text too short, models that don't load whole or don't share the
            teacher's tokenizer, logits that are not finite. Nothing has been written then.
    """
    state = team()
    _check_values(candidates, dtype, batch_size, prompts, sample_tokens, bootstrap_samples)
    reading = plan_reading(protocol, text, text_column, split, window, stride, tokens, bos)
    together(lambda: check_new(out))
    questions = together(lambda: plan_tasks(tasks, task_limit, task_fewshot))
    sources = {TEACHER: teacher, **candidates}
    setup = together(
        lambda: prepare(sources, revision, reading, DTYPES[dtype], choose_device(device))
    )
    passes = [_score(setup, part, batch_size) for part in setup.slices]
    texts = compare_texts(setup, prompts, sample_tokens, bootstrap_samples, seed)
    scores = None
    if questions is not None:
        scores = together(
            lambda: compare_tasks(questions, setup, batch_size, bootstrap_samples, seed)
        )
    whole, each = summarise(setup.slices, passes, bootstrap_samples, seed)
    facts = {
        **text_facts(setup, reading),
        **run_facts(setup, dtype, batch_size),
        "interval": interval_facts(setup, bootstrap_samples, seed),
        "tasks": None if questions is None else questions.facts,
    }
    result = _assemble(facts, setup, sources, whole, each, passes, texts | {"tasks": scores})
    together(lambda: write_report(out, result) if state.is_main_process else None)
    if state.is_main_process:
        print(f"{format_table(result)}\n\n{format_protocol(result)}\nWrote {out}")
    return result


def _score(setup: Setup, part: Slice, batch_size: int) -> Pass:
    """One slice, this process's share of its windows, then everyone's."""
    first, share = own_share(part.windows)
    own = together(
        lambda: score_windows(
            setup.models[TEACHER],
            setup.students,
            share,
            setup.vocabulary,
            batch_size,
            part.name,
            first,
            len(part.windows),
        )
    )
    whole = Pass.empty(setup.students)
    for done in gather(own):
        whole.extend(done)
    return whole


def _check_values(
    candidates: Mapping[str, str],
    dtype: str,
    batch_size: int,
    prompts: int,
    sample_tokens: int,
    bootstrap_samples: int,
) -> None:
    if not candidates:
        raise InputError("no candidate to compare with the teacher; name at least one folder.")
    for name in candidates:
        if name == TEACHER or not name.strip() or "\n" in name:
            raise InputError(f"a candidate can't be called {name!r}; choose another name.")
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}.")
    least = {
        "batch_size": (batch_size, 1),
        "prompts": (prompts, 0),
        "sample_tokens": (sample_tokens, 1),
        "bootstrap_samples": (bootstrap_samples, 100),
    }
    for key, (value, low) in least.items():
        if value < low:
            raise InputError(f"{key} is {value}; use {low} or more.")


def _assemble(
    protocol: dict,
    setup: Setup,
    sources: Mapping[str, str],
    whole: dict,
    each: list[dict],
    passes: list[Pass],
    texts: dict,
) -> dict:
    facts, students = model_facts(setup, sources), setup.students
    names = [part.name for part in setup.slices]
    return {
        "schema": SCHEMA,
        "protocol": protocol,
        TEACHER: facts[TEACHER] | whole[TEACHER],
        "candidates": {name: facts[name] | whole["candidates"][name] for name in students},
        "slices": dict(zip(names, each, strict=True)),
        "kl_histogram_edges": KL_EDGES.tolist(),
        "windows": {
            part.name: {
                "tokens": [window.scored for window in part.windows],
                "nll": {TEACHER: done.teacher.nll}
                | {name: done.candidates[name].nll for name in students},
                "kl": {name: done.candidates[name].kl for name in students},
            }
            for part, done in zip(setup.slices, passes, strict=True)
        },
        **texts,
    }
