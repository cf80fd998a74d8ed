"""Tensors of a model that FSDP2 or ZeRO-3 has sharded over the processes."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor (all processes have to ask); any other as it is."""
    if hasattr(tensor, "ds_id"):  # a parameter under ZeRO-3
        import deepspeed  # pyright: ignore[reportMissingImports]

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard; a tensor that is not sharded as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor cut as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements)


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with this process's shards in place of sharded tensors."""
    moments = {
        number: {k: local(v) if isinstance(v, torch.Tensor) else v for k, v in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": moments}


def sharded_state(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Undo `local_state`, for an optimizer over the same parameters cut the same way."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {}
    for number, entries in state["state"].items():
        parameter = parameters[number]
        moments[number] = {
            name: _shard_of(parameter, value) if name != "step" else value
            for name, value in entries.items()
        }
    return {**state, "state": moments}


def _shard_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
