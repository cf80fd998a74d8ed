"""What trains: groups of the student's weights, and LoRA on what is not an MLP."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.teacher import norm_names
from bilinearize.model.errors import InputError

TRAINED = {
    "mlp": ("mlp",),
    "mlp+norms": ("mlp", "norms"),
    "lora": ("mlp", "lora"),
    "all": ("mlp", "norms", "rest"),
}
DESCRIBED = {
    "mlp": "the MLPs",
    "mlp+norms": "the MLPs and norms",
    "lora": "the MLPs, and LoRA on the rest",
    "all": "every weight",
}


def groups_of(student: PreTrainedModel) -> dict[str, str]:
    """Each parameter's group by its name: `mlp`, `norms`, `lora`, `rest`, or `source` (rides)."""
    norms = tuple(f"{name}." for name in norm_names(student))
    groups = {}
    for name, _ in student.named_parameters():
        if ".source." in name:
            groups[name] = "source"
        elif ".mlp." in name:
            groups[name] = "mlp"
        elif ".lora_" in name:
            groups[name] = "lora"
        else:
            groups[name] = "norms" if name.startswith(norms or ("\0",)) else "rest"
    return groups


def free(student: PreTrainedModel, train: str) -> None:
    """Let the groups of `train` have gradients, and nothing else."""
    groups = groups_of(student)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(groups[name] in TRAINED[train])


def add_lora(student: PreTrainedModel, rank: int, seed: int) -> Any:
    """Put LoRA factors on every linear layer outside the MLPs and the head, in place.

    Returns:
        peft's tuner, whose `merge_and_unload` ends them.

    Raises:
        InputError: if peft is not installed.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.lora import LoraModel
    except ImportError as error:
        raise InputError("--train lora needs peft; pip install 'bilinearize[lora]'.") from error
    head = student.get_output_embeddings()
    targets = [
        name
        for name, module in student.named_modules()
        if isinstance(module, nn.Linear) and ".mlp." not in name and module is not head
    ]
    torch.manual_seed(seed)
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    return LoraModel(student, settings, "default")


def optimizer_groups(
    student: PreTrainedModel,
    decayed: set[str],
    weight_decay: float,
    learning_rate: float,
    rates: dict[str, float],
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, up to three for each group that trains.

    Args:
        decayed: names of the parameters that weight decay may touch.
        rates: learning rates of groups that have one of their own.

    Returns:
        Groups with "params", "weight_decay", "lr", and "muon": whether these are weights of linear
        layers inside the model (no embedding, head or LoRA factor).
    """
    groups = groups_of(student)
    ends = student.get_input_embeddings(), student.get_output_embeddings()
    outside = {id(module.weight) for module in ends if module is not None}
    made: dict[tuple[str, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.dim() == 2 and id(parameter) not in outside
            kind = groups[name], name in decayed, matrix and groups[name] != "lora"
            made.setdefault(kind, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if decays else 0.0,
            "lr": rates.get(group, learning_rate),
            "muon": matrix,
        }
        for (group, decays, matrix), parameters in sorted(
            made.items(), key=lambda x: (x[0][0], not x[0][1], not x[0][2])
        )
    ]
