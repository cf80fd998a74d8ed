"""Evaluate converted models against their teacher on the same tokens, and write the report."""

import hashlib
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
    load_model,
    tokenizer_hash,
)
from bilinearize.eval.processes import gather, own_share, team, together
from bilinearize.eval.report import SCHEMA, format_protocol, format_table, write_report
from bilinearize.eval.scores import Pass, score_windows
from bilinearize.eval.statistics import LEVEL, block_length
from bilinearize.eval.summary import KL_EDGES, summarise
from bilinearize.eval.windows import Reading, Slice, plan_reading, read_slices
from bilinearize.model.checkpoint import (
    check_new,
    load_tokenizer,
    resolve_checkpoint,
    weights_sha256,
)
from bilinearize.model.device import choose_device
from bilinearize.model.errors import InputError
from bilinearize.model.text import adds_bos

TEACHER = "teacher"
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
    prompts: int = 3,
    sample_tokens: int = 48,
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
    sources = {TEACHER: teacher, **candidates}
    setup = together(lambda: _prepare(sources, revision, reading, dtype, choose_device(device)))
    passes = [_score(setup, part, batch_size) for part in setup.slices]
    samples = sample_texts(
        setup.models[TEACHER],
        setup.students,
        setup.tokenizer,
        [window for part in setup.slices for window in part.windows],
        prompts,
        sample_tokens,
        setup.vocabulary,
    )
    whole, each = summarise(setup.slices, passes, bootstrap_samples, seed)
    facts = {
        **_text_facts(setup, reading),
        **_run_facts(setup, dtype, batch_size),
        "interval": _interval_facts(setup, bootstrap_samples, seed),
    }
    result = _assemble(facts, setup, sources, whole, each, passes, samples)
    if state.is_main_process:
        write_report(out, result)
        print(f"{format_table(result)}\n\n{format_protocol(result)}\nWrote {out}")
    state.wait_for_everyone()
    return result


@dataclass
class Setup:
    """All that is read before the pass."""

    folders: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    slices: list[Slice]
    models: dict[str, PreTrainedModel]
    vocabulary: int
    """How many logits are compared."""

    @property
    def students(self) -> dict[str, PreTrainedModel]:
        """The candidates."""
        return {name: model for name, model in self.models.items() if name != TEACHER}


def _prepare(
    sources: Mapping[str, str],
    revision: str | None,
    reading: Reading,
    dtype: str,
    device: torch.device,
) -> Setup:
    folders = {
        name: resolve_checkpoint(source, revision if name == TEACHER else None)
        for name, source in sources.items()
    }
    tokenizer = load_tokenizer(folders[TEACHER])
    slices = read_slices(tokenizer, reading)
    for name, folder in folders.items():
        if name != TEACHER:
            check_tokenizer(name, folder, tokenizer, slices, reading)
    models = {
        name: load_model(name, folder, DTYPES[dtype], device, reading.window)
        for name, folder in folders.items()
    }
    return Setup(folders, tokenizer, slices, models, common_vocabulary(models, tokenizer, slices))


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


def _text_facts(setup: Setup, reading: Reading) -> dict:
    digest = hashlib.sha256()
    for part in setup.slices:
        digest.update(bytes.fromhex(part.facts["tokens_sha256"]))
    free = reading.protocol.name == "windows"
    return {
        "name": reading.protocol.name,
        "window": reading.window,
        "stride": reading.stride,
        "scored": reading.protocol.scored,
        "windows": sum(len(part.windows) for part in setup.slices),
        "tokens_scored": sum(part.tokens for part in setup.slices),
        "bos": reading.bos if free else "protocol",
        "bos_in_every_window": free and adds_bos(setup.tokenizer, reading.bos),
        "slices": {part.name: part.facts for part in setup.slices},
        "tokens_sha256": digest.hexdigest(),
        "tokenizer_sha256": tokenizer_hash(setup.tokenizer),
    }


def _run_facts(setup: Setup, dtype: str, batch_size: int) -> dict:
    packages = ("bilinearize", "torch", "transformers", "numpy")
    teacher = setup.models[TEACHER]
    return {
        "vocabulary": setup.vocabulary,
        "dtype": dtype,
        "device": teacher.device.type,
        "attention": teacher.config._attn_implementation,
        "batch_size": batch_size,
        "processes": team().num_processes,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def _interval_facts(setup: Setup, samples: int, seed: int) -> dict:
    by_document = setup.slices[0].windows[0].document is not None
    how = (
        "bootstrap over documents"
        if by_document
        else "circular block bootstrap over windows, recoloured for what blocks miss"
    )
    lengths = {
        part.name: 1 if by_document else block_length(len(part.windows)) for part in setup.slices
    }
    return {
        "level": LEVEL,
        "method": f"{how}: Student's t times its standard error",
        "unit": "document" if by_document else "window",
        "block_windows": lengths,
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
            "weights_sha256": weights_sha256(setup.folders[name]),
        }
        for name, model in setup.models.items()
    }


def _assemble(
    protocol: dict,
    setup: Setup,
    sources: Mapping[str, str],
    whole: dict,
    each: list[dict],
    passes: list[Pass],
    samples: list[dict],
) -> dict:
    facts, students = _model_facts(setup, sources), setup.students
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
        "samples": samples,
    }
