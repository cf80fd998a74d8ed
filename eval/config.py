"""What `bilinearize eval` can be told; flags and YAML are derived from this dataclass."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class EvalConfig:
    """The protocol of one evaluation. Values are checked by `bilinearize.eval.compare.evaluate`."""

    text: dict[str, str] | str | None = None
    """Held-out text: a .txt, .jsonl or .parquet file, or a `datasets` name (`name:config`). Several
    slices by name: --text.web web.jsonl --text.code code.jsonl. A standard protocol has its own."""
    text_column: dict[str, str] | str | None = None
    """Field that holds the text, for all but .txt; one, or one for each slice. By default text."""
    split: dict[str, str] | str | None = None
    """Split, for a `datasets` name; one, or one for each slice. By default test."""
    protocol: Literal["windows", "wikitext-2", "lm-eval"] = "windows"
    """How text is cut and normalised: docs/eval.md."""
    window: int | None = None
    """Tokens per window, BOS included: 512, or 2048 in a standard protocol."""
    stride: int | None = None
    """Tokens from one window to the next; each window scores those not scored before. By default
    windows don't overlap."""
    tokens: int | None = None
    """Evaluate at most this many tokens of each slice; null takes all."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether every window starts with BOS; auto does what the tokenizer does."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward passes. Sums are float64 in any case."""
    device: str = "auto"
    """Where the models run, e.g. cpu or cuda:1; auto takes the first GPU, if there is one."""
    batch_size: int = 1
    """Windows per forward pass. Two models' logits of so many windows are held at a time."""
    prompts: int = 16
    """Held-out prompts that every model continues greedily; 0 for none."""
    sample_tokens: int = 48
    """Length of each continuation in tokens."""
    tasks: list[str] | None = None
    """Tasks of lm-evaluation-harness by name, or YAML files of one's own; needs the extra tasks."""
    task_limit: int | None = None
    """Questions per task, the first ones; null takes all."""
    task_fewshot: int | None = None
    """Solved examples before each question; null does what the task says."""
    bootstrap_samples: int = 2000
    """Resamples behind each 95 % interval."""
    seed: int = 0
    """Seed of the resampling."""
    revision: str | None = None
    """Revision of the teacher, where that is a hub id."""
