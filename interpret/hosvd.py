"""Decompositions with no direction given: HOSVD by the slots' Gram matrix, and output bases.

The singular value decomposition of the (o, i * i) flattening needs only `B B^T = V G V^T`, where G
holds the inner products of the products' symmetric matrices,

    <sym(q_m k_m^T), sym(q_n k_n^T)> = [(q_m . q_n)(k_m . k_n) + (q_m . k_n)(k_m . q_n)] / 2.

So neither the tensor (o * i * i numbers) nor G (n * n) is ever held: G is made in strips. Left
factors are output directions; the right factors are their interaction matrices, to be
eigendecomposed in turn (arXiv 2410.08417, section 3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bilinearize import InputError
from bilinearize.interpret.spectrum import Spectrum, find_spectrum
from bilinearize.interpret.tensor import BilinearTensor, check_vectors

STRIP = 1024
"""Rows of the Gram matrix made at a time."""


@dataclass(frozen=True)
class Hosvd:
    """The output-mode singular value decomposition, sorted by falling singular value."""

    tensor: BilinearTensor
    directions: Tensor
    """(o, o), orthonormal rows."""
    values: Tensor
    """(o); `values[k]` is the Frobenius norm of the interaction matrix of `directions[k]`."""

    def output(self, x: Tensor, keep: int | None = None) -> Tensor:
        """The block's output within the first `keep` directions: (..., inputs) to (..., o)."""
        kept = self.directions[:keep]
        return self.tensor.output(x) @ kept.T @ kept

    def tail(self, keep: int) -> Tensor:
        """Frobenius norm of the tensor outside the first `keep` directions; the least possible."""
        return self.values[keep:].square().sum().sqrt()

    def effective_rank(self) -> float:
        """`(sum s)^2 / sum s^2`: how many output directions the block spreads over."""
        return float(self.values.sum().square() / self.values.square().sum())


def output_gram(tensor: BilinearTensor) -> Tensor:
    """`B B^T`, (o, o): inner products of the interaction matrices of the output coordinates."""
    q, k, v = tensor.query, tensor.key, tensor.value
    gram = torch.zeros(tensor.outputs, tensor.outputs, dtype=v.dtype, device=v.device)
    for start in range(0, q.shape[0], STRIP):
        rows = slice(start, start + STRIP)
        strip = (q[rows] @ q.T).mul_(k[rows] @ k.T)
        strip.add_((q[rows] @ k.T).mul_(k[rows] @ q.T)).div_(2)
        gram += v[:, rows] @ (strip @ v.T)
    return (gram + gram.T) / 2


def find_hosvd(tensor: BilinearTensor) -> Hosvd:
    """Output directions by how strongly the block writes to them.

    Singular values under about 1e-8 of the largest (fp64) are rounding: they are roots of
    eigenvalues.
    """
    squares, vectors = torch.linalg.eigh(output_gram(tensor))
    return Hosvd(tensor, vectors.flip(1).T.contiguous(), squares.flip(0).clamp(min=0).sqrt())


@dataclass(frozen=True)
class OutputBasis:
    """A change of the output to f given readers, and back (arXiv 2410.08417, appendix K)."""

    spectrum: Spectrum
    dual: Tensor
    """(o, f) pseudo-inverse of the readers: what to add up, `y = sum_f dual_f (u_f . y)`."""

    def output(self, x: Tensor, keep: int | None = None) -> Tensor:
        """The block's output, each reader by its first `keep` eigenvectors: to (..., o)."""
        return self.spectrum.output(x, keep) @ self.dual.T


def change_basis(
    tensor: BilinearTensor, directions: Tensor, keep: int | None = None
) -> OutputBasis:
    """Express the output in a full basis, such as all rows of an SAE's encoder.

    Args:
        directions: (f, o) readers, f >= o, of full rank.
        keep: eigenvectors kept for each reader.

    Raises:
        InputError: if the readers don't span the output, so that it can't be put together again.
    """
    directions = check_vectors(directions, tensor.outputs, "direction").to(tensor.value)
    rank = int(torch.linalg.matrix_rank(directions))
    if rank < tensor.outputs:
        raise InputError(
            f"the {len(directions)} directions span {rank} of {tensor.outputs} dimensions; a basis "
            "change needs all of them (find_spectrum takes any)."
        )
    return OutputBasis(find_spectrum(tensor, directions, keep), torch.linalg.pinv(directions))
