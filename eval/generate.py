"""Greedy continuations of held-out prompts: perplexity alone is known to mislead.

A model is compared with the teacher by what it writes, not only by what it thinks of a text: where
the two first differ, what the teacher makes of the other's text, and how much that repeats itself.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessorList
from transformers.modeling_utils import PreTrainedModel

from bilinearize.eval.inputs import TEACHER, Setup
from bilinearize.eval.processes import gather, team, together
from bilinearize.eval.scores import score_windows
from bilinearize.eval.statistics import bootstrap_intervals
from bilinearize.eval.windows import Window

PROMPT_TOKENS = 32


def choose_prompts(
    windows: Sequence[Window], prompts: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first tokens of windows spread evenly over the text, and how the text goes on.

    A prompt is 32 tokens long, or half the longest window where that is shorter; windows of less
    than twice that are passed over. There are at most as many prompts as windows.

    Returns:
        int64 (prompts, length), and (prompts, tokens), None where a window is too short for it.
    """
    length = max(1, min(PROMPT_TOKENS, max(len(window.ids) for window in windows) // 2))
    long = [window.ids for window in windows if len(window.ids) >= 2 * length]
    rows = np.unique(np.linspace(0, len(long) - 1, min(prompts, len(long))).round())
    chosen = [long[row] for row in rows.astype(int)]
    starts = torch.stack([ids[:length] for ids in chosen])
    if min(len(ids) for ids in chosen) < length + tokens:
        return starts, None
    return starts, torch.stack([ids[length : length + tokens] for ids in chosen])


def continue_greedily(
    model: PreTrainedModel, prompts: torch.Tensor, tokens: int, vocabulary: int
) -> torch.Tensor:
    """The most likely next token, `tokens` times: int64 (prompts, tokens) on the CPU.

    Nothing is taken from the checkpoint's generation settings, such as a repetition penalty, and
    EOS is a token like any other, so that all models are compared over one length.

    Args:
        prompts: int64 (prompts, length), without padding.
        vocabulary: logits to choose from.
    """

    def cut(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, vocabulary:] = -torch.inf
        return scores

    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        ids = model.generate(  # pyright: ignore[reportCallIssue]  (of GenerationMixin)
            prompts.to(model.device),
            attention_mask=torch.ones_like(prompts, device=model.device),
            logits_processor=LogitsProcessorList([cut]),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=tokens),
        )
    finally:
        model.generation_config = kept
    return ids[:, prompts.shape[1] :].cpu()


def common_length(first: torch.Tensor, second: torch.Tensor) -> int:
    """How many tokens two sequences share before they first differ."""
    differs = (first != second).nonzero()
    return int(differs[0]) if len(differs) else len(first)


def compare_texts(setup: Setup, prompts: int, tokens: int, samples: int, seed: int) -> dict:
    """What every model writes after held-out prompts: `generation` and `samples` of `eval.json`.

    Processes share the models, so that each model's prompts are one batch in any case.
    """
    if prompts == 0:
        return {"generation": None, "samples": []}
    windows = [window for part in setup.slices for window in part.windows]
    starts, real = choose_prompts(windows, prompts, tokens)
    names = list(setup.models)
    rank, size = team().process_index, team().num_processes
    bar = tqdm(names[rank::size], desc="generate", unit="model", file=sys.stderr, disable=rank > 0)
    own = {
        name: continue_greedily(setup.models[name], starts, tokens, setup.vocabulary)
        for name in bar
    }
    found = {name: ids for part in gather(own) for name, ids in part.items()}
    written = {name: found[name] for name in names}
    texts = written if real is None else {"text": real, **written}
    losses = {name: teacher_losses(setup, starts, ids) for name, ids in texts.items()}
    generation: dict = {
        "prompts": len(starts),
        "prompt_tokens": starts.shape[1],
        "tokens": tokens,
        "text": None if real is None else _own_numbers(real, losses["text"]),
        TEACHER: _own_numbers(written[TEACHER], losses[TEACHER]),
        "candidates": {},
    }
    for name in setup.students:
        generation["candidates"][name] = {
            **_own_numbers(written[name], losses[name]),
            **_divergence(written[name], written[TEACHER]),
            **_paired(losses[name] - losses[TEACHER], tokens, samples, seed),
        }
    return {"generation": generation, "samples": _samples(setup, starts, written)}


def teacher_losses(setup: Setup, starts: torch.Tensor, written: torch.Tensor) -> np.ndarray:
    """The teacher's loss on each continuation, nats in all: float64 (prompts,)."""
    rows = torch.cat([starts, written], 1)
    windows = [Window(row, written.shape[1]) for row in rows]
    done = together(
        lambda: score_windows(setup.models[TEACHER], {}, windows, setup.vocabulary, name=None)
    )
    return np.array(done.teacher.nll)


def _own_numbers(written: torch.Tensor, losses: np.ndarray) -> dict:
    rows = written.tolist()
    return {
        "teacher_nll": float(losses.sum()) / written.numel(),
        "distinct_1": distinct(rows, 1),
        "distinct_2": distinct(rows, 2),
        "distinct_3": distinct(rows, 3),
        "repetition_4": repetition(rows, 4),
    }


def _divergence(written: torch.Tensor, reference: torch.Tensor) -> dict:
    shared = [common_length(own, other) for own, other in zip(written, reference, strict=True)]
    return {
        "first_divergence_mean": float(np.mean(shared)),
        "first_divergence_median": float(np.median(shared)),
        "identical": float(np.mean([length == written.shape[1] for length in shared])),
    }


def _paired(differences: np.ndarray, tokens: int, samples: int, seed: int) -> dict:
    counts = np.full(len(differences), tokens)
    estimate = bootstrap_intervals(differences[:, None], counts, samples, seed, dependent=False)
    return {
        "teacher_nll_gap": float(estimate.value[0]),
        "teacher_nll_gap_interval": estimate.interval(0),
    }


def distinct(rows: Sequence[Sequence[int]], n: int) -> float | None:
    """Distinct n-grams of all rows over all of them (Li et al. 2016, arXiv 1510.03055)."""
    grams = [gram for row in rows for gram in _grams(row, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(rows: Sequence[Sequence[int]], n: int) -> float | None:
    """Share of a row's n-grams that it had before, mean over rows (seq-rep-n, arXiv 1908.04319)."""
    shares = [1 - len(set(grams)) / len(grams) for row in rows if (grams := _grams(row, n))]
    return sum(shares) / len(shares) if shares else None


def _grams(row: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(row[start:] for start in range(n)), strict=False))


def _samples(setup: Setup, starts: torch.Tensor, written: Mapping[str, torch.Tensor]) -> list[dict]:
    """Each prompt with every model's continuation.

    `tokens_until_divergence` counts the tokens that a candidate shares with the teacher; all of
    them where it never differs.
    """
    decode, reference = setup.tokenizer.decode, written[TEACHER]
    return [
        {
            "prompt": decode(start, skip_special_tokens=True),
            "teacher": decode(reference[row]),
            "candidates": {name: decode(written[name][row]) for name in setup.students},
            "tokens_until_divergence": {
                name: common_length(written[name][row], reference[row]) for name in setup.students
            },
        }
        for row, start in enumerate(starts)
    ]
