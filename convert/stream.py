"""Stream calibration text through the layers: the teacher's states, and the student's so far.

Layer i is fitted on the inputs that the already converted layers 0 to i-1 give it, towards the
original MLP's output on those inputs. One layer's weights are in memory at a time.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bilinearize.convert.block import term_features
from bilinearize.convert.fit import AffineSums, GateSums, LinearSums
from bilinearize.convert.source import Layer, Source
from bilinearize.convert.trunk import Trunk
from bilinearize.model.modeling_bilinear import BilinearMLP

# One window in HELDOUT is kept from the fit, to choose the ridge and to report the error.
HELDOUT = 4
TOKENS_PER_BATCH = 4096
# The joint gate fit has two unknowns a slot and a whole output vector a token: a few tokens do.
GATE_STRIDE = 4


class States:
    """Hidden states (windows, window, hidden_size) fp32, in memory or in a file past the budget."""

    def __init__(self, shape: tuple[int, ...], budget_bytes: int, folder: Path):
        count = torch.Size(shape).numel()
        if count * 4 <= budget_bytes:
            self.tensor = torch.empty(shape)
        else:
            with tempfile.NamedTemporaryFile(dir=folder, prefix="states-", delete=False) as file:
                name = file.name
            self.tensor = torch.from_file(name, shared=True, size=count).view(shape)
            Path(name).unlink()  # the mapping keeps it until this object goes


class _Capture(nn.Module):
    """Stands in for an MLP: keeps its input and adds nothing to the residual stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input = x
        return torch.zeros_like(x)


@dataclass
class Batch:
    """Windows `rows` at one layer: `residual` is the stream before the MLP adds to it."""

    rows: slice
    heldout: bool
    residual: torch.Tensor
    mlp_input: torch.Tensor


