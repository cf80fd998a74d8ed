"""What an architecture's MLPs look like, found on a skeleton without weights."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from bilinearize.model.errors import InputError

GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe")


def check_shape(model: PreTrainedModel, where: Path) -> bool:
    """Check that every layer's MLP is gated, of the shape that its family is known for.

    Returns:
        Whether the MLPs have biases.

    Raises:
        InputError: naming the first layer that is otherwise and what is in it.
    """
    biases = set()
    for index, layer in enumerate(model.model.layers):
        mlp = layer.mlp
        linears = {name for name, part in mlp.named_children() if isinstance(part, nn.Linear)}
        others = [name for name, _ in mlp.named_children() if name not in linears]
        biases |= {part.bias is not None for part in mlp.modules() if isinstance(part, nn.Linear)}
        if linears not in GATED or set(others) - {"act_fn", "activation_fn"} or len(biases) > 1:
            raise InputError(
                f"{where}: layer {index} has a {type(mlp).__name__} ({describe(mlp)}), which is "
                "not the gated MLP that its model_type stands for; it is not converted."
            )
    return True in biases


def describe_mlp(config: PretrainedConfig) -> str:
    """What the first decoder layer's MLP looks like, for messages."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, ImportError, AttributeError):
        return "no causal language model that transformers builds"
    for name, module in model.named_modules():
        if name.endswith(tuple(f".0.{part}" for part in MLP_NAMES)):
            return describe(module)
    return "no MLP found in its layers"


def describe(mlp: nn.Module) -> str:
    """Its kind and its parts: "no gated MLP: c_fc, c_proj"."""
    parts = [child for child, _ in mlp.named_children()]
    if any("expert" in name for name, _ in mlp.named_modules()):
        kind = "mixture of experts"
    elif any("gate" in part for part in parts) or {"w1", "w2", "w3"} <= set(parts):
        kind = "gated MLP"
    else:
        kind = "no gated MLP"
    return f"{kind}: {', '.join(parts)}"
