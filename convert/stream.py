"""Stream calibration text through the layers: the teacher's states, and the student's so far.

Layer i is fitted on the inputs that the already converted layers 0 to i-1 give it, towards the
original MLP's output on those inputs and, in part, towards the teacher's state after the layer.
One layer's weights are in memory at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bilinearize.convert.fit import AffineSums, GateSums, LinearSums
from bilinearize.convert.source import Layer, Source
from bilinearize.convert.states import States, heldout_windows, sample_mask
from bilinearize.convert.trunk import Trunk
from bilinearize.model.modeling_bilinear import BilinearMLP

TOKENS_PER_BATCH = 2048
# Fitted tokens, for each slot, that the gates read (the joint fit has a whole output vector a token
# for two unknowns a slot), and a round whose down_proj only serves the next round's gates.
SAMPLE = 4
# Share of the student's drift from the teacher's states that a layer is asked to make up for, and
# how many times apart two states may be in size to be compared so.
DRIFT, ALIKE = 0.4, 3.0
# Residual stream, in multiples of its median norm, beyond which an activation counts as massive.
MASSIVE = 20.0
# The same, beyond which a token counts as an attention sink: all others attend to it, so its error
# weighs more than its own share.
SINK, SINK_WEIGHT = 8.0, 10.0


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
        heldout = heldout_windows(windows)
        windows = torch.cat([windows[~heldout], windows[heldout]])
        self.fitted_rows = int((~heldout).sum())
        self.device = device
        self.trunk = Trunk(source, windows, device)
        shape = (*windows.shape, source.config.hidden_size)
        # Four such tensors; the weight's share is negligible.
        budget = state_budget_bytes // 4
        self.teacher = States(shape, budget, folder).tensor
        self.student = States(shape, budget, folder).tensor
        self.inputs = States(shape, budget, folder).tensor
        self.targets = States(shape, budget, folder).tensor
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
        Massive activations count as `MASSIVE` times the median state (see `shrink`). Where the
        MLP's output is normed or scaled on its way into the stream, its errors grow or shrink with
        it: the weight is multiplied by mean(update^2) / mean(output^2).
        """
        mlp = layer.mlp
        parts = []
        for batch in self._until_mlp(layer, self.teacher):
            output = mlp(batch.mlp_input)
            update = layer.join(output)
            states = batch.residual + update
            self.teacher[batch.rows] = states.cpu()
            parts.append([_power(part).cpu() for part in (batch.residual, states, update, output)])
        self.before, state, update, output = (torch.cat(each) for each in zip(*parts, strict=True))
        if layer.joins:
            weight = (state + update).clamp_min(1e-12).reciprocal()
            self.weight = weight * update / output.clamp_min(1e-12)
            return
        middle = state.median().item()
        self.limit, self.massive = MASSIVE**2 * middle, state > SINK**2 * middle
        power = state.clamp_max(self.limit) + update.clamp_max(self.limit)
        self.weight = power.clamp_min(1e-12).reciprocal()

    def shrink(self, batch: "Batch", target: torch.Tensor) -> torch.Tensor:
        """Factors (rows, window, 1), at most 1, for the targets of tokens with massive activations.

        What reads the stream norms it first, so of a massive activation the direction matters, and
        its size only in that it outweighs the rest. As it stands it would take over the fit of all
        other tokens: a target is cut so that the state after it is `MASSIVE` times the teacher's
        median. Where the student's state is so much the smaller, what changes it is, too.
        """
        before, own = self.before[batch.rows].to(target.device), _power(batch.residual)
        ratio = (own / before.clamp_min(1e-12)).sqrt()
        factor = torch.where(ratio < 0.5, ratio, 1.0)
        after = _power(batch.residual + factor * target)
        return factor * (self.limit / after.clamp_min(1e-12)).sqrt().clamp_max(1)

    def undo_drift(self, batch: Batch, target: torch.Tensor) -> torch.Tensor:
        """The target, moved `DRIFT` of the way to what brings the teacher's state after the layer.

        What the blocks below did wrong shows in part in this MLP's input, and can be made up for.
        The rest is noise to the fit, hence no more than a share. Tokens with massive activations,
        or states of another size than the teacher's, keep their target.
        """
        rows = batch.rows
        lacking = self.teacher[rows].to(target.device) - batch.residual - target
        before, own = self.before[rows].to(target.device), _power(batch.residual)
        alike = (own < ALIKE**2 * before) & (before < ALIKE**2 * own)
        alike &= ~self.massive[rows].to(target.device)
        return target + DRIFT * alike * lacking

    def fit_gates(self, layer: Layer) -> torch.Tensor:
        """Move the student past the attention; returns each slot's slope and intercept, (2, m)."""
        mlp = layer.mlp
        sums = AffineSums(mlp.gate_proj.out_features, self.device)
        mask = self._mask(mlp.gate_proj.out_features)
        for batch in self._until_mlp(layer, self.student):
            self.student[batch.rows] = batch.residual.cpu()
            self.inputs[batch.rows] = batch.mlp_input.cpu()
            gate, up = mlp.gate_proj(batch.mlp_input), mlp.up_proj(batch.mlp_input)
            gated = mlp.act_fn(gate) * up
            target = mlp.down_proj(gated)
            weight = self.weight[batch.rows].to(self.device)
            factor = torch.ones_like(weight)
            if not layer.joins:
                target = self.undo_drift(batch, target)
                factor = self.shrink(batch, target)
                target = factor * target
                # Where the student's state makes the MLP write far more than the teacher's does (a
                # massive activation in the wrong place), one token would count for thousands.
                weight = torch.minimum(weight, _power(target).clamp_min(1e-12).reciprocal())
                weight[self.massive[batch.rows]] *= SINK_WEIGHT
            self.targets[batch.rows] = target.cpu()
            self.weight[batch.rows] = weight.cpu()
            picked = mask[batch.rows].to(self.device)
            parts = (gate, up, gated, weight * factor.square())
            sums.add(*(part[picked] for part in parts))
        return sums.solve()

    def _mask(self, slots: int) -> torch.Tensor:
        """The sample of fitted tokens for so many slots, bool (windows, window)."""
        shape = (len(self.inputs), self.inputs.shape[1])
        return sample_mask(shape, self.fitted_rows, SAMPLE * slots)

    def _tokens(self, rows: slice, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Input, target, weight of windows' tokens, or of those in `mask`: (tokens, features)."""
        parts = [part[rows] for part in (self.inputs, self.targets, self.weight)]
        if mask is None:
            return [part.flatten(0, 1).to(self.device) for part in parts]
        return [part[mask[rows]].to(self.device) for part in parts]

    def gate_sums(
        self, features: Callable, terms: int, down: nn.Linear, block: nn.Module | None = None
    ) -> GateSums:
        """Sums for fitting all slots' coefficients together towards the layer's output.

        `features` gives x (tokens, d) as (tokens, terms * slots). With a `block` they are towards
        what it lacks.
        """
        sums = GateSums(down.in_features, terms, down.out_features, self.device)
        mask = self._mask(down.in_features)
        for rows, _ in self._batches():
            x, target, weight = self._tokens(rows, mask)
            sums.add(features(x), target if block is None else target - block(x), weight)
        return sums

    def error(self, block: nn.Module) -> float:
        """The block's weighted squared error on held-out tokens, a share of the target's."""
        left = energy = 0.0
        for rows, heldout in self._batches():
            if heldout:
                x, target, weight = self._tokens(rows)
                left += ((block(x) - target).square() * weight).double().sum().item()
                energy += (target.square() * weight).double().sum().item()
        return left / max(energy, 1e-300)

    def down_sums(
        self, block: BilinearMLP, light: bool = False, linear: bool = False
    ) -> tuple[LinearSums, LinearSums]:
        """Sums for correcting `block.down_proj` towards the MLP: of fitted and of held-out tokens.

        A `light` round reads fewer of the fitted tokens. With `linear` a linear map of the input is
        fitted along with it; see `block.corrected`.
        """
        down = block.down_proj
        size = down.in_features + (block.gate_proj.in_features if linear else 0)
        sums = [LinearSums(size, down.out_features, self.device) for _ in range(2)]
        mask = self._mask(size) if light else None
        for rows, heldout in self._batches():
            x, target, weight = self._tokens(rows, None if heldout else mask)
            found = block.features(x)
            residual = target - down(found)
            found = torch.cat([found, x], 1) if linear else found
            sums[heldout].add(found, residual, target, weight)
        return sums[False], sums[True]

    def steps(self, tokens: int) -> int:
        """How many batches `shuffled` gives."""
        return max(1, self.fitted_rows * self.teacher.shape[1] // tokens)

    def shuffled(self, tokens: int, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Batches of `tokens` fitted tokens in random order: input, target, weight."""
        flat = [part.flatten(0, 1) for part in (self.inputs, self.targets, self.weight)]
        count = self.fitted_rows * self.teacher.shape[1]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        for step in range(self.steps(tokens)):
            picked = order[step * tokens : (step + 1) * tokens]
            yield tuple(part[picked].to(self.device) for part in flat)

    def energy(self) -> float:
        """The fitted tokens' mean weighted square of the targets (a token's sum over outputs)."""
        total = 0.0
        for rows, heldout in self._batches():
            if not heldout:
                energy = self.targets[rows].square().sum(-1, keepdim=True) * self.weight[rows]
                total += energy.double().sum().item()
        return max(total, 1e-300) / (self.fitted_rows * self.teacher.shape[1])

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
