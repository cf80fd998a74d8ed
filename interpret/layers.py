"""Where a model keeps its MLPs, what reaches them, and which RMSNorm stands around them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from bilinearize import BilinearMLP, InputError
from bilinearize.interpret.tensor import BilinearTensor, block_tensor, check_polynomial


def decoder_layers(model: PreTrainedModel) -> Any:
    """The model's decoder layers.

    Raises:
        InputError: if the model has none where Llama-like models have them.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(f"{type(model).__name__} has no decoder layers; a Llama-like model has.")
    return layers


def find_layer(model: PreTrainedModel, layer: int) -> Any:
    """One decoder layer (untyped: so are its attributes). Raises InputError if there is none."""
    layers = decoder_layers(model)
    if not 0 <= layer < len(layers):
        raise InputError(f"there is no layer {layer}; the model has layers 0 to {len(layers) - 1}.")
    return layers[layer]


def converted_layers(model: PreTrainedModel) -> list[int]:
    """The layers whose block is an exact quadratic form.

    Raises:
        InputError: if there is none.
    """
    found = []
    for index, layer in enumerate(decoder_layers(model)):
        mlp = layer.mlp
        if isinstance(mlp, BilinearMLP) and mlp.form == "bilinear":
            found.append(index)
    if not found:
        raise InputError("no layer of this model is converted; run bilinearize convert first.")
    return found


def norm_before(layer: Any, name: str = "the layer") -> Any:
    """The norm whose output the MLP reads; None in models that normalise behind blocks only.

    Raises:
        InputError: if no norm is known there.
    """
    for attribute in ("pre_feedforward_layernorm", "post_attention_layernorm", "input_layernorm"):
        norm = getattr(layer, attribute, None)
        if norm is None:
            continue
        if attribute == "post_attention_layernorm" and not hasattr(layer, "input_layernorm"):
            return None  # OLMo 2 and 3, EXAONE 4: it stands behind attention, the MLP reads plain x
        return norm  # the last: Cohere, StableLM, where attention and MLP read the same input
    raise InputError(f"{name}: no norm known in front of the MLP; read it with fold=False.")


def norm_behind(layer: Any) -> Any:
    """The norm between the MLP and the residual stream (Gemma 2, OLMo 2, GLM 4), or None."""
    names = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2")
    found = [getattr(layer, name, None) for name in names]
    return next((norm for norm in found if norm is not None), None)


def norm_weight(norm: Any, size: int, name: str) -> Tensor:
    """The factor g of `norm(x) = g * x / rms(x)`, (size); ones for no norm.

    Found by trying the norm out, since families store it differently (Gemma: minus one).

    Raises:
        InputError: if the module is no RMSNorm.
    """
    if norm is None:
        return torch.ones(size)
    weight = next(norm.parameters(), torch.ones(1))
    probe = torch.linspace(-1, 2, size, dtype=torch.float32, device=weight.device)
    with torch.no_grad():
        scale = norm(torch.ones_like(probe)).float()
        expected = scale * probe * probe.square().mean().rsqrt()
        if not torch.allclose(norm(probe).float(), expected, rtol=2e-2, atol=2e-2):
            raise InputError(f"{name}: {type(norm).__name__} is no RMSNorm; use fold=False.")
    eps = norm_eps(norm)
    return scale * (1 + eps) ** 0.5


def norm_eps(norm: nn.Module) -> float:
    """The epsilon of an RMSNorm, whatever its name."""
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def layer_tensor(
    model: PreTrainedModel,
    layer: int,
    fold: bool = True,
    dtype: torch.dtype = torch.float64,
    mlp: nn.Module | None = None,
) -> BilinearTensor:
    """The tensor of one layer's block.

    Args:
        fold: fold the weights of the RMSNorm in front (and behind, if there is one), so that the
            inputs are directions of the residual stream: `x / rms(x)`, see `mlp_inputs`. What is
            left out is each token's own `1 / rms`. False reads the block as it stands.
        mlp: another block to read in this layer's place, such as a control.

    Raises:
        InputError: if there is no such layer, it is not converted, or there is no RMSNorm to fold.
    """
    module, name = find_layer(model, layer), f"layer {layer}"
    mlp = mlp or module.mlp
    assert mlp is not None
    check_polynomial(mlp, name)
    size = model.config.hidden_size
    if not fold:
        return block_tensor(mlp, dtype=dtype, name=name)
    before = norm_weight(norm_before(module, name), size, name)
    behind = norm_behind(module)
    after = None if behind is None else norm_weight(behind, size, name)
    return block_tensor(mlp, before, after, dtype, name)


@torch.no_grad()
def mlp_inputs(
    model: PreTrainedModel,
    tokens: Tensor,
    layers: Iterable[int],
    fold: bool = True,
    skip: int = 0,
) -> dict[int, Tensor]:
    """What each layer's block reads on real text.

    Args:
        tokens: int64 (windows, window).
        fold: as in `layer_tensor`: the normalised vector without the norm's weights.
        skip: positions dropped at the start of each window; the first position's vectors are
            outliers in most models, and correlations over them mean little.

    Returns:
        (windows * (window - skip), inputs) for each layer, in the model's dtype.
    """
    found: dict[int, list[Tensor]] = {index: [] for index in layers}
    handles = []
    try:
        for index, rows in found.items():
            module = find_layer(model, index)
            handles.append(_listen(module, rows, fold, skip, f"layer {index}"))
        for window in tokens:
            model(input_ids=window[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return {index: torch.cat(rows) for index, rows in found.items()}


def _listen(layer: Any, rows: list[Tensor], fold: bool, skip: int, name: str):
    """Hook the block, or with `fold` the norm before it, and append (tokens, inputs) to `rows`."""
    norm = norm_before(layer, name) if fold else None

    def hook(module: nn.Module, args: tuple) -> None:
        x = args[0][0, skip:]
        if norm is not None:
            x = normalise(x, norm_eps(norm))
        rows.append(x)

    return (layer.mlp if norm is None else norm).register_forward_pre_hook(hook)


def normalise(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` over the last dimension, computed in float32 or better."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
