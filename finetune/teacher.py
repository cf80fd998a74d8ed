"""The teacher of a run.

`SharedTeacher` is the student with its original modules put back for one pass, for runs that leave
all else as it was; `SeparateTeacher` is a second, frozen model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.riding import Riding, teaching
from bilinearize.model.checkpoint import load_causal_lm

# Fields of a configuration that do not change what the layers outside the MLPs compute.
NOT_SHARED = (
    "architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path "
    "use_cache bos_token_id eos_token_id pad_token_id hidden_act mlp_bias intermediate_size "
    "quantization_config pretraining_tp initializer_range"
).split()


class SharedTeacher(nn.Module):
    """The student's own weights around the original modules that ride along in it, frozen."""

    mode = "shared"

    def __init__(self, student: PreTrainedModel):
        super().__init__()
        modules = list(student.modules())
        self.riders = [module for module in modules if isinstance(module, Riding)]
        self.adapted = [module for module in modules if hasattr(module, "_disable_adapters")]

    @contextmanager
    def runs(self, student: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """Within the block, the model yielded computes what the source does."""
        training = student.training
        try:
            student.eval()
            with teaching(self.riders, self.adapted):
                yield student
        finally:
            student.train(training)


class SeparateTeacher(nn.Module):
    """A second model, frozen."""

    mode = "separate"

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.requires_grad_(False).eval()

    @contextmanager
    def runs(self, student: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """Within the block, the model yielded computes what the source does."""
        yield self.model.eval()


def load_whole(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a model whole in this process, under ZeRO-3 too, where transformers would shard it: its
    modules are yet to be changed."""
    unset_hf_deepspeed_config()
    return load_causal_lm(folder, dtype)


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers, whose `mlp` is what a conversion replaces."""
    base: Any = model.base_model
    return list(base.layers)


def head_of(model: PreTrainedModel) -> nn.Module:
    """The module that makes logits of the last hidden states."""
    return cast(nn.Module, model.get_output_embeddings())


def last_hidden(model: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """(batch, length) to (batch, length, d): what the head reads."""
    outputs = model.base_model(input_ids=input_ids, use_cache=False, **options)
    return outputs.last_hidden_state


def norm_names(model: PreTrainedModel) -> list[str]:
    """The names of the normalisation modules outside the MLPs that have weights of their own."""
    named = model.named_modules()
    own = [(name, m) for name, m in named if "Norm" in type(m).__name__ and ".mlp." not in name]
    return [name for name, m in own if list(m.parameters(recurse=False))]


def first_difference(
    student: PreTrainedModel, teacher: PreTrainedModel, riding: list[str]
) -> str | None:
    """The first weight or configuration field outside the MLPs that differs, or None.

    Args:
        riding: names of modules that may differ, for the teacher's ride along.
    """
    skipped = tuple(f"{name}." for name in riding)
    ours, theirs = (
        {n: tensor for n, tensor in model.state_dict().items() if ".mlp." not in n}
        for model in (student, teacher)
    )
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())[0]
    for name, tensor in ours.items():
        if not name.startswith(skipped or ("\0",)) and not torch.equal(tensor, theirs[name]):
            return name
    return _config_difference(student.config, teacher.config)


def _config_difference(student: PretrainedConfig, teacher: PretrainedConfig) -> str | None:
    ours, theirs = student.to_dict(), teacher.to_dict()
    for name in theirs:
        if name not in NOT_SHARED and ours.get(name) != theirs[name]:
            return f"{name} in config.json"
    return None
