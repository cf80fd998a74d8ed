"""Random blocks of every kind that has a tensor, in float64, and a converted pico model."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from bilinearize import BilinearLlamaConfig, BilinearLlamaForCausalLM, BilinearMLP

KINDS = {
    "plain": (1, False),
    "biased": (1, True),
    "rank 2": (2, False),
    "rank 3, biased": (3, True),
}


def build(rank: int, bias: bool, form: str = "bilinear", act: str = "identity") -> BilinearMLP:
    """A float64 block, hidden size 10, 14 slots."""
    torch.manual_seed(rank + 10 * bias)
    return BilinearMLP(10, 14, form, rank, act, bias).double()


@pytest.fixture
def make_block():
    return build


@pytest.fixture(params=KINDS)
def block(request) -> BilinearMLP:
    return build(*KINDS[request.param])


@pytest.fixture(scope="session")
def converted_pico(pico_llama, tmp_path_factory) -> Path:
    """The pico Llama with layers 0 and 2 made bilinear (random biases), layer 1 left gated."""
    teacher = LlamaForCausalLM.from_pretrained(pico_llama)
    settings = teacher.config.to_dict() | {
        "model_type": "bilinear_llama",
        "bilinear_form": ["bilinear", "gated", "bilinear"],
        "bilinear_bias": [True, False, True],
        "architectures": None,
    }
    torch.manual_seed(3)
    student = BilinearLlamaForCausalLM(BilinearLlamaConfig(**settings))
    student.load_state_dict(teacher.state_dict(), strict=False)
    for name, weight in student.named_parameters():
        if "mlp" in name and name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1)
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    folder = tmp_path_factory.mktemp("interpret") / "converted"
    student.save_pretrained(folder)
    for file in pico_llama.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
