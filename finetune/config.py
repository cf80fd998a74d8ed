"""The settings of `bilinearize finetune`: one field a flag, checked before anything is loaded."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, get_args

from bilinearize.model.errors import InputError

Loss = Literal["logits", "hidden", "lm"]
Train = Literal["mlp", "mlp+norms", "all", "lora"]
HomotopyKind = Literal["none", "blend", "swish-beta"]
Ease = Literal["linear", "cosine", "quadratic"]
Schedule = Literal["cosine", "linear", "constant"]
Target = Literal["state", "mlp"]
Mode = Literal["auto", "separate", "cached"]
OptimizerKind = Literal["adamw", "muon"]
Dtype = Literal["float32", "bfloat16", "float16"]
GROUPS = ("mlp", "norms", "lora", "rest")


class Stage(TypedDict, total=False):
    """What one stage sets otherwise than the run does; `tokens` are its own."""

    loss: Loss
    tokens: int
    train: Train
    rates: dict[str, float]
    optimizer: OptimizerKind
    learning_rate: float
    warmup: float
    schedule: Schedule
    beta2: float
    weight_decay: float
    max_grad_norm: float
    kl_weight: float
    cross_entropy_weight: float
    temperature: float
    hidden_weight: float
    hidden_target: Target
    layer_weights: list[float]
    lora_rank: int
    range_bound: float
    range_weight: float
    homotopy: HomotopyKind
    homotopy_share: float
    homotopy_ease: Ease


@dataclass
class FinetuneConfig:
    """How a converted model is brought back towards its teacher.

    Raises:
        InputError: for a value out of range, naming the flag and the remedy.
    """

    text: dict[str, float] | str
    """Training text: a .txt, .jsonl or .parquet file, or the name of a `datasets` dataset; or a
    mixture of such, each with its weight: `{a.jsonl: 0.7, b.txt: 0.3}`."""
    text_column: str = "text"
    """The field that holds the text, for all but .txt."""
    split: str = "train"
    """The split, for a `datasets` name."""
    window: int = 512
    """Tokens per training window."""
    tokens: int = 100_000
    """Training tokens in all, rounded down to whole steps; a shorter text is passed over again."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether each window (with a document mask, each document) starts with BOS; auto does what the
    tokenizer does."""
    document_mask: bool = False
    """Keep attention within each document, and count no token that begins one."""
    heldout: float = 0.0
    """Share of the documents, chosen by their hash, that is held out of training and watched."""
    heldout_text: str | None = None
    """Watch this text instead: a file or `datasets` name as `text`."""
    heldout_tokens: int = 8192
    """Tokens of held-out text to watch, at most."""
    eval_every: int = 50
    """Steps between two looks at the held-out text."""
    keep_best: bool = True
    """With held-out text: end with the weights that had the least loss on it, not the last ones."""
    stages: list[Stage] = field(default_factory=list)
    """Stages one after the other, each with its own `tokens` and what else it sets otherwise:
    `[{loss: hidden, tokens: 20000}, {loss: logits, tokens: 80000}]`. Empty is one stage."""
    loss: Loss = "logits"
    """`logits`: KL to the teacher, and cross-entropy if it has a weight. `hidden`: every layer to
    the teacher's. `lm`: cross-entropy alone."""
    train: Train = "mlp"
    """What trains: the MLPs; the MLPs and norms; everything; or the MLPs, and LoRA (needs peft) on
    the other linear layers, merged at the end. A shared teacher does for all but everything."""
    rates: dict[str, float] = field(default_factory=dict)
    """Learning rates of groups of weights, where not `learning_rate`: `mlp`, `norms`, `lora`,
    `rest`."""
    lora_rank: int = 8
    """Rank of the LoRA factors; their scale alpha / rank is 2."""
    control: bool = False
    """Finetune the unconverted teacher in the student's place, all else the same (without
    homotopy): what the data alone changes."""
    teacher_mode: Mode = "auto"
    """`auto`: the original modules ride along in the student where it agrees with the teacher
    elsewhere; `separate`: a second model; `cached`: its likeliest tokens at each position, computed
    once before training and kept on disk."""
    teacher_dtype: Dtype = "float32"
    """Of a teacher that is loaded; one that is not float32 is separate."""
    top_k: int = 64
    """How many tokens a cached teacher keeps; all others count together. 8 bytes each on disk."""
    teacher_cache: str | None = None
    """Folder of a cached teacher, for several runs on the same text; else in the work folder."""
    kl_weight: float = 1.0
    """Weight of KL(teacher || student), in nats per token; 0 goes without a teacher."""
    cross_entropy_weight: float = 0.0
    """Weight of the cross-entropy on the text itself, in nats per token."""
    temperature: float = 1.0
    """Softmax temperature of the KL; the KL is multiplied by its square, so gradients keep size."""
    hidden_weight: float = 0.0
    """Weight of the layers' mean error, where the loss is `logits`."""
    hidden_target: Target = "state"
    """What is compared in each layer: the residual stream after it, or the MLP's output; squared,
    over the teacher's stream squared."""
    layer_weights: list[float] = field(default_factory=list)
    """Weight of each layer in that mean; empty weighs all alike."""
    range_bound: float = 0.0
    """Keep the slots' scores, the products that `down_proj` reads, within this; 0 leaves them."""
    range_weight: float = 1.0
    """Weight of the penalty beyond it, the mean over slots of (|score| / bound - 1)^2."""
    homotopy: HomotopyKind = "none"
    """`blend`: from the original MLP (t = 0) to the converted one (t = 1). `swish-beta`: anneals
    the activation of a `gated` conversion, Swish with beta from 1 to 0 (arXiv 2410.08417)."""
    homotopy_share: float = 0.3
    """Share of the stage's steps in which t goes from 0 to 1."""
    homotopy_ease: Ease = "linear"
    """How: linear; cosine, slow at both ends; or quadratic, slowing down towards 1."""
    optimizer: OptimizerKind = "adamw"
    """`muon` is for matrices inside the model, with AdamW for all else; it takes more time a step
    and fewer tokens. One process, DDP or FSDP."""
    learning_rate: float = 5e-4
    """Peak learning rate; Muon's steps have the size of AdamW's."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises from 0."""
    schedule: Schedule = "cosine"
    """The learning rate after the warmup."""
    beta2: float = 0.999
    """AdamW's average of squared gradients; beta1 is 0.9."""
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
    report_to: list[str] = field(default_factory=list)
    """Trackers that transformers' Trainer knows, such as tensorboard, trackio or wandb."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    compile: str = ""
    """Backend of torch.compile for the decoder layers, such as inductor; empty goes without."""
    bf16: bool = False
    """Compute in bfloat16 by autocast; weights and optimizer stay fp32."""
    seed: int = 0
    """Order of the windows."""
    kl_chunk: int = 128
    """Tokens per chunk of the loss; memory for logits is a few times this times the vocabulary."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "accumulation", "save_every", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in ("log_every", "kl_chunk", "lora_rank", "eval_every", "top_k"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "use 1 or more")
        for name in (
            *("kl_weight", "cross_entropy_weight", "hidden_weight", "weight_decay"),
            *("range_bound", "range_weight"),
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "use 0 or more")
        _require(self.max_grad_norm >= 0, "max_grad_norm", self.max_grad_norm, "use 0 or more")
        for name in ("temperature", "learning_rate"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "use more than 0")
        _require(self.window >= 2, "window", self.window, "use 2 or more tokens")
        _require(0 <= self.heldout < 1, "heldout", self.heldout, "use a share from 0 to below 1")
        if self.watches():
            enough = self.heldout_tokens >= self.window
            _require(enough, "heldout_tokens", self.heldout_tokens, "use at least one --window")
        weights = self.text.values() if isinstance(self.text, dict) else [1.0]
        positive = bool(weights) and all(weight > 0 for weight in weights)
        _require(positive, "text", self.text, "give each text a weight above 0")
        _require(0 < self.beta2 < 1, "beta2", self.beta2, "use a value between 0 and 1")
        _require(0 <= self.warmup < 1, "warmup", self.warmup, "use a share from 0 to below 1")
        share = self.homotopy_share
        _require(0 < share <= 1, "homotopy_share", share, "use a share above 0, at most 1")
        for name, kind in (
            ("bos", Literal["auto", "always", "never"]),
            ("loss", Loss),
            ("train", Train),
            ("teacher_mode", Mode),
            ("teacher_dtype", Dtype),
            ("hidden_target", Target),
            ("homotopy", HomotopyKind),
            ("homotopy_ease", Ease),
            ("schedule", Schedule),
            ("optimizer", OptimizerKind),
        ):
            value, allowed = getattr(self, name), get_args(kind)
            _require(value in allowed, name, value, f"use one of {', '.join(allowed)}")
        for name, rate in self.rates.items():
            _require(name in GROUPS, "rates", name, f"name groups among {', '.join(GROUPS)}")
            _require(rate > 0, f"rates.{name}", rate, "use more than 0")
        for weight in self.layer_weights:
            _require(weight >= 0, "layer_weights", weight, "use 0 or more")
        if self.loss == "logits" and not any(self.weights()):
            raise InputError(
                "--kl_weight and --cross_entropy_weight are both 0; give one a weight."
            )
        stages = self.stage_list()
        if self.teacher_mode == "cached":
            if any(stage.weights()[2] for stage in stages):
                raise InputError("--teacher_mode cached has no layers to match; use separate.")
            if len({stage.temperature for stage in stages}) > 1:
                raise InputError("--teacher_mode cached knows one temperature; set it once.")

    def watches(self) -> bool:
        """Whether there is held-out text."""
        return self.heldout > 0 or self.heldout_text is not None

    def weights(self) -> tuple[float, float, float]:
        """What the loss weighs: KL, cross-entropy, and the layers' mean error."""
        if self.loss == "lm":
            return 0.0, 1.0, 0.0
        if self.loss == "hidden":
            return 0.0, 0.0, 1.0
        return self.kl_weight, self.cross_entropy_weight, self.hidden_weight

    def stage_list(self) -> list["FinetuneConfig"]:
        """The settings of each stage; without `stages`, these.

        Raises:
            InputError: if a stage is out of range, lacks tokens or sets what is the whole run's.
        """
        return [self._stage(number, stage) for number, stage in enumerate(self.stages)] or [self]

    def _stage(self, number: int, stage: Stage) -> "FinetuneConfig":
        own: dict[str, Any] = dict(stage)
        for name in own.keys() - Stage.__annotations__.keys():
            raise InputError(
                f"--stages: stage {number} sets {name!r}; a stage sets any of "
                f"{', '.join(Stage.__annotations__)}."
            )
        if "tokens" not in own:
            raise InputError(f"--stages: stage {number} has no tokens; say how many it trains on.")
        try:
            return replace(self, stages=[], **own)
        except InputError as error:
            raise InputError(f"--stages: stage {number}: {error}") from None


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise InputError(f"--{name} is {value!r}; {remedy}.")
