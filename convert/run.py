"""Convert a checkpoint: read layer by layer, fit, write shard by shard, rename when whole."""

import json
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm

from bilinearize.convert.layer import LayerConverter
from bilinearize.convert.options import Plan, check_training, make_plan, parse_size
from bilinearize.convert.source import Source
from bilinearize.convert.states import heldout_windows
from bilinearize.convert.stream import Stream
from bilinearize.convert.writer import ShardWriter
from bilinearize.model import checkpoint
from bilinearize.model.card import read_license, write_card
from bilinearize.model.device import choose_device
from bilinearize.model.errors import InputError
from bilinearize.model.text import fingerprint, pack_windows, read_documents

# Held-out error over the fitted tokens' above which the user is told.
OVERFIT = 1.5
FITTED = ("refit", "layerwise", "affine")


def convert(
    source: str,
    out: Path,
    *,
    method: str = "refit",
    rank: int | list[int] = 1,
    expand: int = 1,
    activation: str = "identity",
    epochs: int = 3,
    learning_rate: float = 0.01,
    layers: str | None = None,
    text: str | None = None,
    text_column: str = "text",
    split: str = "train",
    tokens: int = 16384,
    window: int = 512,
    bos: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    max_shard_size: str = "5GB",
    state_budget: str = "8GB",
    revision: str | None = None,
) -> dict:
    """Write `out`, the converted checkpoint of `source`; the arguments are those of ConvertConfig.

    Returns:
        What `bilinearize.json` in `out` holds: source, method, protocol, errors by layer, versions.

    Raises:
        InputError: if the source, the text or an option can't be used; nothing is written then.
    """
    started = time.monotonic()
    checkpoint.check_new(out)
    budget, shard_bytes = parse_size(state_budget), parse_size(max_shard_size)
    place = choose_device(device)
    model = Source(checkpoint.resolve_checkpoint(source, revision))
    plan = make_plan(model.layers, method, rank, expand, layers, activation)
    check_training(epochs, learning_rate)
    windows = None
    if method in FITTED:
        windows = read_calibration(model, text, text_column, split, tokens, window, bos)
        check_tokens(model, plan, method, windows)
    stored_dtype = model.dtype if dtype == "auto" else getattr(torch, dtype)
    config = converted_config(model, plan, activation, method in FITTED, stored_dtype)
    record = {
        "format": 1,
        "source": source,
        "revision": revision or snapshot_commit(model.folder),
        "license": read_license(model.folder),
        "source_model_type": model.config.model_type,
        "method": method,
        "form": config.bilinear_form,
        "rank": config.bilinear_rank,
        "activation": config.bilinear_activation,
        "expand": expand,
    }
    if windows is not None:
        record["calibration"] = {
            "text": text,
            "tokens": windows.numel(),
            "window": window,
            "bos": bos,
            "sha256": fingerprint(windows),
        }
    with checkpoint.atomic_folder(out) as partial:
        writer = ShardWriter(partial, shard_bytes)
        stream = None if windows is None else Stream(model, windows, place, budget, partial)
        converter = LayerConverter(method, stored_dtype, stream, activation, epochs, learning_rate)
        record["layers"] = convert_layers(model, converter, writer, plan, place)
        record["parameters"] = writer.parameters
        writer.finish()
        checkpoint.carry_files(model.folder, partial)
        shutil.copyfile(model.family.path, partial / f"{model.family.module}.py")
        record["seconds"] = round(time.monotonic() - started, 1)
        record["versions"] = versions()
        (partial / "bilinearize.json").write_text(json.dumps(record, indent=2) + "\n")
        write_card(partial)
        config.to_json_file(partial / "config.json", use_diff=False)
    return record


def convert_layers(
    model: Source, converter: LayerConverter, writer: ShardWriter, plan: list[Plan], device
) -> list[dict]:
    """Write every tensor of the model, the planned MLPs converted; returns one record a layer."""
    records = []
    for name in model.other_names():
        writer.add(name, model.read(name).to(converter.dtype))
    bar = tqdm(plan, desc=f"convert ({converter.method})", unit="layer")
    for index, wanted in enumerate(bar):
        layer, stored = model.load_layer(index, device)
        replaced = [] if wanted.kept else model.mlp_names(index, stored)
        for name, tensor in stored.items():
            if name not in replaced:
                writer.add(name, tensor.to(converter.dtype))
        if wanted.kept:
            converter.keep(layer)
            records.append({"layer": index, "form": "gated"})
            continue
        block, fit = converter(layer, wanted.rank, wanted.expand)
        for name, tensor in block.state_dict().items():
            writer.add(f"model.layers.{index}.mlp.{name}", tensor.to(converter.dtype))
        error = fit.get("heldout_error", fit.get("affine_error"))
        if error is not None:
            bar.set_postfix_str(f"layer {index} held-out fit error {error:.3f}")
        records.append({"layer": index, "form": "bilinear", "rank": wanted.rank} | fit)
    return records


