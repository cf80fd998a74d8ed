"""The commands that need real text: symmetry and correlation reports."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize import InputError
from bilinearize.interpret.hosvd import find_hosvd
from bilinearize.interpret.layers import (
    converted_layers,
    decoder_layers,
    find_layer,
    layer_tensor,
    mlp_inputs,
)
from bilinearize.interpret.lowrank import random_directions, shuffled, truncation_correlations
from bilinearize.interpret.plot import draw_histograms, draw_layers
from bilinearize.interpret.readout import token_reader
from bilinearize.interpret.run import SCHEMA, load
from bilinearize.interpret.symmetry import absorption_gap, layer_symmetry
from bilinearize.model.page import Cell, Page
from bilinearize.model.text import pack_windows, read_documents

PUBLISHED = (0.32, 0.65)
"""Share of SAE features with rank-2 correlation above 0.75 that the re-run of arXiv 2410.08417
found, ts-medium to fw-small (TMLR submission 9470); the paper says "most"."""


def windows_of(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    text_column: str,
    split: str,
    tokens: int,
    window: int,
) -> Tensor:
    """Whole windows of real text, int64 (windows, window)."""
    documents = read_documents(text, text_column, split)
    return pack_windows(documents, tokenizer, window, tokens, name=text)


def symmetry(
    model: str,
    out: Path,
    text: str,
    text_column: str = "text",
    split: str = "test",
    tokens: int = 1024,
    window: int = 256,
) -> dict:
    """Symmetry of each layer of any gated model; `bilinearize interpret symmetry`.

    Args:
        model: a gated source or a converted model; every layer is measured on its own inputs.
        out: new folder for the report.

    Returns:
        what is in report.json.

    Raises:
        InputError: for a bad model or text, or an `out` that exists.
    """
    network, tokenizer = load(model, out)
    windows = windows_of(tokenizer, text, text_column, split, tokens, window)
    count = len(decoder_layers(network))
    inputs = mlp_inputs(network, windows, range(count), fold=False)
    changes: dict[str, dict[int, float]] = {}
    for layer, x in inputs.items():
        module, name = find_layer(network, layer), f"layer {layer}"
        for kind, change in layer_symmetry(module.mlp, x, name).items():
            changes.setdefault(kind, {})[layer] = change
        query = _query_matrix(module, x.shape[-1])
        changes.setdefault("absorbed query", {})[layer] = absorption_gap(module.mlp, x, query, name)
    page = Page(f"Symmetry of {Path(model).name}")
    page.text(
        "Relative change of each layer's output on real text when its two factors are exchanged, "
        "or scaled by a and 1/a; zero (rounding) for a bilinear block, whatever its activation on "
        "the product. Absorbed query: a query matrix common to all slots, here the layer's own "
        "query projection, folded into the weights; zero for every block, so it adds nothing."
    )
    picture = draw_layers(changes, "relative change of the output", "Symmetry", log=True)
    page.picture("symmetry", picture, "Relative change under each symmetry, over the layers")
    rows: list[list[Cell]] = [[n, *(changes[kind][n] for kind in changes)] for n in range(count)]
    page.table(["layer", *changes], rows)
    data = {"schema": SCHEMA, "model": model, "tokens": windows.numel(), "changes": changes}
    page.write(out, data)
    return data


def _query_matrix(layer, size: int) -> Tensor:
    """The layer's own query projection where it is square, else a fixed Gaussian matrix."""
    projection = getattr(getattr(layer, "self_attn", None), "q_proj", None)
    if projection is not None and projection.weight.shape == (size, size):
        return projection.weight
    return random_directions(size, size, seed=0) / size**0.5


