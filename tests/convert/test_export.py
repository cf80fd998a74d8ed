"""Exports are the same function, to float64 rounding, and load as what they say they are."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from bilinearize import InputError
from bilinearize.convert.export import export
from bilinearize.convert.run import convert
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.modeling_bilinear import ROWS

FORMS = {"rank 1": {}, "rank 2": {"rank": 2}, "wide": {"expand": 2}, "ranks": {"rank": [1, 3, 2]}}


@pytest.fixture(scope="module")
def conversions(pico_llama, text_file, tmp_path_factory):
    found = {}
    for name, form in FORMS.items():
        found[name] = tmp_path_factory.mktemp("export") / "converted"
        convert(str(pico_llama), found[name], text=str(text_file), tokens=1024, window=32, **form)
    return found


@pytest.fixture
def token_ids():
    return torch.randint(0, 290, (3, 40), generator=torch.Generator().manual_seed(5))


def difference(one, two, token_ids) -> float:
    """Largest difference of logits, relative to the largest logit."""
    with torch.no_grad():
        a, b = one(token_ids).logits, two(token_ids).logits
    return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.parametrize("form", ["stock", "squares", "canonical"])
@pytest.mark.parametrize("name", FORMS)
def test_exports_are_the_same_function(conversions, name, form, tmp_path, token_ids):
    export(str(conversions[name]), tmp_path / "out", format=form, dtype="float64")
    source = load_causal_lm(conversions[name], torch.float64)
    written = load_causal_lm(tmp_path / "out", torch.float64)
    assert difference(source, written, token_ids) < 1e-12
    written.model.layers[1].mlp.down_proj.weight.data[0, 0] += 0.1  # negative control
    assert difference(source, written, token_ids) > 1e-6
    if form == "stock":
        assert type(written) is LlamaForCausalLM
        assert written.config.hidden_act == "linear" and written.config.mlp_bias


def test_a_stock_export_loads_where_bilinearize_is_not(conversions, tmp_path):
    export(str(conversions["rank 2"]), tmp_path / "out")
    program = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "class Block:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.startswith('bilinearize'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        f"AutoTokenizer.from_pretrained({str(tmp_path / 'out')!r})\n"
        "print(type(model).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "LlamaForCausalLM", done.stderr
    assert not list((tmp_path / "out").glob("*.py"))


def tiny(kind: str, folder) -> None:
    """A tiny random model of a family, saved."""
    torch.manual_seed(0)
    row = next(row for row in ROWS if row.source_type == kind)
    config = row.source_class("Config")(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        head_dim=8,
        pad_token_id=0,
        initializer_range=0.2,
    )
    row.source_class("ForCausalLM")(config).save_pretrained(folder)


@pytest.mark.parametrize(
    "kind", ["mistral", "qwen2", "smollm3", "granite", "seed_oss", "helium", "hyperclovax"]
)
def test_families_with_biases_or_a_llama_to_be(kind, tmp_path, pico_llama, text_file, token_ids):
    tiny(kind, tmp_path / "source")
    for file in pico_llama.glob("tokenizer*"):
        (tmp_path / "source" / file.name).write_bytes(file.read_bytes())
    options = dict(text=str(text_file), tokens=1024, window=32)
    convert(str(tmp_path / "source"), tmp_path / "converted", **options)
    record = export(str(tmp_path / "converted"), tmp_path / "stock", dtype="float64")
    source = load_causal_lm(tmp_path / "converted", torch.float64)
    stock = load_causal_lm(tmp_path / "stock", torch.float64)
    assert difference(source, stock, token_ids) < 1e-12
    as_llama = kind in ("mistral", "qwen2")
    assert record["class"] == ("LlamaForCausalLM" if as_llama else type(stock).__name__)
    assert ("a Llama" in record["note"]) == as_llama
    assert AutoConfig.from_pretrained(tmp_path / "stock").model_type == (
        "llama" if as_llama else kind
    )


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "phi3", "olmo2"])
def test_without_biases_every_family_is_stock(kind, tmp_path, token_ids):
    tiny(kind, tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "converted", method="taylor")
    export(str(tmp_path / "converted"), tmp_path / "stock", dtype="float64")
    source = load_causal_lm(tmp_path / "converted", torch.float64)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float64)
    assert stock.config.model_type == kind
    assert difference(source, stock.eval(), token_ids) < 1e-6


def test_what_can_not_be_exported_is_named(pico_llama, text_file, tmp_path):
    options = dict(text=str(text_file), tokens=1024, window=32)
    convert(str(pico_llama), tmp_path / "part", layers="0", **options)
    convert(str(pico_llama), tmp_path / "relu", activation="relu", **options)
    tiny("qwen3", tmp_path / "qwen3")
    for file in pico_llama.glob("tokenizer*"):
        (tmp_path / "qwen3" / file.name).write_bytes(file.read_bytes())
    convert(str(tmp_path / "qwen3"), tmp_path / "biased", **options)
    for source, named in (
        ("part", "layer 1 is gated with activation silu"),
        ("relu", "layer 0 is bilinear with activation relu"),
        ("biased", "qwen3: its stock MLP has no biases"),
        (pico_llama, "export takes a converted checkpoint"),
    ):
        with pytest.raises(InputError, match=named):
            export(str(tmp_path / source), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="--format is 'onnx'; use one of stock"):
        export(str(tmp_path / "part"), tmp_path / "out", format="onnx")


def test_the_card_says_what_it_is(conversions, tmp_path):
    export(str(conversions["rank 1"]), tmp_path / "stock")
    card = (tmp_path / "stock" / "README.md").read_text()
    assert "no custom code is needed" in card and "`LlamaForCausalLM`" in card
    export(str(conversions["rank 1"]), tmp_path / "squares", format="squares")
    assert "trust_remote_code=True" in (tmp_path / "squares" / "README.md").read_text()
