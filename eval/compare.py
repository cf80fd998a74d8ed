"""Evaluate converted models against their teacher on the same tokens, and write the report."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.eval.generate import sample_texts
from bilinearize.eval.inputs import (
    check_tokenizer,
    common_vocabulary,
    count_bytes,
    load_model,
    read_windows,
    tokenizer_hash,
)
from bilinearize.eval.report import SCHEMA, format_protocol, format_table, write_report
from bilinearize.eval.scores import CandidateSums, Sums, score_windows
from bilinearize.eval.statistics import LEVEL, block_length
from bilinearize.eval.summary import summarise
from bilinearize.model.checkpoint import check_new, load_tokenizer, resolve_checkpoint
from bilinearize.model.device import choose_device
from bilinearize.model.errors import InputError
from bilinearize.model.text import adds_bos, fingerprint

TEACHER = "teacher"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate(
    teacher: str,
    candidates: Mapping[str, str],
    out: Path,
    *,
    text: str,
    text_column: str = "text",
    split: str = "test",
    window: int = 512,
    tokens: int | None = None,
    bos: str = "auto",
    dtype: str = "float32",
    device: str = "auto",
    batch_size: int = 1,
    prompts: int = 3,
    sample_tokens: int = 48,
    bootstrap_samples: int = 2000,
    seed: int = 0,
    revision: str | None = None,
) -> dict:
    """Score the same windows with the teacher and every candidate; write `out`, print the table.

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
    _check_values(candidates, dtype, batch_size, prompts, sample_tokens, bootstrap_samples)
    check_new(out)
    sources = {TEACHER: teacher, **candidates}
    read = dict(text=text, text_column=text_column, split=split)
    read |= dict(window=window, tokens=tokens, bos=bos)
    setup = _prepare(sources, revision, read, dtype, choose_device(device))
    students = {name: setup.models[name] for name in candidates}
    sums = score_windows(
        setup.models[TEACHER], students, setup.windows, setup.vocabulary, batch_size
    )
    samples = sample_texts(
        setup.models[TEACHER],
        students,
        setup.tokenizer,
        setup.windows,
        prompts,
        sample_tokens,
        setup.vocabulary,
    )
    text_bytes = count_bytes(setup.tokenizer, setup.windows)
    records = summarise(*sums, window - 1, text_bytes, bootstrap_samples, seed)
    protocol = {
        **_text_facts(setup, read),
        **_run_facts(setup, dtype, batch_size),
        "interval": _interval_facts(len(setup.windows), bootstrap_samples, seed),
    }
    result = _assemble(protocol, _model_facts(setup, sources), records, sums, samples)
    write_report(out, result)
    print(f"{format_table(result)}\n\n{format_protocol(result)}\nWrote {out}")
    return result


@dataclass
class Setup:
    """All that is read before the pass."""

    folders: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    windows: torch.Tensor
    """int64 (windows, window)."""
    models: dict[str, PreTrainedModel]
    vocabulary: int
    """How many logits are compared."""


def _prepare(
    sources: Mapping[str, str], revision: str | None, read: dict, dtype: str, device: torch.device
) -> Setup:
    folders = {
        name: resolve_checkpoint(source, revision if name == TEACHER else None)
        for name, source in sources.items()
    }
    tokenizer = load_tokenizer(folders[TEACHER])
    windows = read_windows(tokenizer, **read)
    for name, folder in folders.items():
        if name != TEACHER:
            check_tokenizer(name, folder, tokenizer, windows, **read)
    models = {
        name: load_model(name, folder, DTYPES[dtype], device, read["window"])
        for name, folder in folders.items()
    }
    return Setup(folders, tokenizer, windows, models, common_vocabulary(models, tokenizer, windows))


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


def _text_facts(setup: Setup, read: dict) -> dict:
    return {
        **{key: read[key] for key in ("text", "text_column", "split", "window")},
        "windows": len(setup.windows),
        "tokens_scored": len(setup.windows) * (read["window"] - 1),
        "scored": "every token of a window but the first; windows don't overlap",
        "bos": read["bos"],
        "bos_in_every_window": adds_bos(setup.tokenizer, read["bos"]),
        "tokens_sha256": fingerprint(setup.windows),
        "tokenizer_sha256": tokenizer_hash(setup.tokenizer),
    }


def _run_facts(setup: Setup, dtype: str, batch_size: int) -> dict:
    packages = ("bilinearize", "torch", "transformers", "numpy")
    teacher = setup.models[TEACHER]
    return {
        "vocabulary": setup.vocabulary,
        "dtype": dtype,
        "device": str(teacher.device),
        "attention": teacher.config._attn_implementation,
        "batch_size": batch_size,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def _interval_facts(windows: int, samples: int, seed: int) -> dict:
    return {
        "level": LEVEL,
        "method": "circular block bootstrap over windows: Student's t times its standard error",
        "block_windows": block_length(windows),
        "samples": samples,
        "seed": seed,
    }


def _model_facts(setup: Setup, sources: Mapping[str, str]) -> dict[str, dict]:
    return {
        name: {
            "path": str(sources[name]),
            "folder": str(setup.folders[name]),
            "model_type": model.config.model_type,
            "parameters": model.num_parameters(),
        }
        for name, model in setup.models.items()
    }


def _assemble(
    protocol: dict,
    facts: dict[str, dict],
    records: tuple[dict, dict[str, dict]],
    sums: tuple[Sums, dict[str, CandidateSums]],
    samples: list[dict],
) -> dict:
    own, theirs = records
    return {
        "schema": SCHEMA,
        "protocol": protocol,
        TEACHER: {**facts[TEACHER], **own},
        "candidates": {name: {**facts[name], **theirs[name]} for name in theirs},
        "windows": {
            "nll": {TEACHER: sums[0].nll, **{name: each.nll for name, each in sums[1].items()}},
            "kl": {name: each.kl for name, each in sums[1].items()},
        },
        "samples": samples,
    }
