"""What `bilinearize eval` can be told; flags and YAML are derived from this dataclass."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class EvalConfig:
    """The protocol of one evaluation. Values are checked by `bilinearize.eval.compare.evaluate`."""

    text: str
    """Held-out text: a .txt, .jsonl or .parquet file, or a `datasets` name (`name:config`)."""
    text_column: str = "text"
    """Field that holds the text, for all but .txt."""
    split: str = "test"
    """Split, for a `datasets` name."""
    window: int = 512
    """Tokens per window, BOS included; each window is scored on its own."""
    tokens: int | None = None
    """Evaluate at most this many tokens, in whole windows; null takes all of the text."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether every window starts with BOS; auto does what the tokenizer does."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward passes. Sums are float64 in any case."""
    device: str = "auto"
    """Where the models run, e.g. cpu or cuda:1; auto takes the first GPU, if there is one."""
    batch_size: int = 1
    """Windows per forward pass. Two models' logits of so many windows are held at a time."""
    prompts: int = 3
    """Held-out prompts that every model continues greedily; 0 for none."""
    sample_tokens: int = 48
    """Length of each continuation in tokens."""
    bootstrap_samples: int = 2000
    """Resamples behind each 95 % interval."""
    seed: int = 0
    """Seed of the resampling."""
    revision: str | None = None
    """Revision of the teacher, where that is a hub id."""
