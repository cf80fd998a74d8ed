"""The settings of `bilinearize finetune`: one field a flag, checked before anything is loaded."""

from dataclasses import dataclass
from typing import Literal

from bilinearize.model.errors import InputError


@dataclass
class FinetuneConfig:
    """How a converted model is brought back towards its teacher.

    Raises:
        InputError: for a value out of range, naming the flag and the remedy.
    """

    text: str
    """Training text: a .txt, .jsonl or .parquet file, or the name of a `datasets` dataset."""
    text_column: str = "text"
    """The field that holds the text, for all but .txt."""
    split: str = "train"
    """The split, for a `datasets` name."""
    window: int = 512
    """Tokens per training window."""
    tokens: int = 100_000
    """Training tokens in all, rounded down to whole steps; a shorter text is passed over again."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether each window starts with BOS; auto does what the tokenizer does."""
    train: Literal["mlp", "all"] = "mlp"
    """What trains: the MLPs, with the teacher sharing every other weight, or everything."""
    kl_weight: float = 1.0
    """Weight of KL(teacher || student), in nats per token; 0 goes without a teacher."""
    cross_entropy_weight: float = 0.0
    """Weight of the cross-entropy on the text itself, in nats per token."""
    temperature: float = 1.0
    """Softmax temperature of the KL; the KL is multiplied by its square, so gradients keep size."""
    learning_rate: float = 5e-4
    """Peak learning rate of AdamW."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The learning rate after the warmup."""
    weight_decay: float = 0.0
    """Decoupled weight decay; never on biases and norms."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    batch_size: int = 4
    """Windows per process and micro-batch."""
    accumulation: int = 1
    """Micro-batches per step."""
    save_every: int = 50
    """Steps between two checkpoints to resume from."""
    keep_checkpoints: int = 1
    """How many of the newest checkpoints stay on disk while training."""
    log_every: int = 5
    """Steps between two log entries."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    bf16: bool = False
    """Compute in bfloat16 by autocast; weights and optimizer stay fp32."""
    seed: int = 0
    """Order of the windows."""
    kl_chunk: int = 128
    """Tokens per chunk of the loss; memory for logits is a few times this times the vocabulary."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "accumulation", "save_every", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in ("log_every", "kl_chunk"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in ("kl_weight", "cross_entropy_weight", "weight_decay", "max_grad_norm"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "use 0 or more")
        for name in ("temperature", "learning_rate"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "use more than 0")
        _require(self.window >= 2, "window", self.window, "use 2 or more tokens")
        _require(0 <= self.warmup < 1, "warmup", self.warmup, "use a share from 0 to below 1")
        for name, allowed in (
            ("bos", ("auto", "always", "never")),
            ("train", ("mlp", "all")),
            ("schedule", ("cosine", "linear", "constant")),
        ):
            value = getattr(self, name)
            _require(value in allowed, name, value, f"use one of {', '.join(allowed)}")
        if self.kl_weight == 0 and self.cross_entropy_weight == 0:
            raise InputError(
                "--kl_weight and --cross_entropy_weight are both 0; give one a weight."
            )


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise InputError(f"--{name} is {value!r}; {remedy}.")
