"""Options of `bilinearize convert`, as flags and as the `convert` part of a run's YAML."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class ConvertConfig:
    """How the gated MLPs become bilinear blocks."""

    method: Literal["refit", "layerwise", "affine", "taylor", "gated"] = "refit"
    """refit: affine gates, then down_proj solved in closed form; layerwise: refit, then every
    weight of each block trained by Adam towards its layer's output, no end-to-end gradient; affine:
    the gates' best lines on the calibration text; taylor: the gate's slope at 0, no text needed;
    gated: the source's MLPs as they are."""
    rank: int | list[int] = 1
    """Products summed in each slot's score; a list has one entry for each layer."""
    expand: int = 1
    """Slots for each slot of the source, 1 to 3: a wider bilinear layer."""
    activation: Literal["identity", "relu", "relu2", "silu", "gelu"] = "identity"
    """On each slot's score; with identity alone the block is a polynomial."""
    epochs: int = 3
    """Passes over the calibration tokens that layerwise trains each block for."""
    learning_rate: float = 0.01
    """Of layerwise: Adam's step as a share of each tensor's root mean square."""
    layers: str | None = None
    """Layers to convert, like 0-5,8; the others stay as they are. All by default."""
    text: str | None = None
    """Calibration text: a .txt, .jsonl or .parquet file, or a datasets name (name:config)."""
    text_column: str = "text"
    """Field that holds the text in .jsonl, .parquet and datasets."""
    split: str = "train"
    """Split of a datasets name."""
    tokens: int = 16384
    """Calibration tokens to read at most."""
    window: int = 512
    """Tokens per calibration window."""
    bos: Literal["auto", "always", "never"] = "auto"
    """BOS at the start of each window: auto (as the tokenizer does), always, never."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights: auto keeps the source's; float32, bfloat16, float16."""
    device: str = "auto"
    """Where layers run: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    max_shard_size: str = "5GB"
    """Largest safetensors file to write."""
    state_budget: str = "8GB"
    """Calibration states beyond this size are kept on disk instead of in memory."""
    revision: str | None = None
    """Branch, tag or commit of a hub source."""


@dataclass
class ExportConfig:
    """How a converted checkpoint is written otherwise, the same function."""

    format: Literal["stock", "squares", "canonical"] = "stock"
    """stock: the family's own class (or the nearest with biases in its MLP), no custom code;
    squares: each product as a difference of two squares; canonical: one form for all gauge copies,
    so that two checkpoints can be compared."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights: auto keeps the source's."""
    max_shard_size: str = "5GB"
    """Largest safetensors file to write."""


@dataclass
class ScanConfig:
    """What each layer costs when it alone is converted."""

    text: str
    """Text to fit on, and, after `tokens` of it, to evaluate on."""
    text_column: str = "text"
    """Field that holds the text in .jsonl, .parquet and datasets."""
    split: str = "train"
    """Split of a datasets name."""
    tokens: int = 16384
    """Tokens to fit on."""
    eval_tokens: int = 4096
    """Tokens to measure on, which follow those."""
    window: int = 512
    """Tokens per window."""
    bos: Literal["auto", "always", "never"] = "auto"
    """BOS at the start of each window."""
    rank: int = 1
    """Rank of the blocks."""
    leave: int = 5
    """How many layers the suggestion leaves unconverted."""
    higher_rank: int | None = None
    """Fit each layer at this rank as well, and suggest which ones to give it."""
    budget: float = 0.1
    """Weights that the higher rank may add, as a share of all MLPs' weights."""
    device: str = "auto"
    """Where layers run: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    state_budget: str = "8GB"
    """Calibration states beyond this size are kept on disk instead of in memory."""
    revision: str | None = None
    """Branch, tag or commit of a hub source."""
