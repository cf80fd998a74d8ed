"""What an evaluation needs: models loaded whole, one tokenizer, windows, and that they fit."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize.eval.windows import Reading, Slice, read_slices
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer, resolve_checkpoint
from bilinearize.model.errors import InputError

TEACHER = "teacher"


@dataclass
class Setup:
    """All that is read before the pass."""

    folders: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    slices: list[Slice]
    models: dict[str, PreTrainedModel]
    vocabulary: int
    """How many logits are compared."""

    @property
    def students(self) -> dict[str, PreTrainedModel]:
        """The candidates."""
        return {name: model for name, model in self.models.items() if name != TEACHER}


def prepare(
    sources: Mapping[str, str],
    revision: str | None,
    reading: Reading,
    dtype: torch.dtype,
    device: torch.device,
) -> Setup:
    """Read the text, load the models and check that they go together.

    Raises:
        InputError: that names what can't be had or doesn't fit.
    """
    folders = {
        name: resolve_checkpoint(source, revision if name == TEACHER else None)
        for name, source in sources.items()
    }
    tokenizer = load_tokenizer(folders[TEACHER])
    slices = read_slices(tokenizer, reading)
    for name, folder in folders.items():
        if name != TEACHER:
            check_tokenizer(name, folder, tokenizer, slices, reading)
    models = {
        name: load_model(name, folder, dtype, device, reading.window)
        for name, folder in folders.items()
    }
    return Setup(folders, tokenizer, slices, models, common_vocabulary(models, tokenizer, slices))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the whole tokenizer where it is a fast one, else of its vocabulary."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = json.dumps(sorted(tokenizer.get_vocab().items()))
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return hashlib.sha256(f"{special} {content}".encode()).hexdigest()


def check_tokenizer(
    name: str,
    folder: Path,
    teacher: PreTrainedTokenizerBase,
    slices: Sequence[Slice],
    reading: Reading,
) -> None:
    """Check that a candidate's tokenizer makes the same tokens of the evaluated text.

    Args:
        slices: what the teacher's tokenizer makes of `reading`.

    Raises:
        InputError: that says what differs.
    """
    own = load_tokenizer(folder)
    if tokenizer_hash(own) == tokenizer_hash(teacher):
        return
    remedy = "only models that read the same tokens can be compared."
    mine, theirs = own.get_vocab(), teacher.get_vocab()
    if mine != theirs:
        token = min(set(mine.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))[0]
        raise InputError(
            f"{name}: {folder} has another tokenizer than the teacher: {len(mine)} tokens against "
            f"{len(theirs)}, {token!r} is {mine.get(token)} against {theirs.get(token)}; {remedy}"
        )
    for kind in ("bos_token_id", "eos_token_id"):
        if getattr(own, kind) != getattr(teacher, kind):
            raise InputError(
                f"{name}: {folder} has another tokenizer than the teacher: {kind} "
                f"{getattr(own, kind)} against {getattr(teacher, kind)}; {remedy}"
            )
    for ours, theirs in zip(slices, read_slices(own, reading), strict=True):
        if ours.facts["tokens_sha256"] != theirs.facts["tokens_sha256"]:
            raise InputError(
                f"{name}: {folder} has another tokenizer than the teacher: the same vocabulary, "
                f"but other tokens for {ours.facts['text']}; {remedy}"
            )


def load_model(
    name: str, folder: Path, dtype: torch.dtype, device: torch.device, window: int
) -> PreTrainedModel:
    """Load a model whole, on its device.

    Raises:
        InputError: if the checkpoint is not whole, or a window longer than its context.
    """
    model = load_causal_lm(folder, dtype)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and window > context:
        raise InputError(
            f"{name}: a window of {window} tokens is longer than the context of {folder}, "
            f"{context}; choose a shorter window."
        )
    return model.to(device)  # pyright: ignore[reportArgumentType]


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many logits the model gives, padding included."""
    return model.config.get_text_config().vocab_size


def common_vocabulary(
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    slices: Sequence[Slice],
) -> int:
    """How many logits to compare: those that all models have.

    Checkpoints pad their vocabulary to different widths; where they do, the narrowest counts.

    Raises:
        InputError: if a model has no logit for a token of the text, or cutting to it would take
            tokens from the others.
    """
    widths = {name: vocabulary_size(model) for name, model in models.items()}
    narrowest = min(widths, key=lambda name: widths[name])
    needed = max(int(window.ids.max()) for part in slices for window in part.windows) + 1
    if len(set(widths.values())) > 1:
        needed = max(needed, max(tokenizer.get_vocab().values()) + 1)
    if widths[narrowest] < needed:
        raise InputError(
            f"{narrowest}: {widths[narrowest]} logits for a tokenizer of {needed} tokens; "
            "the checkpoint and the tokenizer don't belong together."
        )
    return widths[narrowest]
