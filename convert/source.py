"""The source checkpoint: checked at the door, then read tensor by tensor, one layer at a time."""

import copy
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from bilinearize.model.checkpoint import list_tensors, load_config
from bilinearize.model.errors import InputError
from bilinearize.model.families import CONVERTED_TYPES, FAMILIES, Family

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Buffers that older checkpoints carry and transformers recomputes.
IGNORED = ("rotary_emb.inv_freq",)


def find_family(config: PretrainedConfig, folder: Path) -> Family:
    """The family that converts a source of this config.

    Raises:
        InputError: for a converted model, a mixture of experts, or a type that is not supported.
    """
    kind = config.model_type
    where = folder / "config.json"
    if kind in CONVERTED_TYPES:
        raise InputError(f"{where}: model_type {kind!r} is converted already; name its source.")
    experts = [key for key in EXPERT_KEYS if (getattr(config, key, None) or 0) > 1]
    if experts:
        raise InputError(
            f"{where}: model_type {kind!r} is a mixture of experts ({experts[0]} = "
            f"{getattr(config, experts[0])}), which is not converted; use a dense model."
        )
    if kind not in FAMILIES:
        found = describe_mlp(config)
        raise InputError(
            f"{where}: model_type {kind!r} ({found}) is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[kind]


def describe_mlp(config: PretrainedConfig) -> str:
    """What the first decoder layer's MLP looks like, for messages."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError, AttributeError):
        return "no causal language model that transformers builds"
    for name, module in model.named_modules():
        if name.endswith((".0.mlp", ".0.feed_forward", ".0.ffn")):
            parts = [child for child, _ in module.named_children()]
            gated = any("gate" in part for part in parts) or {"w1", "w2", "w3"} <= set(parts)
            return f"{'gated' if gated else 'no gated'} MLP: {', '.join(parts)}"
    return "no MLP found in its layers"


class Source:
    """A checkpoint folder whose tensors are read on demand.

    Attributes: `folder`, `config`, `family`, `dtype` (of the stored embedding), `tensors` (name to
    file).

    Raises:
        InputError: if the source can't be converted, a file is damaged, or tensors are missing,
            of the wrong shape, or unknown.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = load_config(folder)
        self.family = find_family(self.config, folder)
        self.tensors = list_tensors(folder)
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(
                self.config, dtype=torch.float32, attn_implementation="sdpa"
            )
        self._check_tensors()
        self.dtype = self.read("model.embed_tokens.weight").dtype

    def _check_tensors(self) -> None:
        expected = {name: tensor.shape for name, tensor in self.skeleton.state_dict().items()}
        tied = self.config.tie_word_embeddings
        for name in expected:
            if name not in self.tensors and not (tied and name == "lm_head.weight"):
                raise InputError(f"{self.folder}: tensor {name} is missing from the weights.")
        for name in [name for name in self.tensors if name.endswith(IGNORED)]:
            del self.tensors[name]
        for name, file in self.tensors.items():
            if name not in expected:
                raise InputError(f"{file}: unexpected tensor {name}; its type has no such weight.")
            with safe_open(file, framework="pt") as shard:
                shape = tuple(shard.get_slice(name).get_shape())
            if shape != tuple(expected[name]):
                raise InputError(f"{file}: {name} has shape {shape}, not {tuple(expected[name])}.")
        if tied and "lm_head.weight" in self.tensors:
            if not torch.equal(self.read("lm_head.weight"), self.read("model.embed_tokens.weight")):
                raise InputError(
                    f"{self.tensors['lm_head.weight']}: lm_head.weight differs from the embedding "
                    "that config.json ties it to; set tie_word_embeddings to false."
                )
            # Stored twice, transformers would refuse to tie them again.
            del self.tensors["lm_head.weight"]

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype.

        Raises:
            InputError: if it holds NaN or infinity.
        """
        with safe_open(self.tensors[name], framework="pt") as shard:
            tensor = shard.get_tensor(name)
        if not torch.isfinite(tensor).all():
            raise InputError(f"{self.tensors[name]}: {name} holds NaN or infinity.")
        return tensor

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    def layer_names(self, layer: int) -> list[str]:
        """The names of one decoder layer's tensors."""
        prefix = f"model.layers.{layer}."
        return [name for name in self.tensors if name.startswith(prefix)]

    def other_names(self) -> list[str]:
        """The names of all tensors outside the decoder layers."""
        return [name for name in self.tensors if not name.startswith("model.layers.")]

    def load_layer(self, layer: int, device: torch.device) -> tuple[nn.Module, dict]:
        """One decoder layer as an fp32 module, and its tensors as stored, by full name."""
        stored = {name: self.read(name) for name in self.layer_names(layer)}
        prefix = f"model.layers.{layer}."
        module = copy.deepcopy(self.skeleton.model.layers[layer]).to_empty(device=device)
        module.load_state_dict({n.removeprefix(prefix): t.float() for n, t in stored.items()})
        return module.eval().requires_grad_(False), stored

    def rotary(
        self, windows: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for windows of this length, from the source's own rotary module."""
        module = type(self.skeleton.model.rotary_emb)(config=self.config).to(device)
        positions = torch.arange(windows.shape[1], device=device)[None]
        return module(torch.zeros(1, device=device), positions)

    def mlp_names(self, layer: int, stored: dict) -> list[str]:
        """Those of a layer's stored tensors that belong to its MLP."""
        prefix = f"model.layers.{layer}.mlp."
        return [name for name in stored if name.startswith(prefix)]
