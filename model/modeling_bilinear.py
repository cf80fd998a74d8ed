"""Causal language models with symmetric bilinear MLPs: one self-contained file for all families.

This file travels with every converted checkpoint, so it depends on torch, transformers and
huggingface_hub alone. With bilinearize installed the same classes are registered and no trust flag
is needed; without it, `AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)`.

`ROWS` lists the families. For the row of, say, `LlamaForCausalLM` this module has the classes
`BilinearLlamaConfig`, `BilinearLlamaModel` and `BilinearLlamaForCausalLM`, made when first asked
for; the `model_type` is that of the source with `bilinear_` before it.
"""

import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.activations import ACT2FN

FORMS = ("bilinear", "gated", "squares")
# How the block's matrices are cut for tensor parallelism: a slot's factors are never separated.
TP_PLAN = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


@dataclass(frozen=True)
class Row:
    """What a family differs in. Its decoder layers lie in `model.layers`, their MLP in `mlp`."""

    source_type: str
    """`model_type` of the source."""
    prefix: str
    """What the names of its classes in transformers start with."""
    folder: str = ""
    """Its folder in `transformers.models`, where that is not `source_type`."""
    infix: str = ""
    """What the names of its configuration and trunk have after the prefix."""
    activation: str = "hidden_act"
    """The configuration field that names the gate's activation."""
    joins: tuple[str, ...] = ()
    """Attributes of the decoder layer, modules or factors, that the MLP's output passes on its way
    into the residual stream, each of which maps 0 to 0. (That attention and MLP may read the same
    input, as in Cohere, makes no difference here.)"""

    def source_class(self, kind: str) -> Any:
        """A class of transformers: `kind` is "Config", "Model" or "ForCausalLM"."""
        folder = self.folder or self.source_type
        file = "configuration" if kind == "Config" else "modeling"
        module = import_module(f"transformers.models.{folder}.{file}_{folder}")
        return getattr(module, self.class_name(kind).removeprefix("Bilinear"))

    def class_name(self, kind: str) -> str:
        """The name of one of this family's three classes in this module."""
        return f"Bilinear{self.prefix}{'' if kind == 'ForCausalLM' else self.infix}{kind}"


GELU, NORMED = "hidden_activation", ("post_feedforward_layernorm",)
ROWS = (
    Row("llama", "Llama"),
    Row("mistral", "Mistral"),
    Row("ministral", "Ministral"),
    Row("qwen2", "Qwen2"),
    Row("qwen3", "Qwen3"),
    Row("smollm3", "SmolLM3"),
    Row("olmo", "Olmo"),
    Row("olmo2", "Olmo2", joins=NORMED),
    Row("olmo3", "Olmo3", joins=NORMED),
    Row("exaone4", "Exaone4", joins=NORMED),
    Row("granite", "Granite", joins=("residual_multiplier",)),
    Row("hyperclovax", "HyperCLOVAX", joins=("post_norm2", "residual_multiplier")),
    Row("stablelm", "StableLm"),
    Row("cohere", "Cohere"),
    Row("cohere2", "Cohere2"),
    Row("helium", "Helium"),
    Row("ernie4_5", "Ernie4_5"),
    Row("hunyuan_v1_dense", "HunYuanDenseV1"),
    Row("seed_oss", "SeedOss"),
    Row("gemma", "Gemma"),
    Row("gemma2", "Gemma2", activation=GELU, joins=NORMED),
    Row("gemma3_text", "Gemma3", "gemma3", infix="Text", activation=GELU, joins=NORMED),
    Row("vaultgemma", "VaultGemma", activation=GELU),
    Row("phi3", "Phi3"),
    Row("glm", "Glm"),
    Row("glm4", "Glm4", joins=("post_mlp_layernorm",)),
)


@dataclass(init=False, repr=False, eq=False)
class BilinearConfig:
    """The shape of the MLPs, which each family's configuration has besides the source's fields.

    Each `bilinear_*` field holds one value for all layers, or a list with one value per layer.

    Args:
        bilinear_form: `"bilinear"`, `sigma(sum_s (q_s x + b_s)(k_s x + c_s))`, or `"gated"`, the
            source's own `act(q x) * (k x)`, or `"squares"`, `(k x + c)^2`, the sign of each square
            in its value.
        bilinear_rank: number of products summed in one slot's score, at least 1; 1 for `gated` and
            `squares`.
        bilinear_activation: sigma, a key of transformers' `ACT2FN`, or `"identity"`. Only with
            `"identity"` is the block a polynomial (of degree 2).
        bilinear_bias: whether `gate_proj`, `up_proj` and `down_proj` have biases.
        bilinear_intermediate_size: number of slots; None is the source's `intermediate_size`.
    """

    bilinear_form: str | list[str] = "bilinear"
    bilinear_rank: int | list[int] = 1
    bilinear_activation: str | list[str] = "identity"
    bilinear_bias: bool | list[bool] = False
    bilinear_intermediate_size: int | list[int] | None = None

    def bilinear_layer(self, layer: int) -> dict[str, Any]:
        """The keyword arguments of `BilinearMLP` for one layer."""
        own: Any = self
        values = {"hidden_size": own.hidden_size}
        for name in ("intermediate_size", "form", "rank", "activation", "bias"):
            value = getattr(self, f"bilinear_{name}")
            values[name] = value[layer] if isinstance(value, list) else value
        if values["intermediate_size"] is None:
            values["intermediate_size"] = own.intermediate_size
        if values["form"] == "gated":
            values["activation"] = getattr(self, own.bilinear_source_activation)
        return values

    def validate_bilinear(self):
        """Part of the `@strict` validation. Raises ValueError that names the field."""
        layers = getattr(self, "num_hidden_layers")  # noqa: B009
        for name in ("form", "rank", "activation", "bias", "intermediate_size"):
            value = getattr(self, f"bilinear_{name}")
            if isinstance(value, list) and len(value) != layers:
                raise ValueError(f"bilinear_{name} has {len(value)} entries for {layers} layers.")
        for layer in range(layers):
            check_block(**self.bilinear_layer(layer))


