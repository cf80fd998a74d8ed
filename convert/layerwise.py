"""A short optimisation of one block's every weight towards its layer's output, by Adam."""

import copy
import math

import torch

from bilinearize.convert.stream import Stream
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_

TOKENS_PER_STEP = 1024
WARMUP = 0.05
BETAS = (0.9, 0.98)


def optimise(
    block: BilinearMLP, stream: Stream, epochs: int, learning_rate: float
) -> tuple[BilinearMLP, list[float]]:
    """A copy of `block`, all weights trained on the fitted tokens of `stream`.

    Minimises the error that the closed form minimises: squared, weighted by token, a share of the
    target's. Each tensor's step is `learning_rate` times its root mean square, so that one value
    serves layers of any scale; it rises for a twentieth of the steps and falls to 0 as a cosine.

    Returns:
        The trained block, and the mean error of each epoch's steps.
    """
    block = copy.deepcopy(block)
    balance_(block)
    groups = [
        {"params": [parameter.requires_grad_()], "lr": learning_rate * _scale(parameter)}
        for parameter in block.parameters()
    ]
    optimiser = torch.optim.Adam(groups, betas=BETAS, fused=True)
    steps = epochs * stream.steps(TOKENS_PER_STEP)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _factor(step, steps))
    energy = stream.energy()
    errors = []
    for epoch in range(epochs):
        total = 0.0
        for x, target, weight in stream.shuffled(TOKENS_PER_STEP, seed=epoch):
            with torch.enable_grad():
                error = ((block(x) - target).square() * weight).sum() / (len(x) * energy)
                optimiser.zero_grad()
                error.backward()
            optimiser.step()
            schedule.step()
            total += error.item()
        errors.append(total / stream.steps(TOKENS_PER_STEP))
    return block.requires_grad_(False), errors


def _scale(parameter: torch.Tensor) -> float:
    """Root mean square, a little above 0 so that a tensor of zeros can move."""
    return max(parameter.detach().square().mean().sqrt().item(), 1e-4)


def _factor(step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
