"""Interactions of given features: the tensor in the bases of sparse autoencoders, or any other.

With `x = sum_b z_b d_b + d_0` (decoder columns d_b, its bias d_0) an output feature with encoder
row e reads `e . y(x) = sum_bc T_bc z_b z_c`, where the constant is one more feature that is always
1 (arXiv 2410.08417, section 3.1). T is made for one output feature at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bilinearize.interpret.tensor import BilinearTensor, check_vectors


@dataclass(frozen=True)
class FeatureBasis:
    """Input features of a block; the last one is the constant if there are biases."""

    tensor: BilinearTensor
    query: Tensor
    """(n, f): what each product's first factor reads from each feature."""
    key: Tensor
    """(n, f)"""
    constant: bool

    def interaction(self, direction: Tensor) -> Tensor:
        """T of one output feature, (o) to (f, f), symmetric.

        Raises:
            InputError: if the direction has another size or is not finite.
        """
        half = self.query.T @ (self.tensor.weights(direction).unsqueeze(-1) * self.key)
        return half.add(half.T).div_(2)

    def output(self, z: Tensor) -> Tensor:
        """The block's output from feature activations, (..., f without the constant) to (..., o).

        Raises:
            InputError: if z has another size or is not finite.
        """
        z = check_vectors(z, self.query.shape[1] - self.constant, "feature activation")
        z = z.to(self.query)
        if self.constant:
            z = torch.cat([z, torch.ones_like(z[..., :1])], -1)
        return ((z @ self.query.T) * (z @ self.key.T)) @ self.tensor.value.T

    def top(self, direction: Tensor, count: int) -> list[tuple[int, int, float]]:
        """The largest interactions `(b, c, weight)`, b <= c, by falling |weight|.

        The weight of a pair counts both orders, so that `sum weight z_b z_c` is the output.
        """
        matrix = self.interaction(direction)
        pairs = torch.triu(matrix) + torch.triu(matrix, 1)
        order = pairs.abs().flatten().topk(min(count, pairs.numel())).indices
        where = (order // len(pairs)).tolist(), (order % len(pairs)).tolist()
        return [(b, c, float(pairs[b, c])) for b, c in zip(*where, strict=True)]


def feature_basis(
    tensor: BilinearTensor, decoder: Tensor, bias: Tensor | None = None
) -> FeatureBasis:
    """Express the input in the columns of a decoder.

    Args:
        decoder: (f, inputs), one feature a row (the transpose of an SAE's `W_dec` columns).
        bias: (inputs) what the decoder adds at all times.

    Raises:
        InputError: if the sizes don't fit or numbers are not finite.
    """
    rows = check_vectors(decoder, tensor.inputs, "decoder row").to(tensor.query)
    constant = tensor.constant or bias is not None
    if tensor.constant:
        rows = torch.cat([rows, torch.zeros_like(rows[:, :1])], 1)
    if constant:
        last = torch.zeros_like(rows[0]) if bias is None else tensor.augment(bias)
        if tensor.constant:
            last[-1] = 1
        rows = torch.cat([rows, last[None]])
    return FeatureBasis(tensor, tensor.query @ rows.T, tensor.key @ rows.T, constant)
