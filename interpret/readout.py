"""Vectors as tokens: what a direction of the residual stream reads and writes.

An input direction is scored against each token's embedding as the block would meet it if nothing
else were in the residual stream (`embedding / rms`); an output direction against the unembedding
with the final RMSNorm's weights folded in. Both leave out what other layers do in between, which
is more the further away they are.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize import InputError
from bilinearize.interpret.hosvd import find_hosvd
from bilinearize.interpret.layers import norm_weight, normalise
from bilinearize.interpret.tensor import BilinearTensor

DIFFERENCE = " - "


@dataclass(frozen=True)
class TokenReader:
    """The vocabulary's vectors in the residual stream."""

    tokenizer: PreTrainedTokenizerBase
    embedding: Tensor
    """(vocabulary, d), each row of root mean square 1."""
    unembedding: Tensor
    """(vocabulary, d), the final norm's weights folded in, the mean over the vocabulary taken off:
    a direction common to all tokens changes no probability."""

    def token_id(self, token: str) -> int:
        """The id of a string that is one token.

        Raises:
            InputError: if it is none or several.
        """
        vocabulary = self.tokenizer.get_vocab()
        ids = self.tokenizer(token, add_special_tokens=False).input_ids
        if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
            return ids[0]
        if token in vocabulary:
            return vocabulary[token]
        pieces = ", ".join(repr(self.text(piece)) for piece in ids[:5])
        raise InputError(
            f"{token!r} is not one token but {len(ids)} ({pieces}); name one, perhaps with a "
            "leading space."
        )

    def text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def direction(self, spec: str) -> Tensor:
        """The output direction of a token, `" Paris"`, or difference, `" he -  she"`: (d).

        Raises:
            InputError: if a name is not one token.
        """
        left, found, right = spec.partition(DIFFERENCE)
        if not (found and left and right):
            return self.unembedding[self.token_id(spec)]
        return self.unembedding[self.token_id(left)] - self.unembedding[self.token_id(right)]

    def reads(self, vectors: Tensor, count: int) -> list[dict]:
        """Tokens whose embeddings lie furthest along and against each vector, (k, d or d + 1).

        Returns:
            for each vector `most` and `least`, each a list of (text, score, id).
        """
        return self._extremes(vectors[..., : self.embedding.shape[1]], self.embedding, count)

    def writes(self, vectors: Tensor, count: int) -> list[dict]:
        """Tokens that an output vector, (k, d), makes likelier and unlikelier."""
        return self._extremes(vectors, self.unembedding, count)

    def _extremes(self, vectors: Tensor, rows: Tensor, count: int) -> list[dict]:
        scores = vectors.to(rows) @ rows.T
        results = []
        for row in scores:
            ends = {}
            for name, sign in (("most", 1), ("least", -1)):
                values, ids = (sign * row).topk(count)
                pairs = zip(ids.tolist(), values.tolist(), strict=True)
                ends[name] = [(self.text(index), sign * value, index) for index, value in pairs]
            results.append(ends)
        return results


def token_reader(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TokenReader:
    """The readers of a model's vocabulary, in float32.

    Raises:
        InputError: if the model has no embeddings or no final RMSNorm.
    """
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    if inputs is None or outputs is None:
        raise InputError(f"{type(model).__name__} has no token embeddings; name a causal LM.")
    size = min(len(tokenizer), inputs.weight.shape[0])
    embedding = normalise(inputs.weight.detach()[:size].float(), 1e-12)
    unembedding = outputs.weight.detach()[:size].float()
    final = getattr(model.base_model, "norm", None)
    unembedding = unembedding * norm_weight(final, unembedding.shape[1], "the final norm").float()
    return TokenReader(tokenizer, embedding, unembedding - unembedding.mean(0))


def named_directions(
    specs: list[str], reader: TokenReader, tensor: BilinearTensor
) -> list[tuple[str, Tensor]]:
    """Output directions by name: (name, (o)) for each.

    Args:
        specs: a token; a difference `a - b` of two; `hosvd:N`, the layer's N-th strongest output
            direction; or a `.npy` file with one vector, or one a row (a probe, an SAE's encoder).

    Raises:
        InputError: if a token is unknown, or a file unreadable or of another size.
    """
    found, strongest = [], None
    for spec in specs:
        if spec.startswith("hosvd:"):
            strongest = find_hosvd(tensor).directions if strongest is None else strongest
            number = spec.removeprefix("hosvd:")
            if not number.isdecimal() or int(number) >= len(strongest):
                raise InputError(f"{spec}: use hosvd:0 to hosvd:{len(strongest) - 1}.")
            found.append((spec, strongest[int(number)]))
        elif spec.endswith(".npy"):
            rows = read_vectors(Path(spec), tensor.outputs)
            found += [(f"{Path(spec).name}[{index}]", row) for index, row in enumerate(rows)]
        else:
            found.append((spec, reader.direction(spec)))
    return found


def read_vectors(path: Path, size: int) -> Tensor:
    """The vectors of a .npy file, (b, size).

    Raises:
        InputError: if it can't be read, or holds other sizes or NaN.
    """
    try:
        array = np.load(path, allow_pickle=False)
        rows = torch.from_numpy(np.atleast_2d(array).astype(np.float64))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable .npy file of numbers: {error}") from error
    if rows.ndim != 2 or rows.shape[1] != size:
        raise InputError(f"{path}: holds {list(array.shape)}; vectors of {size} are read.")
    if not rows.isfinite().all():
        raise InputError(f"{path}: holds NaN or infinity; give finite numbers.")
    return rows
