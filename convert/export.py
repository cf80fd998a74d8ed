"""The same model written otherwise: stock classes, signed squares, or the canonical form."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers import PretrainedConfig

from bilinearize.convert.options import parse_size
from bilinearize.convert.writer import ShardWriter
from bilinearize.model import checkpoint
from bilinearize.model.card import write_card
from bilinearize.model.errors import InputError
from bilinearize.model.families import CONVERTED_TYPES, Family
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import canonical, signed_squares

# Families whose own MLP has biases, switched by this field of theirs.
BIASED = ("llama", "smollm3", "granite", "hyperclovax", "helium", "seed_oss")
# Families that are a Llama but for what their config sets: what LlamaConfig needs besides.
AS_LLAMA: dict[str, dict[str, Any]] = {
    "mistral": {"attention_bias": False},
    "qwen2": {"attention_bias": True},
}
# A bias that a Llama has along with those of q, k and v.
ZEROS = {"qwen2": "self_attn.o_proj.bias"}
# Families that keep gate_proj and up_proj in one matrix.
FUSED = ("phi3", "glm", "glm4")
FORMATS = ("stock", "squares", "canonical")


def export(
    source: str,
    out: Path,
    *,
    format: str = "stock",  # noqa: A002
    dtype: str = "auto",
    max_shard_size: str = "5GB",
) -> dict:
    """Write `out`, the converted checkpoint `source` in another form; the function stays the same.

    Args:
        format: "stock", the family's own class in transformers with `hidden_act: "linear"`, or the
            nearest that has biases in its MLP, so that no custom code is needed; "squares", each
            product as a difference of two squares; "canonical", one form for all gauge copies.
        dtype: of the written weights; "auto" keeps the source's. The rewriting is in float64.

    Returns:
        What `export.json` in `out` holds.

    Raises:
        InputError: if the source is no converted checkpoint, or can't be written in this form;
            nothing is written then.
    """
    if format not in FORMATS:
        raise InputError(f"--format is {format!r}; use one of {', '.join(FORMATS)}.")
    checkpoint.check_new(out)
    shard_bytes = parse_size(max_shard_size)
    folder = checkpoint.resolve_checkpoint(source)
    config: Any = checkpoint.load_config(folder)
    family = CONVERTED_TYPES.get(config.model_type)
    if family is None:
        raise InputError(
            f"{source}: its model_type is {config.model_type}; export takes a converted checkpoint "
            "(bilinearize convert)."
        )
    check_layers(config, source)
    target, note = TARGETS[format](config, family)
    record = {"format": format, "source": source, "class": target.architectures[0], "note": note}
    with checkpoint.atomic_folder(out) as partial:
        writer = ShardWriter(partial, shard_bytes)
        zeros = ZEROS.get(family.source_type) if target.model_type == "llama" else None
        rewrite = rewriter(format, target, family)
        write_tensors(folder, config, writer, rewrite, dtype, zeros)
        record["parameters"] = writer.parameters
        writer.finish()
        checkpoint.carry_files(folder, partial)
        if format != "stock":
            shutil.copyfile(family.path, partial / f"{family.module}.py")
        write_records(folder, partial, record)
        target.to_json_file(partial / "config.json", use_diff=False)
        if (partial / "bilinearize.json").is_file():
            write_card(partial)
    return record


def check_layers(config: Any, source: str) -> None:
    """Raise InputError unless every layer is a bilinear block without an activation."""
    for layer in range(config.num_hidden_layers):
        block = config.bilinear_layer(layer)
        if block["form"] != "bilinear" or block["activation"] != "identity":
            raise InputError(
                f"{source}: layer {layer} is {block['form']} with activation "
                f"{block['activation']}; only bilinear blocks with the identity are exported: "
                "convert all layers, with --activation identity."
            )


def stock_config(config: Any, family: Family) -> tuple[PretrainedConfig, str]:
    """The configuration of the stock class, and what to know about it."""
    fields = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("bilinear_") and key not in ("auto_map", "model_type")
    }
    layers = [config.bilinear_layer(layer) for layer in range(config.num_hidden_layers)]
    fields["intermediate_size"] = max(one["intermediate_size"] * one["rank"] for one in layers)
    fields[family.row.activation] = "linear"
    row, note = family.row, f"{family.row.prefix}'s own class"
    kind = family.source_type
    if any(block["bias"] for block in layers):
        if kind in AS_LLAMA:
            check_llama(config, kind)
            row = CONVERTED_TYPES["bilinear_llama"].row
            fields |= AS_LLAMA[kind]
            note = f"a Llama: {family.row.prefix}'s MLP has no biases, and is a Llama's otherwise"
        elif kind not in BIASED:
            raise InputError(
                f"{kind}: its stock MLP has no biases, and no other stock class equals it "
                "otherwise; convert with --method taylor (no biases), or use the custom class."
            )
        fields["mlp_bias"] = True
    fields["architectures"] = [row.class_name("ForCausalLM").removeprefix("Bilinear")]
    return row.source_class("Config").from_dict(fields), note


def check_llama(config: Any, kind: str) -> None:
    """Raise InputError for attention that a Llama does not have."""
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    if used and window is not None and window < config.max_position_embeddings:
        raise InputError(
            f"{kind}: attention slides over {window} tokens, which a Llama's does not, and the "
            "family's own MLP has no biases; use the custom class."
        )


def _own_config(form: str) -> Callable[[Any, Family], tuple[PretrainedConfig, str]]:
    def configure(config: Any, family: Family) -> tuple[PretrainedConfig, str]:
        fields = config.to_dict()
        if form == "squares":
            sizes = []
            for layer in range(config.num_hidden_layers):
                block = config.bilinear_layer(layer)
                sizes.append(2 * block["rank"] * block["intermediate_size"])
            fields |= {"bilinear_form": "squares", "bilinear_rank": 1}
            fields["bilinear_intermediate_size"] = sizes
        note = {"squares": "signed squares", "canonical": "canonical gauge"}[form]
        return family.config.from_dict(fields), note

    return configure


TARGETS = {
    "stock": stock_config,
    "squares": _own_config("squares"),
    "canonical": _own_config("canonical"),
}


def rewriter(
    format: str,  # noqa: A002
    target: Any,
    family: Family,
) -> Callable[[BilinearMLP], dict[str, torch.Tensor]]:
    """What turns a block (float64) into the tensors that are written, named as in the MLP."""
    if format == "canonical":
        return lambda block: canonical(block).state_dict()
    if format == "squares":
        return lambda block: signed_squares(block).state_dict()
    biased, size = getattr(target, "mlp_bias", False), target.intermediate_size
    fused = family.source_type in FUSED
    return lambda block: stock_tensors(block, size, biased, fused)


def stock_tensors(
    block: BilinearMLP, size: int, biased: bool, fused: bool
) -> dict[str, torch.Tensor]:
    """A stock gated MLP's tensors: a slot for each factor, empty slots up to `size`."""
    value = block.down_proj.weight.repeat_interleave(block.rank, 1)
    empty = size - value.shape[1]
    found = {
        "gate_proj.weight": nn.functional.pad(block.gate_proj.weight, (0, 0, 0, empty)),
        "up_proj.weight": nn.functional.pad(block.up_proj.weight, (0, 0, 0, empty)),
        "down_proj.weight": nn.functional.pad(value, (0, empty)),
    }
    if biased:
        for name, linear in block.named_children():
            if isinstance(linear, nn.Linear):
                bias = linear.bias
                if bias is None:
                    bias = linear.weight.new_zeros(len(linear.weight))
                padding = empty if name != "down_proj" else 0
                found[f"{name}.bias"] = nn.functional.pad(bias, (0, padding))
    if fused:
        parts = [found.pop("gate_proj.weight"), found.pop("up_proj.weight")]
        found["gate_up_proj.weight"] = torch.cat(parts)
    return found


