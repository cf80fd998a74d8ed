"""What was evaluated and how, as it stands in `eval.json`."""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version

from bilinearize.eval.inputs import TEACHER, Setup, tokenizer_hash
from bilinearize.eval.origin import read_origin
from bilinearize.eval.processes import team
from bilinearize.eval.statistics import LEVEL, block_length
from bilinearize.eval.windows import Reading
from bilinearize.model.checkpoint import weights_sha256
from bilinearize.model.text import adds_bos


def text_facts(setup: Setup, reading: Reading) -> dict:
    """The protocol, and each slice's source, size and hashes."""
    digest = hashlib.sha256()
    for part in setup.slices:
        digest.update(bytes.fromhex(part.facts["tokens_sha256"]))
    free = reading.protocol.name == "windows"
    return {
        "name": reading.protocol.name,
        "window": reading.window,
        "stride": reading.stride,
        "scored": reading.protocol.scored,
        "windows": sum(len(part.windows) for part in setup.slices),
        "tokens_scored": sum(part.tokens for part in setup.slices),
        "bos": reading.bos if free else "protocol",
        "bos_in_every_window": free and adds_bos(setup.tokenizer, reading.bos),
        "slices": {part.name: part.facts for part in setup.slices},
        "tokens_sha256": digest.hexdigest(),
        "tokenizer_sha256": tokenizer_hash(setup.tokenizer),
    }


def run_facts(setup: Setup, dtype: str, batch_size: int) -> dict:
    """How the models ran."""
    packages = ("bilinearize", "torch", "transformers", "numpy")
    teacher = setup.models[TEACHER]
    return {
        "vocabulary": setup.vocabulary,
        "dtype": dtype,
        "device": teacher.device.type,
        "attention": teacher.config._attn_implementation,
        "batch_size": batch_size,
        "processes": team().num_processes,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def interval_facts(setup: Setup, samples: int, seed: int) -> dict:
    """How intervals were made."""
    by_document = setup.slices[0].windows[0].document is not None
    how = (
        "bootstrap over documents"
        if by_document
        else "circular block bootstrap over windows, recoloured for what blocks miss"
    )
    lengths = {
        part.name: 1 if by_document else block_length(len(part.windows)) for part in setup.slices
    }
    return {
        "level": LEVEL,
        "method": f"{how}: Student's t times its standard error, bent for skewness (Hall 1992)",
        "unit": "document" if by_document else "window",
        "block_windows": lengths,
        "samples": samples,
        "seed": seed,
    }


def model_facts(setup: Setup, sources: Mapping[str, str]) -> dict[str, dict]:
    """Which models they were."""
    return {
        name: {
            "path": str(sources[name]),
            "folder": str(setup.folders[name]),
            "model_type": model.config.model_type,
            "parameters": model.num_parameters(),
            "weights_sha256": weights_sha256(setup.folders[name]),
            "origin": read_origin(setup.folders[name]),
        }
        for name, model in setup.models.items()
    }
