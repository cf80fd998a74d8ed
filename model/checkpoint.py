"""Checkpoint folders: find a source, list its tensors, load fully or not at all, write whole.

A checkpoint is named by a local folder, a hub id, or a GGUF file, which is dequantised once into a
cache folder (`$BILINEARIZE_CACHE`, else `~/.cache/bilinearize`).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.model.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What a converted folder takes over from its source byte for byte.
CARRIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


def resolve_checkpoint(source: str, revision: str | None = None) -> Path:
    """The local folder of `source`: itself, a downloaded hub snapshot, or a dequantised GGUF.

    Raises:
        InputError: if there is no such folder, hub id or file, or the folder has no config.json.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return dequantise_gguf(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path}: no config.json; name the folder of a Hugging Face checkpoint."
            )
        return path
    if path.is_file() or source.endswith(".gguf") or source.count("/") > 1 or source[:1] in "./~":
        raise InputError(f"{source}: no such checkpoint folder or .gguf file.")
    patterns = ["*.safetensors", "*.json", "README.md", *CARRIED]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{source}: neither a local folder nor a hub model that can be had: {reason}"
        ) from error


def dequantise_gguf(path: Path) -> Path:
    """Write the fp32 weights and the tokenizer of a GGUF file into the cache; returns that folder.

    Raises:
        InputError: if transformers can't read the file.
    """
    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()
    cache = os.environ.get("BILINEARIZE_CACHE") or Path("~/.cache/bilinearize").expanduser()
    folder = Path(cache) / f"{path.stem}-{hashlib.sha256(key).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        names = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**names)
    except Exception as error:  # a damaged file fails in many ways
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a GGUF model that transformers reads: {reason}") from error
    # The weights are plain fp32 from here on; with the entry left in, saving is refused.
    model.config.__dict__.pop("quantization_config", None)
    model.__dict__.pop("hf_quantizer", None)
    with atomic_folder(folder) as partial:
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
    return folder


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration of a checkpoint folder.

    Raises:
        InputError: if config.json is unreadable or its model_type unknown.
    """
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder / 'config.json'}: {reason}") from error


def list_tensors(folder: Path) -> dict[str, Path]:
    """Each tensor's name and the safetensors file that holds it, every file checked to be whole.

    Raises:
        InputError: if there are no safetensors, or a shard is missing, truncated, or lacks a tensor
            that the index promises.
    """
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        promised = {name: folder / file for name, file in weight_map.items()}
    elif (folder / SINGLE).is_file():
        promised = {}
    else:
        raise InputError(f"{folder}: no {SINGLE} or {INDEX}; only safetensors weights are read.")
    tensors = {}
    for file in sorted(set(promised.values())) or [folder / SINGLE]:
        if not file.is_file():
            raise InputError(f"{file}: shard named by {INDEX} is missing; download it again.")
        try:
            with safe_open(file, framework="pt") as shard:
                tensors.update(dict.fromkeys(shard.keys(), file))
        except SafetensorError as error:
            raise InputError(
                f"{file}: truncated or damaged ({error}); download it again."
            ) from error
    for name, file in promised.items():
        if tensors.get(name) != file:
            raise InputError(f"{file}: lacks {name}, which {INDEX} promises; download it again.")
    return tensors


def weights_sha256(folder: Path) -> str:
    """SHA-256 over the names and contents of a checkpoint's weight files."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def load_causal_lm(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal LM with every weight accounted for.

    Raises:
        InputError: if a file is damaged, or any tensor is missing, unexpected or of another shape.
    """
    list_tensors(folder)
    load_config(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
        model, info = loaded
    except (ValueError, OSError, RuntimeError) as error:
        raise InputError(f"{folder}: {str(error).strip().splitlines()[0]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            names = ", ".join(sorted(map(str, info[kind]))[:3])
            raise InputError(
                f"{folder}: {kind.replace('_', ' ')}: {names}; the checkpoint is not whole."
            )
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        InputError: if the folder has none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder}: no tokenizer that transformers reads: {reason}") from error


def carry_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and licence byte for byte."""
    for pattern in CARRIED:
        for file in sorted(source.glob(pattern)):
            if file.is_dir():
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, target / file.name)


def check_new(folder: Path) -> None:
    """Raise InputError if `folder` exists already, or can't be made."""
    if folder.exists():
        raise InputError(f"{folder}: exists already; name a new folder or remove it.")
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"{folder}: can't be made, {parent} is not a folder one can write to.")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield `folder` + `.partial`, renamed to `folder` when the block ends without an exception.

    On an exception the partial folder is removed. After `kill -9` it stays, under a name that is no
    finished result; the next call replaces it. Write config.json last, so that it never loads.

    Raises:
        InputError: if `folder` exists already.
    """
    check_new(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    os.rename(partial, folder)
