"""Rewrite the gated MLPs of a pretrained language model as bilinear blocks and recover the quality.

Importing the package registers the converted model types with transformers' Auto classes, so that
`AutoModelForCausalLM.from_pretrained` loads a converted checkpoint without a trust flag.
"""

from bilinearize.model.errors import InputError
from bilinearize.model.families import register
from bilinearize.model.modeling_bilinear import (
    BilinearLlamaConfig,
    BilinearLlamaForCausalLM,
    BilinearLlamaModel,
    BilinearMLP,
)

__version__ = "0.1.0"
__all__ = [
    "BilinearLlamaConfig",
    "BilinearLlamaForCausalLM",
    "BilinearLlamaModel",
    "BilinearMLP",
    "InputError",
]

register()
