"""Sharded safetensors, written as tensors come; the index comes last."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bilinearize.model.checkpoint import INDEX, SINGLE


class ShardWriter:
    """Buffers tensors up to `max_shard_bytes` and writes one safetensors file for each bufferful.

    Holds at most one shard in memory. Nothing is named as transformers expects until `finish`.
    """

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self.buffer: dict[str, torch.Tensor] = {}
        self.buffered_bytes = 0
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self.parameters = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor over; writes a shard first when this one would not fit any more."""
        if self.buffer and self.buffered_bytes + tensor.nbytes > self.max_shard_bytes:
            self._flush()
        self.buffer[name] = tensor.detach().to("cpu").contiguous()
        self.buffered_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes
        self.parameters += tensor.numel()

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def _flush(self) -> None:
        save_file(self.buffer, self._part(len(self.shards)), metadata={"format": "pt"})
        self.shards.append(list(self.buffer))
        self.buffer, self.buffered_bytes = {}, 0

    def finish(self) -> None:
        """Write what is left and name the shards; the index, if there is one, comes last."""
        self._flush()
        if len(self.shards) == 1:
            self._part(0).rename(self.folder / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self.shards):
            file = f"model-{number + 1:05d}-of-{len(self.shards):05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        metadata = {"total_size": self.total_bytes, "total_parameters": self.parameters}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
