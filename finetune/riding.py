"""The source's own modules inside the student: as its teacher, and as the start of a homotopy.

A homotopy leads from the source (t = 0) to the converted model (t = 1) while it trains:

- `blend`: every MLP is mixed with the original. Where both have the same slots (rank 1, identity,
  as many), it is the factors and the values that are mixed,
  `((1-t) act(g) + t g') * ((1-t) u + t u')`, then `(1-t) D + t D'`; else the two outputs.
  Either way t = 0 is the source's MLP and t = 1 the block, exactly.
- `swish-beta`: a `gated` conversion's activation is annealed, `act(beta z) / beta` with
  beta = 1 - t, down to z / 2 (arXiv 2410.08417, appendix J; for SiLU this is Swish_beta).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN, LinearActivation
from transformers.modeling_utils import PreTrainedModel

from bilinearize.model.errors import InputError
from bilinearize.model.modeling_bilinear import BilinearMLP

OWN = ".own."


class Riding(nn.Module):
    """A module of the student, and in its place the source's, frozen, while `teaching`."""

    def __init__(self, own: nn.Module, source: nn.Module):
        super().__init__()
        self.own, self.source = own, source.requires_grad_(False)
        self.teaching = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.source if self.teaching else self.own)(*args, **kwargs)

    def train(self, mode: bool = True) -> "Riding":
        super().train(mode)
        self.source.eval()
        return self


