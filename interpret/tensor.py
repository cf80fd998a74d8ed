"""A bilinear block as a third-order tensor that is never materialised unless asked.

Shapes: i inputs (`hidden_size`, plus one if the block has biases), o outputs, n products. A rank-r
block has r products a slot, which share the slot's value; an output bias is one product more, of
the constant with itself. So every block, biases and rank included, reads

    y(x) = sum_n (query_n . x~)(key_n . x~) value_n,    x~ = [x; 1] with biases, else x
    B_oij = sum_n value_on (query_ni key_nj + query_nj key_ni) / 2

after Pearce et al. (arXiv 2410.08417, section 2; the antisymmetric part is zero on x, x).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from bilinearize import BilinearMLP, InputError


@dataclass(frozen=True)
class BilinearTensor:
    """The factors of a block's symmetrised tensor; see the module's docstring for the notation."""

    query: Tensor
    """(n, i)"""
    key: Tensor
    """(n, i)"""
    value: Tensor
    """(o, n)"""
    constant: bool
    """Whether the last input is the constant 1, so that `i` is `hidden_size + 1`."""

    @property
    def inputs(self) -> int:
        """Size of x, the constant not counted."""
        return self.query.shape[1] - self.constant

    @property
    def outputs(self) -> int:
        return self.value.shape[0]

    def augment(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., i): x in the tensor's dtype, with a 1 appended if it has biases.

        Raises:
            InputError: if x has another last dimension or is not finite.
        """
        x = check_vectors(x, self.inputs, "input").to(self.query)
        return torch.cat([x, torch.ones_like(x[..., :1])], -1) if self.constant else x

    def output(self, x: Tensor) -> Tensor:
        """The block's output, (..., inputs) to (..., o)."""
        x = self.augment(x)
        return ((x @ self.query.T) * (x @ self.key.T)) @ self.value.T

    def apply(self, left: Tensor, right: Tensor) -> Tensor:
        """B(left, right) for augmented vectors, (..., i) twice to (..., o)."""
        products = (left @ self.query.T) * (right @ self.key.T)
        products = products + (left @ self.key.T) * (right @ self.query.T)
        return (products / 2) @ self.value.T

    def weights(self, directions: Tensor) -> Tensor:
        """How much each product writes to each direction, (..., o) to (..., n).

        Raises:
            InputError: if a direction has another size or is not finite.
        """
        return check_vectors(directions, self.outputs, "direction").to(self.value) @ self.value

    def interaction(self, direction: Tensor) -> Tensor:
        """The symmetric matrix A with u . y(x) = x~ A x~ for one direction u: (o) to (i, i).

        `(Q^T diag(V^T u) K + K^T diag(V^T u) Q) / 2` (arXiv 2410.08417, section 3).

        Raises:
            InputError: if the direction has another size or is not finite.
        """
        half = self.query.T @ (self.weights(direction).unsqueeze(-1) * self.key)
        return half.add(half.T).div_(2)

    def materialise(self) -> Tensor:
        """The whole tensor, (o, i, i): 34 GB at hidden_size 2048 in fp32."""
        return torch.stack([self.interaction(unit) for unit in torch.eye(self.outputs)])

    def squares(self) -> tuple[Tensor, Tensor]:
        """The same function as signed squares, `y = sum_k (w_k . x~)^2 value_k`.

        A product is a difference of two squares, `qk = ((q+k)/2)^2 - ((q-k)/2)^2`.

        Returns:
            w (2n, i) and values (o, 2n); the second half of the values carries the minus sign.
        """
        w = torch.cat([self.query + self.key, self.query - self.key]) / 2
        return w, torch.cat([self.value, -self.value], 1)

    def slot_spectrum(self) -> Tensor:
        """The two nonzero eigenvalues `(q.k +- |q||k|)/2` of each product's matrix: (n, 2)."""
        dot = (self.query * self.key).sum(1)
        norm = self.query.norm(dim=1) * self.key.norm(dim=1)
        return torch.stack([dot + norm, dot - norm], 1) / 2


def block_tensor(
    mlp: nn.Module,
    input_scale: Tensor | None = None,
    output_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    name: str = "the block",
) -> BilinearTensor:
    """The tensor of a converted block.

    Args:
        input_scale: (inputs) weights of the RMSNorm before the block, folded in, so that the tensor
            reads the normalised vector before these weights.
        output_scale: (o) weights of an RMSNorm behind the block, folded in likewise.
        name: the block's name in messages.

    Raises:
        InputError: if it is no converted block (other class, gated, sigma is not the identity), or
            its weights are not finite.
    """
    check_polynomial(mlp, name)
    assert isinstance(mlp, BilinearMLP)
    query = _rows(mlp.gate_proj, input_scale, dtype)
    key = _rows(mlp.up_proj, input_scale, dtype)
    value = mlp.down_proj.weight.detach().to(dtype).repeat_interleave(mlp.rank, 1)
    constant = mlp.gate_proj.bias is not None
    if mlp.down_proj.bias is not None:
        unit = torch.zeros_like(query[:1])
        unit[0, -1] = 1
        query, key = torch.cat([query, unit]), torch.cat([key, unit])
        value = torch.cat([value, mlp.down_proj.bias.detach().to(dtype)[:, None]], 1)
    if output_scale is not None:
        value = output_scale.detach().to(value)[:, None] * value
    for part, weights in (("gate_proj", query), ("up_proj", key), ("down_proj", value)):
        if not weights.isfinite().all():
            raise InputError(f"{name}: {part} holds NaN or infinity; the checkpoint is damaged.")
    return BilinearTensor(query, key, value, constant)


def check_polynomial(mlp: nn.Module, name: str) -> None:
    """Raise InputError unless the block is an exact quadratic form of its input."""
    if not isinstance(mlp, BilinearMLP):
        raise InputError(
            f"{name} is a {type(mlp).__name__}, not converted; run bilinearize convert, or name a "
            "converted layer."
        )
    if mlp.form != "bilinear":
        raise InputError(
            f"{name} is {mlp.form}: the activation on one factor makes it no quadratic form; name "
            "a converted layer."
        )
    if not isinstance(mlp.act_fn, (nn.Identity, type(ACT2FN["linear"]))):
        raise InputError(
            f"{name} has sigma = {type(mlp.act_fn).__name__} on the product: symmetric, but no "
            "polynomial, so no tensor; convert with activation identity."
        )


def _rows(linear: nn.Linear, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(n, i) weights of one factor, columns scaled, the bias as the last column."""
    weight = linear.weight.detach().to(dtype)
    if scale is not None:
        weight = weight * scale.detach().to(weight)
    if linear.bias is None:
        return weight
    return torch.cat([weight, linear.bias.detach().to(weight)[:, None]], 1)


def check_vectors(vectors: Tensor, size: int, name: str) -> Tensor:
    """Raise InputError unless the last dimension is `size` and every entry is finite."""
    if vectors.ndim == 0 or vectors.shape[-1] != size:
        raise InputError(f"{name} of size {list(vectors.shape)}; the last must be {size}.")
    if not vectors.isfinite().all():
        raise InputError(f"{name} holds NaN or infinity; give finite numbers.")
    return vectors
