"""Convert a checkpoint: read layer by layer, fit, write shard by shard, rename when whole."""

import copy
import json
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from bilinearize.convert.card import write_card
from bilinearize.convert.fit import NO_CORRECTION
from bilinearize.convert.source import Layer, Source
from bilinearize.convert.stream import Stream
from bilinearize.convert.writer import ShardWriter
from bilinearize.model import checkpoint
from bilinearize.model.errors import InputError
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_
from bilinearize.model.text import fingerprint, pack_windows, read_documents

FITTED = ("refit", "affine")
# Times that gates and down_proj are fitted in turn.
ROUNDS = 2


def convert(
    source: str,
    out: Path,
    *,
    method: str = "refit",
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
    windows = None
    if method in FITTED:
        windows = read_calibration(model, text, text_column, split, tokens, window, bos)
    stored_dtype = model.dtype if dtype == "auto" else getattr(torch, dtype)
    config = converted_config(model, method, stored_dtype)
    record = {
        "format": 1,
        "source": source,
        "revision": revision or snapshot_commit(model.folder),
        "source_model_type": model.config.model_type,
        "method": method,
        "form": config.bilinear_form,
        "rank": config.bilinear_rank,
        "activation": config.bilinear_activation,
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
        converter = LayerConverter(model, method, stored_dtype, place)
        if windows is not None:
            converter.stream = Stream(model, windows, place, budget, partial)
        record["layers"] = convert_layers(model, converter, writer, stored_dtype)
        record["parameters"] = writer.parameters
        writer.finish()
        checkpoint.carry_files(model.folder, partial)
        shutil.copyfile(module_file(model), partial / f"{model.family.module}.py")
        record["seconds"] = round(time.monotonic() - started, 1)
        record["versions"] = versions()
        (partial / "bilinearize.json").write_text(json.dumps(record, indent=2) + "\n")
        write_card(partial / "README.md", record)
        config.to_json_file(partial / "config.json", use_diff=False)
    return record


class LayerConverter:
    """Turns one loaded decoder layer's MLP into the block that replaces it."""

    def __init__(self, model: Source, method: str, dtype: torch.dtype, device: torch.device):
        self.model = model
        self.method = method
        self.dtype = dtype
        self.device = device
        self.stream: Stream | None = None
        self.ridge = 1e-2

    @torch.no_grad()
    def __call__(self, layer: Layer) -> tuple[BilinearMLP, dict]:
        """The block, holding weights as they will be stored, and the layer's record."""
        mlp = layer.mlp
        if self.stream is None:
            slope = derivative_at_zero(mlp.act_fn)
            block = bilinear_block(mlp, torch.tensor(slope), None)
            balance_(block)
            return self._stored(block), {}
        self.stream.advance_teacher(layer)
        block, record = self._fit(mlp, self.stream, *self.stream.fit_gates(layer))
        balance_(block)
        block = self._stored(block)
        self.stream.advance_student(layer, block)
        return block, record

    def _fit(
        self, mlp: Any, stream: Stream, slope: torch.Tensor, intercept: torch.Tensor
    ) -> tuple[BilinearMLP, dict]:
        """Gates and down_proj in turn, the best by held-out error kept; see `ROUNDS`."""
        gates = slope, intercept
        block = bilinear_block(mlp, *gates)
        best = block
        record: dict[str, Any] = {}
        for _ in range(ROUNDS if self.method == "refit" else 1):
            gates = stream.join_gates(mlp, block, *gates)
            block = bilinear_block(mlp, *gates)
            solved = stream.fit_down(mlp, block, self.ridge)
            if not record:
                best = block
                record = {"affine_error": solved.uncorrected_error}
                if self.method == "affine":
                    break
                record |= {"heldout_error": solved.uncorrected_error, "ridges": [], "kept_round": 0}
            record["ridges"].append(None if solved.ridge == NO_CORRECTION else solved.ridge)
            if solved.ridge != NO_CORRECTION:
                self.ridge = solved.ridge
            if solved.heldout_error <= record["heldout_error"]:
                best = corrected(block, solved.correction)
                record["heldout_error"] = solved.heldout_error
                record["calibration_error"] = solved.calibration_error
                record["kept_round"] = len(record["ridges"])
            # The next round must not see the held-out tokens.
            block = corrected(block, solved.fitted_correction)
        return best, record

    def _stored(self, block: BilinearMLP) -> BilinearMLP:
        # Round now, so that the layers above are fitted on what will really be loaded.
        return block.to(self.dtype).float()


def bilinear_block(
    mlp: Any, slope: torch.Tensor, intercept: torch.Tensor | None
) -> BilinearMLP:
    """The gated MLP with `act(g)` replaced by `slope g + intercept`, per slot.

    Has biases if the source has, or if `intercept` is given.
    """
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    biased = intercept is not None or gate.bias is not None
    block = BilinearMLP(gate.in_features, gate.out_features, bias=biased).to(gate.weight.device)
    slope = slope.to(gate.weight)
    block.gate_proj.weight.copy_(slope.expand(gate.out_features)[:, None] * gate.weight)
    block.up_proj.weight.copy_(up.weight)
    block.down_proj.weight.copy_(down.weight)
    if biased:
        for new, old in ((block.gate_proj, gate), (block.up_proj, up), (block.down_proj, down)):
            new.bias.zero_() if old.bias is None else new.bias.copy_(old.bias)
        block.gate_proj.bias.mul_(slope)
        if intercept is not None:
            block.gate_proj.bias.add_(intercept.to(gate.weight))
    return block.requires_grad_(False)


def corrected(block: BilinearMLP, correction: torch.Tensor) -> BilinearMLP:
    """A copy of `block` with `correction` (intermediate_size + 1, hidden_size) on its down_proj."""
    block = copy.deepcopy(block)
    block.down_proj.weight.add_(correction[:-1].T.float())
    block.down_proj.bias.add_(correction[-1].float())
    return block


def derivative_at_zero(activation: Any) -> float:
    """The slope of the activation at 0: 1/2 for silu and gelu."""
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(activation(zero), zero)
    return slope.item()


def convert_layers(
    model: Source, converter: LayerConverter, writer: ShardWriter, dtype: torch.dtype
) -> list[dict]:
    """Write every tensor of the model, MLPs converted; returns one record a layer."""
    records = []
    for name in model.other_names():
        writer.add(name, model.read(name).to(dtype))
    bar = tqdm(range(model.layers), desc=f"convert ({converter.method})", unit="layer")
    for index in bar:
        layer, stored = model.load_layer(index, converter.device)
        replaced = model.mlp_names(index, stored)
        for name, tensor in stored.items():
            if name not in replaced or converter.method == "gated":
                writer.add(name, tensor.to(dtype))
        record: dict = {"layer": index}
        if converter.method != "gated":
            block, fit = converter(layer)
            for name, tensor in block.state_dict().items():
                writer.add(f"model.layers.{index}.mlp.{name}", tensor.to(dtype))
            record |= fit
            error = fit.get("heldout_error", fit.get("affine_error"))
            if error is not None:
                bar.set_postfix_str(f"layer {index} held-out fit error {error:.3f}")
        records.append(record)
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


def converted_config(model: Source, method: str, dtype: torch.dtype):
    """The configuration of the converted checkpoint, auto_map included."""
    biased = method in FITTED or model.biased
    form = "gated" if method == "gated" else "bilinear"
    config = model.converted_config(bilinear_form=form, bilinear_bias=biased, dtype=dtype)
    config.architectures = [model.family.causal_lm.__name__]
    config.auto_map = model.family.auto_map
    return config


def module_file(model: Source) -> str:
    """Path of the self-contained file that travels with the checkpoint."""
    import importlib

    file = importlib.import_module(model.family.config.__module__).__file__
    assert file is not None
    return file


def snapshot_commit(folder: Path) -> str | None:
    """The commit of a hub snapshot, which is its folder's name; None for a plain folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def choose_device(device: str) -> torch.device:
    """`auto` is a GPU if there is one.

    Raises:
        InputError: for a device that torch doesn't know or have.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    return torch.device(device)


def parse_size(size: str) -> int:
    """Bytes of "5GB", "800MB" or a plain number.

    Raises:
        InputError: for anything else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, factor = (
        (size[:-2], units[size[-2:].upper()]) if size[-2:].upper() in units else (size, 1)
    )
    try:
        value = int(float(number) * factor)
    except ValueError:
        value = 0
    if value <= 0:
        raise InputError(f"{size!r} is no size; write it like 5GB or 800MB.")
    return value


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    return {name: version(name) for name in ("bilinearize", "torch", "transformers", "safetensors")}
