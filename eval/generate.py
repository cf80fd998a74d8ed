"""Greedy continuations of held-out prompts: perplexity alone is known to mislead."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.eval.windows import Window

PROMPT_TOKENS = 32


def choose_prompts(windows: Sequence[Window], prompts: int) -> torch.Tensor:
    """The first tokens of windows spread evenly over the text: int64 (prompts, length).

    A prompt is 32 tokens long, or half the longest window where that is shorter; windows of less
    than twice that are passed over. There are at most as many prompts as windows.
    """
    length = max(1, min(PROMPT_TOKENS, max(len(window.ids) for window in windows) // 2))
    long = [window.ids[:length] for window in windows if len(window.ids) >= 2 * length]
    rows = np.unique(np.linspace(0, len(long) - 1, min(prompts, len(long))).round())
    return torch.stack([long[row] for row in rows.astype(int)])


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


def sample_texts(
    teacher: PreTrainedModel,
    candidates: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    windows: Sequence[Window],
    prompts: int,
    tokens: int,
    vocabulary: int,
) -> list[dict]:
    """Each prompt with every model's continuation, as it stands in `eval.json`.

    `tokens_until_divergence` counts the tokens that a candidate shares with the teacher; all
    `tokens` of them where it never differs.
    """
    if prompts == 0:
        return []
    starts = choose_prompts(windows, prompts)
    reference = continue_greedily(teacher, starts, tokens, vocabulary)
    written = {
        name: continue_greedily(model, starts, tokens, vocabulary)
        for name, model in candidates.items()
    }
    return [
        {
            "prompt": tokenizer.decode(start, skip_special_tokens=True),
            "teacher": tokenizer.decode(reference[row]),
            "candidates": {name: tokenizer.decode(ids[row]) for name, ids in written.items()},
            "tokens_until_divergence": {
                name: common_length(ids[row], reference[row]) for name, ids in written.items()
            },
        }
        for row, start in enumerate(starts)
    ]