def correlate_layers(
    model: str,
    out: Path,
    text: str,
    text_column: str = "text",
    split: str = "test",
    tokens: int = 4096,
    window: int = 256,
    layers: list[int] | None = None,
    directions: int = 32,
    keep: int = 2,
    threshold: float = 0.75,
    seed: int = 0,
) -> dict:
    """Rank-k correlations of all layers, with a control; `bilinearize interpret correlate`.

    Raises:
        InputError: for a bad model, layer or text, or an `out` that exists.
    """
    if directions < 1 or keep < 1:
        raise InputError("directions and keep must be at least 1.")
    network, tokenizer = load(model, out)
    chosen = converted_layers(network) if layers is None else layers
    windows = windows_of(tokenizer, text, text_column, split, tokens, window)
    inputs = mlp_inputs(network, windows, chosen, skip=1)
    rows = token_reader(network, tokenizer).unembedding
    picks = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:directions]
    found: dict[str, dict[int, dict]] = {}
    for layer in chosen:
        for name, result in _layer_kinds(network, layer, inputs[layer], rows[picks], keep, seed):
            found.setdefault(name, {})[layer] = {key: v.tolist() for key, v in result.items()}
    return _correlation_report(found, model, out, windows.numel(), keep, threshold)


def _layer_kinds(
    model: PreTrainedModel, layer: int, x: Tensor, tokens: Tensor, keep: int, seed: int
):
    """Yield (name, correlations) for each kind of direction, trained and shuffled."""
    # float32: three digits of a correlation are reported, and 180 eigendecompositions a layer run.
    trained = layer_tensor(model, layer, dtype=torch.float32)
    control = shuffled(find_layer(model, layer).mlp, seed)
    mixed = layer_tensor(model, layer, dtype=torch.float32, mlp=control)
    gaussian = random_directions(trained.outputs, len(tokens), seed)
    for suffix, tensor in (("", trained), (", shuffled", mixed)):
        strongest = find_hosvd(tensor).directions[: len(tokens)]
        kinds = {"tokens": tokens, "strongest": strongest, "Gaussian": gaussian}
        for name, vectors in kinds.items():
            yield name + suffix, truncation_correlations(tensor, x, vectors, keep)


def _correlation_report(
    found: dict, model: str, out: Path, tokens: int, keep: int, threshold: float
) -> dict:
    page = Page(f"Rank-{keep} correlations of {Path(model).name}")
    page.text(
        f"Over {tokens:,} tokens of real text: the correlation of what a layer writes to a "
        f"direction with its first {keep} eigenvectors' part, and the share of directions above "
        f"{threshold:g}. Active: over the tenth of tokens where the direction is largest. "
        "Shuffled: the same weights in random order."
    )
    page.text(
        f"Published for rows of SAE encoders at rank 2 and 0.75: {PUBLISHED[0]:.0%} to "
        f"{PUBLISHED[1]:.0%} in a re-run, 'most' in the paper. The directions here are others."
    )
    shares: dict[str, dict] = {}
    for name, layers in found.items():
        shares[name] = {"layers": {}}
        for over in ("all", "active"):
            values = np.concatenate([layers[layer][over] for layer in layers])
            shares[name][over] = float((values > threshold).mean())
            shares[name][f"median_{over}"] = float(np.nanmedian(values))
        ranks = np.concatenate([layers[layer]["effective_rank"] for layer in layers])
        shares[name]["median_effective_rank"] = float(np.median(ranks))
        for layer in layers:
            above = np.array(layers[layer]["all"]) > threshold
            shares[name]["layers"][layer] = float(above.mean())
    keys = ("all", "active", "median_all", "median_active", "median_effective_rank")
    header = ["directions", f"share > {threshold:g}", "active", "median", "median, active"]
    table: list[list[Cell]] = []
    for name, share in shares.items():
        table.append([name, *(f"{share[key]:.1%}" for key in keys[:2])])
        table[-1] += [share[key] for key in keys[2:]]
    page.table([*header, "median effective rank"], table)
    panels = {n: np.concatenate([r["all"] for r in found[n].values()]) for n in found}
    picture = draw_histograms(panels, threshold, "Correlation with the truncation, all layers")
    page.picture("histograms", picture, "Histograms of correlations by kind of direction")
    lines = {name: share["layers"] for name, share in shares.items()}
    picture = draw_layers(lines, f"share above {threshold:g}", "By layer")
    page.picture("layers", picture, "Share of directions above the threshold, over the layers")
    data = {"schema": SCHEMA, "model": model, "tokens": tokens, "keep": keep}
    data |= {"threshold": threshold, "shares": shares, "correlations": found}
    page.write(out, data)
    return data
