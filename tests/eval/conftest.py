"""Converted pico candidates, and the evaluation of one of them, made once per run."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bilinearize import BilinearLlamaConfig, BilinearLlamaForCausalLM
from bilinearize.eval.compare import evaluate
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer
from bilinearize.model.text import pack_windows, read_documents

WINDOW = 64


def save_converted(source: Path, folder: Path, gate: float) -> Path:
    """A bilinear candidate of the crudest kind: the gate's weights times `gate`."""
    teacher = LlamaForCausalLM.from_pretrained(source)
    fields = teacher.config.to_dict() | {"model_type": "bilinear_llama"}
    student = BilinearLlamaForCausalLM(BilinearLlamaConfig(**fields, bilinear_form="bilinear"))
    weights = {
        name: tensor * gate if name.endswith("gate_proj.weight") else tensor
        for name, tensor in teacher.state_dict().items()
    }
    student.load_state_dict(weights)
    student.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def half(pico_llama, tmp_path_factory) -> Path:
    """The pico model with halved gates, silu(z) being z / 2 to first order."""
    return save_converted(pico_llama, tmp_path_factory.mktemp("half") / "half", 0.5)


@pytest.fixture(scope="session")
def quarter(pico_llama, tmp_path_factory) -> Path:
    """The pico model with gates of a quarter."""
    return save_converted(pico_llama, tmp_path_factory.mktemp("quarter") / "quarter", 0.25)


@pytest.fixture(scope="session")
def windows(pico_llama, documents_file) -> torch.Tensor:
    """The tokens that the evaluations of the tests see."""
    documents = read_documents(str(documents_file))
    return pack_windows(documents, load_tokenizer(pico_llama), WINDOW)


@pytest.fixture(scope="session")
def logits(pico_llama, half, windows) -> dict[str, torch.Tensor]:
    """fp32 logits of teacher and candidate, as float64: (windows, window, vocabulary)."""
    with torch.no_grad():
        return {
            name: load_causal_lm(folder)(windows).logits.double()
            for name, folder in (("teacher", pico_llama), ("half", half))
        }


@pytest.fixture(scope="session")
def report(pico_llama, half, quarter, documents_file, tmp_path_factory) -> tuple[dict, Path]:
    """One evaluation of a copy of the teacher and two candidates, and its folder."""
    out = tmp_path_factory.mktemp("report") / "out"
    candidates = {"copy": str(pico_llama), "half": str(half), "quarter": str(quarter)}
    result = evaluate(
        str(pico_llama), candidates, out, text=str(documents_file), window=WINDOW, sample_tokens=12
    )
    return result, out
