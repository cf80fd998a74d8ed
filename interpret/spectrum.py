"""Eigenvectors of what a block writes to a direction: `u . y(x) = sum_k lambda_k (v_k . x~)^2`.

After Pearce et al. (arXiv 2410.08417, section 3.2): features for the outputs, none for the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bilinearize import InputError
from bilinearize.interpret.tensor import BilinearTensor, check_vectors


@dataclass(frozen=True)
class Spectrum:
    """Eigendecompositions for a batch of b directions, sorted by falling |eigenvalue|."""

    tensor: BilinearTensor
    directions: Tensor
    """(b, o)"""
    values: Tensor
    """(b, i), all of them."""
    vectors: Tensor
    """(b, k, i), unit rows, the first k of them."""

    def activations(self, x: Tensor) -> Tensor:
        """How much of each kept eigenvector is in x, `v . x~`: (..., inputs) to (..., b, k)."""
        return torch.einsum("...i,bki->...bk", self.tensor.augment(x), self.vectors)

    def contributions(self, x: Tensor) -> Tensor:
        """What each kept eigenvector adds to each direction: (..., inputs) to (..., b, k).

        With all eigenvectors kept, the sum over k is `u . y(x)` exactly.
        """
        return self.values[:, : self.vectors.shape[1]] * self.activations(x).square()

    def output(self, x: Tensor, keep: int | None = None) -> Tensor:
        """`u . y(x)` by the first `keep` eigenvectors (all that were kept): to (..., b).

        The error is at most `|lambda_keep+1| |x~|^2`, in the Frobenius norm `tail(keep)`.

        Raises:
            InputError: if more eigenvectors are asked for than were kept.
        """
        if keep is not None and not 0 <= keep <= self.vectors.shape[1]:
            raise InputError(f"keep is {keep}; {self.vectors.shape[1]} eigenvectors are there.")
        kept = self.vectors[:, :keep]
        activations = torch.einsum("...i,bki->...bk", self.tensor.augment(x), kept)
        return (self.values[:, : kept.shape[1]] * activations.square()).sum(-1)

    def tail(self, keep: int) -> Tensor:
        """Frobenius norm of what the first `keep` eigenvectors leave out, (b)."""
        return self.values[:, keep:].square().sum(1).sqrt()

    def effective_rank(self) -> Tensor:
        """`(sum |lambda|)^2 / sum lambda^2` of each direction, (b): 1 to i, 0 for a zero matrix.

        The measure of the authors' code (arXiv 2410.08417, `src/sae/functions.py`).
        """
        squares = self.values.square().sum(1)
        ranks = self.values.abs().sum(1).square() / squares
        return torch.where(squares > 0, ranks, torch.zeros_like(ranks))


def find_spectrum(tensor: BilinearTensor, directions: Tensor, keep: int | None = None) -> Spectrum:
    """Eigendecompose the interaction matrix of each direction.

    Args:
        directions: (b, o), or one of size (o).
        keep: eigenvectors kept for each direction; None keeps all, which takes b * i * i numbers.

    Raises:
        InputError: if a direction has another size or is not finite.
    """
    directions = check_vectors(directions, tensor.outputs, "direction")
    directions = directions.reshape(-1, tensor.outputs).to(tensor.value)
    size = tensor.query.shape[1]
    kept = size if keep is None else min(keep, size)
    all_values = tensor.query.new_empty(len(directions), size)
    all_vectors = tensor.query.new_empty(len(directions), kept, size)
    for index, direction in enumerate(directions):
        values, vectors = torch.linalg.eigh(tensor.interaction(direction))
        order = values.abs().argsort(descending=True)
        all_values[index] = values[order]
        torch.index_select(vectors.mT, 0, order[:kept], out=all_vectors[index])
    return Spectrum(tensor, directions, all_values, all_vectors)


def correlate(a: Tensor, b: Tensor, where: Tensor | None = None) -> Tensor:
    """Pearson correlation over the first dimension, (tokens, ...) twice to (...).

    Args:
        where: (tokens, ...) booleans; only these tokens count, chosen for each column.

    Returns:
        NaN where one side does not vary or fewer than two tokens count.
    """
    mask = torch.ones_like(a) if where is None else where.to(a)
    count = mask.sum(0)
    a = (a - (a * mask).sum(0) / count) * mask
    b = (b - (b * mask).sum(0) / count) * mask
    return (a * b).sum(0) / (a.square().sum(0) * b.square().sum(0)).sqrt()