@torch.no_grad()
def write_tensors(
    folder: Path, config: Any, writer: ShardWriter, rewrite, dtype: str, zeros: str | None
) -> None:
    """Every tensor of the checkpoint, the MLPs rewritten, one layer in memory at a time.

    `zeros` names a bias that each layer gets, of zeros, where the source has none.
    """
    files = checkpoint.list_tensors(folder)

    def read(name: str) -> torch.Tensor:
        with safe_open(files[name], framework="pt") as shard:
            return shard.get_tensor(name)

    def add(name: str, tensor: torch.Tensor, kept: torch.dtype) -> None:
        writer.add(name, tensor.to(kept if dtype == "auto" else getattr(torch, dtype)))

    mlps = [name for name in files if ".mlp." in name]
    for name in files:
        if name not in mlps:
            add(name, read(name), read(name).dtype)
    for layer in tqdm(range(config.num_hidden_layers), desc="export", unit="layer"):
        prefix = f"model.layers.{layer}.mlp."
        stored = {name: read(name) for name in mlps if name.startswith(prefix)}
        block = BilinearMLP(**config.bilinear_layer(layer)).double()
        block.load_state_dict({name.removeprefix(prefix): part for name, part in stored.items()})
        kept = next(iter(stored.values())).dtype
        for name, tensor in rewrite(block).items():
            add(prefix + name, tensor, kept)
        if zeros is not None and f"model.layers.{layer}.{zeros}" not in files:
            add(f"model.layers.{layer}.{zeros}", torch.zeros(config.hidden_size), kept)


def write_records(folder: Path, partial: Path, record: dict) -> None:
    """export.json, and the records of what was exported as they were; the card is made of them."""
    (partial / "export.json").write_text(json.dumps(record, indent=2) + "\n")
    for name in ("bilinearize.json", "finetune.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, partial / name)