def read_calibration(
    model: Source, source: str | None, column: str, split: str, tokens: int, window: int, bos: str
) -> torch.Tensor:
    """Calibration windows, int64 (windows, window).

    Raises:
        InputError: if the text is missing or too short: two windows are needed, one held out.
    """
    if not source:
        raise InputError("the method needs calibration text; name it with --text.")
    tokenizer = checkpoint.load_tokenizer(model.folder)
    longest = model.config.max_position_embeddings
    if window > longest:
        raise InputError(f"--window is {window}; the source takes at most {longest} positions.")
    documents = read_documents(source, column, split)
    windows = pack_windows(documents, tokenizer, window, tokens, bos, name=source)
    if len(windows) < 2:
        raise InputError(
            f"{source}: one window of {window} tokens; the fit needs two or more, one held out: "
            "give more text or tokens, or a smaller --window."
        )
    return windows


def check_tokens(model: Source, plan: list[Plan], method: str, windows: torch.Tensor) -> None:
    """Raise InputError if down_proj's sums would have fewer tokens than unknowns an output."""
    if method == "affine":
        return
    slots = model.config.intermediate_size * max(layer.expand for layer in plan)
    fitted = int((~heldout_windows(windows)).sum()) * windows.shape[1]
    if fitted < slots:
        needed = -(-slots * windows.numel() // fitted)
        raise InputError(
            f"the calibration text gives {windows.numel()} tokens, {fitted} of them to fit on; "
            f"down_proj has {slots} unknowns for each output, so about {needed} tokens are needed: "
            "give more text or --tokens, or use --method affine."
        )


def converted_config(
    model: Source, plan: list[Plan], activation: str, fitted: bool, dtype: torch.dtype
):
    """The configuration of the converted checkpoint, auto_map included."""
    slots = model.config.intermediate_size
    fields = {
        "bilinear_form": ["gated" if layer.kept else "bilinear" for layer in plan],
        "bilinear_rank": [1 if layer.kept else layer.rank for layer in plan],
        "bilinear_activation": [activation for _ in plan],
        "bilinear_bias": [model.biased or (fitted and not layer.kept) for layer in plan],
        "bilinear_intermediate_size": [
            slots if layer.kept else slots * layer.expand for layer in plan
        ],
    }
    # One value where all layers agree, which is what most readers of a config expect.
    fields = {key: one_if_equal(values) for key, values in fields.items()}
    config = model.converted_config(**fields, dtype=dtype)
    config.architectures = [model.family.causal_lm.__name__]
    config.auto_map = model.family.auto_map
    return config


def one_if_equal(values: list):
    """The value that all entries have, else the list."""
    return values[0] if all(value == values[0] for value in values) else values


def describe_fit(record: dict) -> list[str]:
    """The layers' fit errors in a line, and a warning if they are much lower on the text fitted."""
    layers = [layer for layer in record["layers"] if "calibration_error" in layer]
    if not layers:
        return []
    worst = max(layers, key=lambda layer: layer["heldout_error"])
    heldout = median(layer["heldout_error"] for layer in layers)
    own = median(layer["calibration_error"] for layer in layers)
    lines = [
        f"Fit error of a layer's output: {heldout:.4f} on held-out tokens, {own:.4f} on those "
        f"fitted (medians); worst is layer {worst['layer']}, {worst['heldout_error']:.4f} held out."
    ]
    if heldout > OVERFIT * own:
        lines.append(
            f"The fit overfits its {record['calibration']['tokens']} tokens: more --tokens will "
            "bring it down."
        )
    return lines


def snapshot_commit(folder: Path) -> str | None:
    """The commit of a hub snapshot, which is its folder's name; None for a plain folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    return {name: version(name) for name in ("bilinearize", "torch", "transformers", "safetensors")}