class Stream:
    """Teacher's and student's states over the calibration windows, advanced layer by layer."""

    def __init__(
        self,
        source: Source,
        windows: torch.Tensor,
        device: torch.device,
        state_budget_bytes: int,
        folder: Path,
    ):
        # The held-out windows lie last, so that no batch mixes them with the others.
        heldout = torch.arange(len(windows)) % HELDOUT == HELDOUT - 1
        if len(windows) < HELDOUT:
            heldout[-1] = True
        windows = torch.cat([windows[~heldout], windows[heldout]])
        self.fitted_rows = int((~heldout).sum())
        self.device = device
        self.trunk = Trunk(source, windows, device)
        shape = (*windows.shape, source.config.hidden_size)
        # Three such tensors: teacher, student, and the weight's share is negligible.
        self.teacher = States(shape, state_budget_bytes // 3, folder).tensor
        self.student = States(shape, state_budget_bytes // 3, folder).tensor
        self.inputs = States(shape, state_budget_bytes // 3, folder).tensor
        for rows, _ in self._batches():
            self.teacher[rows] = self.trunk.embed(rows).cpu()
            self.student[rows] = self.teacher[rows]
        self.weight = torch.empty(*windows.shape, 1)

    def _batches(self) -> Iterator[tuple[slice, bool]]:
        size = max(1, TOKENS_PER_BATCH // self.teacher.shape[1])
        for first, last, heldout in (
            (0, self.fitted_rows, False),
            (self.fitted_rows, None, True),
        ):
            last = last if last is not None else len(self.teacher)
            for start in range(first, last, size):
                yield slice(start, min(start + size, last)), heldout

    def _until_mlp(self, layer: Layer, states: torch.Tensor) -> Iterator[Batch]:
        module, capture = layer.module, _Capture()
        original, module.mlp = module.mlp, capture
        try:
            for rows, heldout in self._batches():
                hidden = states[rows].to(self.device)
                residual = module(hidden, **self.trunk.calls[layer.index])
                yield Batch(rows, heldout, residual, capture.input)
        finally:
            module.mlp = original

    def advance_teacher(self, layer: Layer) -> None:
        """Move the teacher's states past `layer` and set the token weights.

        A token weighs 1 / (mean(state^2) + mean(update^2)), state the residual stream after the
        layer, update what the MLP adds: errors count relative to what the layers above will see.
        The second term matters where a layer takes a massive activation back out of the stream.
        Where the MLP's output is normed or scaled on its way into the stream, its errors grow or
        shrink with it: the weight is multiplied by mean(update^2) / mean(output^2).
        """
        mlp = layer.mlp
        for batch in self._until_mlp(layer, self.teacher):
            output = mlp(batch.mlp_input)
            update = layer.join(output)
            states = batch.residual + update
            self.teacher[batch.rows] = states.cpu()
            weight = (_power(states) + _power(update)).clamp_min(1e-12).reciprocal()
            if layer.joins:
                weight *= _power(update) / _power(output).clamp_min(1e-12)
            self.weight[batch.rows] = weight.cpu()

    def fit_gates(self, layer: Layer) -> torch.Tensor:
        """Move the student past the attention; returns each slot's slope and intercept, (2, m)."""
        mlp = layer.mlp
        sums = AffineSums(mlp.gate_proj.out_features, self.device)
        for batch in self._until_mlp(layer, self.student):
            self.student[batch.rows] = batch.residual.cpu()
            self.inputs[batch.rows] = batch.mlp_input.cpu()
            gate, up = mlp.gate_proj(batch.mlp_input), mlp.up_proj(batch.mlp_input)
            weight = self.weight[batch.rows].to(self.device)
            flat = (part.flatten(0, 1) for part in (gate, up, mlp.act_fn(gate) * up, weight))
            sums.add(*flat)
        return sums.solve()

    def join_gates(
        self, mlp: Any, block: BilinearMLP, start: torch.Tensor, terms: int
    ) -> torch.Tensor:
        """All slots' coefficients (terms, m) towards `mlp`, given the down_proj of `block`.

        `start` (terms or fewer, m) is what they are shrunk to.
        """
        down = block.down_proj
        padded = start.new_zeros(terms, start.shape[1])
        padded[: len(start)] = start
        sums = GateSums(down.in_features, terms, down.out_features, self.device)
        for rows, heldout in self._batches():
            if heldout:
                continue
            x = self.inputs[rows, ::GATE_STRIDE].to(self.device).flatten(0, 1)
            weight = self.weight[rows, ::GATE_STRIDE].to(self.device).flatten(0, 1)
            features = term_features(mlp.gate_proj(x), mlp.up_proj(x), terms)
            sums.add(features, mlp(x) - down.bias, weight)
        return sums.solve(down.weight, padded)

    def down_sums(
        self, mlp: Any, block: BilinearMLP, skip: bool = False
    ) -> tuple[LinearSums, LinearSums]:
        """Sums for correcting `block.down_proj` towards `mlp`: of the fitted and held-out tokens.

        With `skip` a linear map of the input is fitted along with it; see `block.corrected`.
        """
        down = block.down_proj
        features = down.in_features + (block.gate_proj.in_features if skip else 0)
        sums = [LinearSums(features, down.out_features, self.device) for _ in range(2)]
        for rows, heldout in self._batches():
            x = self.inputs[rows].to(self.device).flatten(0, 1)
            found, target = block.features(x), mlp(x)
            residual = target - down(found)
            weight = self.weight[rows].to(self.device).flatten(0, 1)
            sums[heldout].add(torch.cat([found, x], 1) if skip else found, residual, target, weight)
        return sums[False], sums[True]

    def pass_student(self, layer: Layer) -> None:
        """Move the student's states past a layer that is left as it is."""
        mlp = layer.mlp
        for batch in self._until_mlp(layer, self.student):
            output = layer.join(mlp(batch.mlp_input))
            self.student[batch.rows] = (batch.residual + output).cpu()

    def advance_student(self, layer: Layer, block: nn.Module) -> None:
        """Add the converted block's output to the student's states, as `layer` adds its own."""
        for rows, _ in self._batches():
            output = block(self.inputs[rows].to(self.device))
            self.student[rows] += layer.join(output).cpu()


def _power(x: torch.Tensor) -> torch.Tensor:
    """Mean square: (..., d) to (..., 1)."""
    return x.square().mean(-1, keepdim=True)
