"""What made a layer write to a direction at one token of a prompt; exact, for a block is quadratic.

Two views of the same number `u . y`: by eigenvectors, `sum_k lambda_k (v_k . x~)^2`, and by pairs
of what the block's input is a sum of, `sum_ab p_a A p_b`. The parts p are the residual stream's:
the token's own embedding, what attention brought from each token (all layers up to this one), the
MLPs below, and the constant 1. The RMSNorm's scale is taken as the number it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from bilinearize import InputError
from bilinearize.interpret.layers import (
    decoder_layers,
    find_layer,
    layer_tensor,
    norm_before,
    norm_behind,
    norm_eps,
)
from bilinearize.interpret.spectrum import Spectrum, find_spectrum

TOLERANCE = 1e-3
"""Relative size of what the parts may leave unexplained: rounding, at any precision but fp16's."""


@dataclass(frozen=True)
class Attribution:
    """The contributions to one direction, of one layer at one position."""

    spectrum: Spectrum
    position: int
    total: float
    """`u . y`, computed in float64 from the residual stream that the model had."""
    model_total: float
    """`u . y` as the model itself computed it, in its own precision."""
    eigenvectors: Tensor
    """(i) contribution of each eigenvector; the sum is `total`."""
    labels: list[str]
    """Names of the p parts."""
    source: list[int | None]
    """Position of the token that a part was brought from by attention, where it was."""
    pairs: Tensor
    """(p, p) symmetric contributions of pairs of parts; the sum is `total`."""


def attribute(
    model: PreTrainedModel, tokens: Tensor, layer: int, direction: Tensor, position: int = -1
) -> Attribution:
    """Attribute what one layer writes to `direction` at one token.

    Args:
        tokens: (t) ids of the prompt.
        direction: (o), in the residual stream.

    Raises:
        InputError: if the layer or position does not exist, the layer is not converted, the
            direction doesn't fit, or the residual stream is no plain sum of its layers' outputs.
    """
    if not -len(tokens) <= position < len(tokens):
        raise InputError(f"position {position} of a prompt of {len(tokens)} tokens; name another.")
    position %= len(tokens)
    tensor = layer_tensor(model, layer)
    spectrum = find_spectrum(tensor, direction)
    names, sources, parts, residual, output = _record(model, tokens, layer, position)
    rest = residual - parts.sum(0)
    if rest.norm() > TOLERANCE * residual.norm():
        raise InputError(
            f"layer {layer}: the residual stream of {type(model).__name__} is no plain sum of "
            "embedding, attention and MLPs, so it has no parts to attribute to."
        )
    norm = norm_before(find_layer(model, layer))
    eps = 0.0 if norm is None else norm_eps(norm)
    scale = 1.0 if norm is None else float((residual.square().mean() + eps).rsqrt())
    x = torch.cat([parts, rest[None]]) * scale
    names, sources = [*names, "rounding"], [*sources, None]
    if tensor.constant:
        x = torch.cat([nn.functional.pad(x, (0, 1)), nn.functional.pad(x[:1] * 0, (0, 1), value=1)])
        names, sources = [*names, "constant"], [*sources, None]
    pairs = x @ tensor.interaction(spectrum.directions[0]) @ x.T
    whole = residual * scale
    return Attribution(
        spectrum,
        position,
        float(tensor.output(whole) @ spectrum.directions[0]),
        float(output @ spectrum.directions[0]),
        spectrum.contributions(whole)[0],
        names,
        sources,
        pairs,
    )


@contextmanager
def _eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attention that returns its weights; the setting is put back."""
    before = str(model.config._attn_implementation)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_parts(layers: Any, layer: int) -> None:
    """Raise InputError where the residual stream or attention can't be taken apart."""
    for index in range(layer + 1):
        attention = layers[index].self_attn
        if norm_behind(layers[index]) is not None:
            raise InputError(f"layer {index} has a norm behind its blocks; no parts to attribute.")
        if not hasattr(attention, "v_proj") or not hasattr(attention, "head_dim"):
            raise InputError(
                f"layer {index}: {type(attention).__name__} has no v_proj of its own; no parts to "
                "attribute."
            )


@torch.no_grad()
def _record(model: PreTrainedModel, tokens: Tensor, layer: int, position: int):
    """Run the prompt once; names, sources and (p, d) parts, the residual, the block's output."""
    layers = decoder_layers(model)
    _check_parts(layers, layer)
    brought = torch.zeros(len(tokens), model.config.hidden_size, dtype=torch.float64)
    below = torch.zeros(model.config.hidden_size, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    handles = [layers[0].register_forward_pre_hook(_keep(seen, "embedding", position))]
    for index in range(layer + 1):
        handles += _watch_attention(layers[index].self_attn, brought, position)
        if index < layer:
            handles.append(_watch_mlp(layers[index].mlp, below, position))
    norm = norm_before(layers[layer])
    assert norm is not None
    handles.append(norm.register_forward_pre_hook(_keep(seen, "residual", position)))
    output = torch.zeros_like(below)
    handles.append(_watch_mlp(layers[layer].mlp, output, position))
    try:
        with _eager_attention(model):
            model(input_ids=tokens[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    count = position + 1
    names = ["embedding", "MLPs below", *(f"attention to {s}" for s in range(count))]
    parts = torch.cat([torch.stack([seen["embedding"], below]), brought[:count]])
    return names, [None, None, *range(count)], parts, seen["residual"], output


def _keep(seen: dict[str, Tensor], name: str, position: int):
    def hook(module: nn.Module, args: tuple) -> None:
        seen[name] = args[0][0, position].double().cpu()

    return hook


def _watch_mlp(mlp: nn.Module, total: Tensor, position: int):
    """Add the block's output at `position` to `total`, (d)."""

    def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
        total.add_(output[0, position].double().cpu())

    return mlp.register_forward_hook(hook)


def _watch_attention(attention: Any, brought: Tensor, position: int):
    """Add what attention brings to `position` from each token to `brought`, (t, d)."""
    values: list[Tensor] = []

    def keep_values(module: nn.Module, args: tuple, output: Tensor) -> None:
        values[:] = [output[0].double().cpu()]

    def hook(module: nn.Module, args: tuple, output: tuple) -> None:
        pattern = output[1][0, :, position].double().cpu()  # (heads, t)
        heads, size = pattern.shape[0], attention.head_dim
        groups = values[0].unflatten(-1, (-1, size))  # (t, key-value heads, size)
        groups = groups.repeat_interleave(heads // groups.shape[1], 1)
        out = attention.o_proj.weight.double().cpu().unflatten(1, (heads, size))
        brought.add_(torch.einsum("ht,ths,ohs->to", pattern, groups, out))
        if attention.o_proj.bias is not None:
            brought[position].add_(attention.o_proj.bias.double().cpu())

    return [
        attention.v_proj.register_forward_hook(keep_values),
        attention.register_forward_hook(hook),
    ]
