"""Llama with symmetric bilinear MLPs: configuration, block and models in one self-contained file.

This file travels with every converted checkpoint, so it depends on torch, transformers and
huggingface_hub alone. With bilinearize installed the same classes are registered and no trust flag
is needed; without it, `AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)`.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

FORMS = ("bilinear", "gated")


@strict
class BilinearLlamaConfig(LlamaConfig):
    """A Llama configuration plus the shape of the MLPs.

    Each `bilinear_*` field holds one value for all layers, or a list with one value per layer.

    Args:
        bilinear_form: `"bilinear"`, `sigma(sum_s (q_s x + b_s)(k_s x + c_s))`, or `"gated"`, the
            source's own `act(q x) * (k x)` with `act = hidden_act`.
        bilinear_rank: number of products summed in one slot's score, at least 1; 1 for `gated`.
        bilinear_activation: sigma, a key of transformers' `ACT2FN`, or `"identity"`. Only with
            `"identity"` is the block a polynomial (of degree 2).
        bilinear_bias: whether `gate_proj`, `up_proj` and `down_proj` have biases.
    """

    model_type = "bilinear_llama"

    bilinear_form: str | list[str] = "bilinear"
    bilinear_rank: int | list[int] = 1
    bilinear_activation: str | list[str] = "identity"
    bilinear_bias: bool | list[bool] = False

    def bilinear_layer(self, layer: int) -> dict:
        """The keyword arguments of `BilinearMLP` for one layer."""
        values = {}
        for name in ("form", "rank", "activation", "bias"):
            value = getattr(self, f"bilinear_{name}")
            values[name] = value[layer] if isinstance(value, list) else value
        if values["form"] == "gated":
            values["activation"] = self.hidden_act
        return values

    def validate_bilinear(self):
        """Part of the `@strict` validation. Raises ValueError that names the field."""
        for name in ("form", "rank", "activation", "bias"):
            value = getattr(self, f"bilinear_{name}")
            if isinstance(value, list) and len(value) != self.num_hidden_layers:
                raise ValueError(
                    f"bilinear_{name} has {len(value)} entries for {self.num_hidden_layers} layers."
                )
        for layer in range(self.num_hidden_layers):
            check_block(**self.bilinear_layer(layer))


def check_block(form: str, rank: int, activation: str, bias: bool) -> None:
    """Raise ValueError for a block that does not exist, naming the field and the remedy."""
    if form not in FORMS:
        raise ValueError(f"bilinear_form is {form!r}; use one of {', '.join(FORMS)}.")
    if rank < 1:
        raise ValueError(f"bilinear_rank is {rank}; use 1 or more.")
    if form == "gated" and rank != 1:
        raise ValueError(f"bilinear_rank is {rank}; a gated layer has rank 1.")
    if activation != "identity" and activation not in ACT2FN:
        raise ValueError(
            f"bilinear_activation is {activation!r}; use identity or one of {', '.join(ACT2FN)}."
        )


class BilinearMLP(nn.Module):
    """One MLP block, `y(x) = down(sigma(score(x)))`, after Breslow (arXiv 2606.22172).

        score_j(x) = sum_s (q_js x + b_js)(k_js x + c_js)        form "bilinear"
        score_j(x) = act(q_j x + b_j)(k_j x + c_j), sigma = id   form "gated" (the source's SwiGLU)

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
        check_block(form, rank, activation, bias)
        self.form = form
        self.rank = rank
        self.act_fn = ACT2FN["linear" if activation == "identity" else activation]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size * rank, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size * rank, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What `down_proj` reads: (..., hidden_size) to (..., intermediate_size)."""
        if self.form == "gated":
            return self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        score = self.gate_proj(x) * self.up_proj(x)
        if self.rank > 1:
            score = score.unflatten(-1, (-1, self.rank)).sum(-1)
        return self.act_fn(score)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.features(x))


class BilinearLlamaPreTrainedModel(LlamaPreTrainedModel):
    config: BilinearLlamaConfig
    config_class = BilinearLlamaConfig


class BilinearLlamaModel(LlamaModel, BilinearLlamaPreTrainedModel):
    """`LlamaModel` whose decoder layers hold a `BilinearMLP` each, as the configuration says."""

    config_class = BilinearLlamaConfig

    def __init__(self, config: BilinearLlamaConfig):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.mlp = BilinearMLP(
                config.hidden_size, config.intermediate_size, **config.bilinear_layer(index)
            )
        self.post_init()


class BilinearLlamaForCausalLM(LlamaForCausalLM, BilinearLlamaPreTrainedModel):
    """`LlamaForCausalLM` over `BilinearLlamaModel`; embeddings may be tied, as in the source."""

    config_class = BilinearLlamaConfig

    def __init__(self, config: BilinearLlamaConfig):
        # LlamaForCausalLM.__init__ would build a stock LlamaModel first.
        LlamaPreTrainedModel.__init__(self, config)
        self.model = BilinearLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