def check_block(
    hidden_size: int, intermediate_size: int, form: str, rank: int, activation: str, bias: bool
) -> None:
    """Raise ValueError for a block that does not exist, naming the field and the remedy."""
    if form not in FORMS:
        raise ValueError(f"bilinear_form is {form!r}; use one of {', '.join(FORMS)}.")
    if rank < 1:
        raise ValueError(f"bilinear_rank is {rank}; use 1 or more.")
    if form != "bilinear" and rank != 1:
        raise ValueError(f"bilinear_rank is {rank}; a {form} layer has rank 1.")
    if form == "squares" and activation != "identity":
        raise ValueError(f"bilinear_activation is {activation!r}; squares have the identity.")
    if activation != "identity" and activation not in ACT2FN:
        raise ValueError(
            f"bilinear_activation is {activation!r}; use identity or one of {', '.join(ACT2FN)}."
        )
    if intermediate_size < 1:
        raise ValueError(f"bilinear_intermediate_size is {intermediate_size}; use 1 or more.")


class BilinearMLP(nn.Module):
    """One MLP block, `y(x) = down(sigma(score(x)))`, after Breslow (arXiv 2606.22172).

        score_j(x) = sum_s (q_js x + b_js)(k_js x + c_js)        form "bilinear"
        score_j(x) = act(q_j x + b_j)(k_j x + c_j), sigma = id   form "gated" (the source's own)
        score_j(x) = (k_j x + c_j)^2, sigma = id                 form "squares" (no gate_proj)

    The weights keep the names of the gated MLP: `gate_proj` holds q, `up_proj` k (rank factors of
    one slot adjacent: row `j * rank + s`), `down_proj` the slots' values. At rank 1 with the
    identity this is a stock Llama MLP with `hidden_act: "linear"`, and the bilinear layer of Pearce
    et al. (arXiv 2410.08417).

    Shapes: `gate_proj`, `up_proj` (intermediate_size * rank, hidden_size), `down_proj`
    (hidden_size, intermediate_size); `forward` maps (..., hidden_size) to (..., hidden_size).

    Raises:
        ValueError: if form, rank and activation do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        form: str = "bilinear",
        rank: int = 1,
        activation: str = "identity",
        bias: bool = False,
    ):
        super().__init__()
        check_block(hidden_size, intermediate_size, form, rank, activation, bias)
        self.form = form
        self.rank = rank
        self.activation = activation
        self.act_fn = ACT2FN["linear" if activation == "identity" else activation]
        if form != "squares":
            self.gate_proj = nn.Linear(hidden_size, intermediate_size * rank, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size * rank, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Each slot's score, before sigma: (..., hidden_size) to (..., intermediate_size)."""
        if self.form == "gated":
            return self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.form == "squares":
            return self.up_proj(x).square()
        score = self.gate_proj(x) * self.up_proj(x)
        return score.unflatten(-1, (-1, self.rank)).sum(-1) if self.rank > 1 else score

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What `down_proj` reads: (..., hidden_size) to (..., intermediate_size)."""
        return self.scores(x) if self.form == "gated" else self.act_fn(self.scores(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.features(x))


def _config_class(row: Row) -> Any:
    source = row.source_class("Config")
    plan = source.base_model_tp_plan or {}
    plan = {name: cut for name, cut in plan.items() if ".mlp." not in name}
    body = {
        "__doc__": f"`{source.__name__}` plus the fields of `BilinearConfig`.",
        "__module__": __name__,
        "model_type": f"bilinear_{row.source_type}",
        "base_model_tp_plan": plan | TP_PLAN,
        "bilinear_source_activation": row.activation,
    }
    return strict(type(row.class_name("Config"), (BilinearConfig, source), body))


def _model_class(row: Row, config_class: Any) -> Any:
    source = row.source_class("Model")

    def __init__(self, config):
        source.__init__(self, config)
        for index, layer in enumerate(self.layers):
            layer.mlp = BilinearMLP(**config.bilinear_layer(index))
        self.post_init()

    doc = f"`{source.__name__}` whose decoder layers hold a `BilinearMLP` each."
    return _subclass(row.class_name("Model"), source, config_class, __init__, doc)


def _causal_lm_class(row: Row, config_class: Any, model_class: Any) -> Any:
    source = row.source_class("ForCausalLM")

    def __init__(self, config):
        # The source's own __init__ builds a stock trunk, here one without layers, to be replaced.
        hollow = copy.copy(config)
        hollow.num_hidden_layers = 0
        source.__init__(self, hollow)
        self.config = config
        self.model = model_class(config)
        self.post_init()

    doc = f"`{source.__name__}` over `{model_class.__name__}`."
    return _subclass(row.class_name("ForCausalLM"), source, config_class, __init__, doc)


def _subclass(name: str, source: Any, config_class: Any, init: Any, doc: str) -> Any:
    init.__qualname__ = f"{name}.__init__"
    body = {"__doc__": doc, "__module__": __name__, "__init__": init, "config_class": config_class}
    return type(name, (source,), body)


def __getattr__(name: str) -> Any:
    """Make the three classes of a family when one of them is first asked for."""
    for row in ROWS:
        if name in [row.class_name(kind) for kind in ("Config", "Model", "ForCausalLM")]:
            config = _config_class(row)
            model = _model_class(row, config)
            for made in (config, model, _causal_lm_class(row, config, model)):
                globals()[made.__name__] = made
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