class BlendedMLP(Riding):
    """A riding MLP that computes the mixture of both at `t` until `t` is 1.

    Maps (..., hidden_size) to (..., hidden_size).
    """

    def __init__(self, own: BilinearMLP, source: Any):
        super().__init__(own, source)
        self.slotwise = _same_slots(own, source)
        if self.slotwise:
            _align_(own, source)
        self.t: torch.Tensor
        self.register_buffer("t", torch.zeros(()), persistent=False)
        self.done = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.teaching or self.done:
            return super().forward(x)
        own: Any = self.own
        source: Any = self.source
        if not self.slotwise:
            return self._mix(source(x), own(x))
        gate = self._mix(source.act_fn(source.gate_proj(x)), own.gate_proj(x))
        features = gate * self._mix(source.up_proj(x), own.up_proj(x))
        return self._mix(source.down_proj(features), own.down_proj(features))

    def _mix(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return (1 - self.t) * start + self.t * end


class AnnealedActivation(nn.Module):
    """`act(beta z) / beta` with beta = 1 - t: the activation itself at t = 0, z / 2 at t = 1."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.act = act
        self.t: torch.Tensor
        self.register_buffer("t", torch.zeros(()), persistent=False)
        self.done = False

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        if self.done:
            return z / 2
        beta = 1 - self.t
        return self.act(beta * z) / beta


Part = BlendedMLP | AnnealedActivation


class Homotopy:
    """The parts of one model that move together.

    Raises:
        InputError: if the model has none, naming the conversion that has.
    """

    def __init__(self, parts: Sequence[Part], share: float, ease: str):
        self.parts, self.share, self.ease = parts, share, ease
        self.t = 0.0

    def at(self, step: int, steps: int) -> float:
        """t in step `step` (from 0) of `steps`; the last step of its share has 1."""
        x = min(1.0, (step + 1) / max(1, round(self.share * steps)))
        if self.ease == "cosine":
            return (1 - math.cos(math.pi * x)) / 2 if x < 1 else 1.0
        return x if self.ease == "linear" else 1 - (1 - x) ** 2

    def set(self, t: float) -> None:  # noqa: A003
        """Move all parts to t."""
        self.t = t
        for part in self.parts:
            part.t.fill_(t)
            part.done = t >= 1


def blend(layers: list[Any]) -> list[Part]:
    """The blended parts of layers that were built to ride.

    Raises:
        InputError: if no layer is bilinear.
    """
    parts: list[Part] = [layer.mlp for layer in layers if isinstance(layer.mlp, BlendedMLP)]
    if not parts:
        raise InputError("--homotopy blend needs bilinear layers; convert with another --method.")
    return parts


def anneal(layers: list[Any]) -> list[Part]:
    """Put an annealed activation into every gated layer.

    Raises:
        InputError: if no layer is gated, or the activation has another tangent than z / 2.
    """
    parts: list[Part] = []
    for mlp in (own_module(layer.mlp) for layer in layers):
        if isinstance(mlp, BilinearMLP) and mlp.form == "gated":
            _check_tangent(mlp.act_fn)
            mlp.act_fn = AnnealedActivation(mlp.act_fn)
            parts.append(mlp.act_fn)
    if not parts:
        raise InputError(
            "--homotopy swish-beta needs gated layers; convert with --method gated first."
        )
    return parts


@torch.no_grad()
def fold_annealed(model: PreTrainedModel) -> None:
    """Make every gated layer bilinear with the gate `z / 2`: where `swish-beta` ends."""
    config: Any = model.config
    base: Any = model.base_model
    forms = config.bilinear_form
    for layer in base.layers:
        mlp = layer.mlp
        if mlp.form == "gated":
            mlp.gate_proj.weight.mul_(0.5)
            if mlp.gate_proj.bias is not None:
                mlp.gate_proj.bias.mul_(0.5)
            mlp.form, mlp.act_fn = "bilinear", ACT2FN["linear"]
    config.bilinear_form = ["bilinear"] * len(forms) if isinstance(forms, list) else "bilinear"
    activations = config.bilinear_activation
    if isinstance(activations, list) and isinstance(forms, list):
        pairs = zip(forms, activations, strict=True)
        config.bilinear_activation = ["identity" if f == "gated" else a for f, a in pairs]
    elif not isinstance(forms, list):
        config.bilinear_activation = "identity"


def own_module(module: nn.Module) -> nn.Module:
    """The student's module, whether the source's rides along or not."""
    return module.own if isinstance(module, Riding) else module


def plain_name(name: str) -> str:
    """A parameter's name in the student as it is stored."""
    return name.replace(OWN, ".")


@contextmanager
def teaching(riders: list[Any], adapted: list[Any]) -> Iterator[None]:
    """Within the block the riding modules are the source's, and LoRA adapters are off."""
    try:
        for module in riders:
            module.teaching = True
        for module in adapted:
            module._disable_adapters = True
        yield
    finally:
        for module in riders:
            module.teaching = False
        for module in adapted:
            module._disable_adapters = False


def _same_slots(own: BilinearMLP, source: Any) -> bool:
    if own.rank != 1 or not isinstance(own.act_fn, LinearActivation):
        return False
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(isinstance(getattr(source, name, None), nn.Linear) for name in names):
        return False
    return own.gate_proj.weight.shape == source.gate_proj.weight.shape


@torch.no_grad()
def _align_(own: BilinearMLP, source: Any) -> None:
    """Rescale each factor pair so that `up_proj` is as near the source's as it gets.

    A mixture of factors depends on their gauge. Slots whose `up_proj` points elsewhere are left.
    """
    k, u = own.up_proj.weight.double(), source.up_proj.weight.double()
    dot, square = (k * u).sum(1), u.square().sum(1)
    near = dot.abs() > 0.5 * (square * k.square().sum(1)).sqrt()
    scale = torch.where(near & (dot != 0), dot / square, torch.ones_like(dot))
    for linear, factor in ((own.up_proj, 1 / scale), (own.gate_proj, scale)):
        linear.weight.mul_(factor[:, None].to(linear.weight.dtype))
        if linear.bias is not None:
            linear.bias.mul_(factor.to(linear.bias.dtype))


def _check_tangent(act: nn.Module) -> None:
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    if not torch.allclose(act(z * 1e-4) / 1e-4, z / 2, atol=1e-3):
        raise InputError(
            f"--homotopy swish-beta: {type(act).__name__} does not tend to z / 2 as Swish does."
        )
