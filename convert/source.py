"""The source checkpoint: checked at the door, then read tensor by tensor, one layer at a time."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from bilinearize.convert.shape import check_shape, describe_mlp
from bilinearize.model.checkpoint import list_tensors, load_config
from bilinearize.model.errors import InputError
from bilinearize.model.families import CONVERTED_TYPES, FAMILIES, Family
from bilinearize.model.modeling_bilinear import BilinearMLP

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Buffers that older checkpoints carry and transformers recomputes.
IGNORED = ("rotary_emb.inv_freq",)
EMBEDDING = "model.embed_tokens.weight"


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
        raise InputError(
            f"{where}: model_type {kind!r} ({describe_mlp(config)}) is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[kind]


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: a whole stored tensor, or the first or second half of its rows."""

    file: Path
    name: str
    half: int | None = None


@dataclass
class Layer:
    """One decoder layer in fp32, its MLP held as a gated `BilinearMLP`."""

    index: int
    module: nn.Module
    joins: tuple[str, ...]
    """See `Row.joins`."""

    @property
    def mlp(self) -> BilinearMLP:
        return cast(BilinearMLP, self.module.mlp)

    def join(self, output: torch.Tensor) -> torch.Tensor:
        """What the layer adds to the residual stream for this output of its MLP."""
        for name in self.joins:
            part = getattr(self.module, name)
            output = part(output) if isinstance(part, nn.Module) else output * part
        return output


class Source:
    """A checkpoint folder whose tensors are read on demand.

    Tensors go by the names they have in the converted model: a fused `gate_up_proj` is read as
    `gate_proj` and `up_proj`.

    Attributes: `folder`, `config`, `family`, `dtype` (of the stored embedding), `skeleton` (the
    family's own class with gated MLPs, on the meta device), `biased` (whether its MLPs have
    biases), `tensors` (name to `Place`).

    Raises:
        InputError: if the source can't be converted, a file is damaged, or tensors are missing,
            of the wrong shape, or unknown.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = load_config(folder)
        self.family = find_family(self.config, folder)
        files = list_tensors(folder)
        with torch.device("meta"):
            original = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        self.biased = check_shape(original, folder / "config.json")
        self._check_tensors(files, original)
        self.tensors = _places(files)
        with torch.device("meta"):
            self.skeleton = self.family.causal_lm._from_config(
                self.converted_config(bilinear_form="gated", bilinear_bias=self.biased),
                dtype=torch.float32,
            )
        self._check_tied()
        self.dtype = self.read(EMBEDDING).dtype

    def converted_config(self, **fields) -> PretrainedConfig:
        """The source's configuration as one of the converted family, with these fields besides."""
        values = self.config.to_dict()
        for key in (
            "model_type",
            "architectures",
            "_name_or_path",
            "transformers_version",
            "dtype",
        ):
            values.pop(key, None)
        return self.family.config(**values, **fields)

    def _check_tensors(self, files: dict[str, Path], original: PreTrainedModel) -> None:
        expected = {name: tuple(tensor.shape) for name, tensor in original.state_dict().items()}
        tied = self.config.tie_word_embeddings
        for name in expected:
            if name not in files and not (tied and name == "lm_head.weight"):
                raise InputError(f"{self.folder}: tensor {name} is missing from the weights.")
        for name in [name for name in files if name.endswith(IGNORED)]:
            del files[name]
        for name, file in files.items():
            if name not in expected:
                raise InputError(f"{file}: unexpected tensor {name}; its type has no such weight.")
            with safe_open(file, framework="pt") as shard:
                shape = tuple(shard.get_slice(name).get_shape())
            if shape != expected[name]:
                raise InputError(f"{file}: {name} has shape {shape}, not {expected[name]}.")

    def _check_tied(self) -> None:
        if self.config.tie_word_embeddings and "lm_head.weight" in self.tensors:
            if not torch.equal(self.read("lm_head.weight"), self.read(EMBEDDING)):
                raise InputError(
                    f"{self.tensors['lm_head.weight'].file}: lm_head.weight differs from the "
                    "embedding that config.json ties it to; set tie_word_embeddings to false."
                )
            # Stored twice, transformers would refuse to tie them again.
            del self.tensors["lm_head.weight"]

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype.

        Raises:
            InputError: if it holds NaN or infinity.
        """
        place = self.tensors[name]
        with safe_open(place.file, framework="pt") as shard:
            if place.half is None:
                tensor = shard.get_tensor(place.name)
            else:
                rows = shard.get_slice(place.name)
                count = rows.get_shape()[0] // 2
                tensor = rows[place.half * count : (place.half + 1) * count]
        if not torch.isfinite(tensor).all():
            raise InputError(f"{place.file}: {place.name} holds NaN or infinity.")
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

    def load_layer(self, layer: int, device: torch.device) -> tuple[Layer, dict]:
        """One decoder layer, and its tensors as stored, by full name."""
        stored = {name: self.read(name) for name in self.layer_names(layer)}
        prefix = f"model.layers.{layer}."
        module = copy.deepcopy(self.skeleton.model.layers[layer]).to_empty(device=device)
        module.load_state_dict({n.removeprefix(prefix): t.float() for n, t in stored.items()})
        module.eval().requires_grad_(False)
        return Layer(layer, module, self.family.row.joins), stored

    def mlp_names(self, layer: int, stored: dict) -> list[str]:
        """Those of a layer's stored tensors that belong to its MLP."""
        prefix = f"model.layers.{layer}.mlp."
        return [name for name in stored if name.startswith(prefix)]


def _places(files: dict[str, Path]) -> dict[str, Place]:
    """Each tensor of the gated model and where it lies."""
    places = {}
    for name, file in files.items():
        if ".mlp.gate_up_proj." in name:
            for half, part in enumerate(("gate_proj", "up_proj")):
                places[name.replace("gate_up_proj", part)] = Place(file, name, half)
        else:
            places[name] = Place(file, name)
    return places
