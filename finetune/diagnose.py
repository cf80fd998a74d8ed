"""What a run says of itself: gradient norms, memory, and where it went wrong."""

import resource
import sys
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from bilinearize.finetune.groups import groups_of
from bilinearize.finetune.shards import full, local
from bilinearize.finetune.teacher import decoder_layers


@torch.no_grad()
def group_norms(student: PreTrainedModel) -> dict[str, float]:
    """The norm of the gradients of each group of weights that trains."""
    groups = groups_of(student)
    squares: dict[str, torch.Tensor] = {}
    for name, parameter in student.named_parameters():
        if parameter.grad is not None and parameter.requires_grad:
            square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) ** 2
            squares[groups[name]] = squares.get(groups[name], 0) + full(square)
    return {group: square.sqrt().item() for group, square in sorted(squares.items())}


def memory_gib() -> float:
    """The most memory this process has held: of its GPU, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def not_finite(tensors: dict[str, torch.Tensor], accelerator: Any) -> str | None:
    """The first tensor of any process with an entry that is not finite, or None."""
    names = [name for name, tensor in tensors.items() if not local(tensor).isfinite().all()][:1]
    found = gather_object(names) if accelerator.num_processes > 1 else names
    return found[0] if found else None


@torch.no_grad()
def largest_layer(model: nn.Module, pair: Any, inputs: dict[str, Any]) -> tuple[int, float]:
    """The decoder layer of the student with the largest output on a batch, and that norm.

    The norm is that of the largest token's state; a state that is not finite is the largest.

    Args:
        model: the wrapped `pair`, as it trains.
        inputs: what it takes.
    """
    norms: list[float] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        norm = output.float().norm(dim=-1).max().item()
        norms.append(norm if norm == norm else float("inf"))

    layers = decoder_layers(pair.student)
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    norms = norms[-len(layers) :]  # a shared teacher went through the same layers before
    index = max(range(len(norms)), key=norms.__getitem__)
    return index, norms[index]
