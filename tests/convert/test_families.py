"""Every family on a tiny random model of its own, and what is no such family is refused."""

import copy
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bilinearize import InputError
from bilinearize.convert.run import convert
from bilinearize.convert.shape import check_shape, describe_mlp
from bilinearize.convert.source import Source
from bilinearize.convert.states import HELDOUT
from bilinearize.convert.stream import Stream
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.families import FAMILIES
from bilinearize.model.text import pack_windows, read_documents

WINDOW, TOKENS = 32, 1024
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.2,  # so that logits and gates are far from flat
    "sliding_window": 16,  # shorter than the windows
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# What makes a family differ from Llama must differ from Llama's value here.
FIELDS = {
    "ministral": MIXED,
    "olmo3": MIXED,
    "exaone4": MIXED,
    "cohere2": MIXED | {"logit_scale": 1.0},
    "gemma2": MIXED,
    "gemma3_text": MIXED,
    "vaultgemma": MIXED,
    "cohere": {"logit_scale": 1.0},
    "olmo": {"clip_qkv": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ernie4_5": {"use_bias": True},
    "stablelm": {"use_parallel_residual": True},
    "hyperclovax": {"use_post_norm": True, "residual_multiplier": 0.7},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
}
FUSED = ("phi3", "glm", "glm4")
TOKEN_IDS = torch.randint(0, 290, (3, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def sources(pico_llama, tmp_path_factory):
    """family -> folder of a random model with uneven norms, and the pico tokenizer."""
    root = tmp_path_factory.mktemp("sources")
    folders = {}
    for kind in FAMILIES:
        torch.manual_seed(0)
        # A Llama with a sliding_window would get a cache that slides, but no such mask.
        known = {field.name for field in fields(FAMILIES[kind].row.source_class("Config"))}
        values = {name: value for name, value in SMALL.items() if name in known}
        config = AutoConfig.for_model(kind, **values | FIELDS.get(kind, {}))
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        folders[kind] = root / kind
        model.save_pretrained(folders[kind])
        AutoTokenizer.from_pretrained(pico_llama).save_pretrained(folders[kind])
    return folders


@pytest.fixture(scope="module")
def refitted(sources, text_file, tmp_path_factory):
    """family -> (folder, record) of its refit conversion."""
    root = tmp_path_factory.mktemp("refitted")
    options = dict(text=str(text_file), tokens=TOKENS, window=WINDOW)
    return {
        kind: (root / kind, convert(str(source), root / kind, **options))
        for kind, source in sources.items()
    }


@torch.no_grad()
def logits(folder: Path, windows: torch.Tensor = TOKEN_IDS) -> torch.Tensor:
    return load_causal_lm(folder)(windows).logits


@pytest.mark.parametrize("kind", FAMILIES)
def test_gated_conversion_gives_the_source_logits(kind, sources, tmp_path):
    convert(str(sources[kind]), tmp_path / "gated", method="gated")
    expected, found = logits(sources[kind]), logits(tmp_path / "gated")
    if kind in FUSED:
        # One product of 2m columns became two of m, which the BLAS may sum in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    convert(str(sources[kind]), tmp_path / "taylor", method="taylor")  # negative control
    assert (logits(tmp_path / "taylor") - expected).std() > 0.1 * expected.std()


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_the_stream_is_the_models_own_residual_stream(kind, sources, tmp_path):
    windows = torch.randint(
        0, 290, (2 * HELDOUT, WINDOW), generator=torch.Generator().manual_seed(1)
    )
    source = Source(sources[kind])
    stream = Stream(source, windows, torch.device("cpu"), 10**8, tmp_path)
    heldout = torch.arange(len(windows)) % HELDOUT == HELDOUT - 1
    model = load_causal_lm(sources[kind])
    windows = torch.cat([windows[~heldout], windows[heldout]])
    expected = model(windows, output_hidden_states=True).hidden_states
    close = dict(rtol=1e-5, atol=1e-5) if kind in FUSED else dict(rtol=0, atol=0)
    torch.testing.assert_close(stream.teacher, expected[0], rtol=0, atol=0)
    for index in range(source.layers):
        layer, _ = source.load_layer(index, torch.device("cpu"))
        stream.advance_teacher(layer)
        # The student, given the gated block itself, must go where the teacher goes.
        stream.fit_gates(layer)
        stream.advance_student(layer, layer.mlp)
        after = stream.teacher if index + 1 < source.layers else model.model.norm(stream.teacher)
        torch.testing.assert_close(after, expected[index + 1], **close)
        torch.testing.assert_close(stream.student, stream.teacher, rtol=0, atol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_refit_fits(kind, sources, refitted, text_file, tmp_path):
    folder, record = refitted[kind]
    for layer in record["layers"]:
        assert layer["heldout_error"] <= layer["affine_error"] < 0.5
    convert(str(sources[kind]), tmp_path / "taylor", method="taylor")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = pack_windows(read_documents(str(text_file)), tokenizer, WINDOW)[-16:]
    expected = logits(sources[kind], windows).log_softmax(-1)
    found = [logits(path, windows).log_softmax(-1) for path in (folder, tmp_path / "taylor")]
    refit, taylor = ((expected.exp() * (expected - other)).sum(-1).mean() for other in found)
    assert refit < 0.8 * taylor


# peft reads the attribute that transformers deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", FAMILIES)
def test_converted_models_are_ordinary_models(kind, refitted, tmp_path):
    folder = refitted[kind][0]
    model, family = load_causal_lm(folder), FAMILIES[kind]
    assert type(model) is family.causal_lm
    expected = logits(folder)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), expected)
    assert set(AutoConfig.from_pretrained(tmp_path / "again").auto_map) == set(family.auto_map)

    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=1)
    mask = torch.ones_like(TOKEN_IDS[:1, :5])
    cached, plain = (
        model.generate(TOKEN_IDS[:1, :5], attention_mask=mask, use_cache=use, **options)
        for use in (True, False)
    )
    assert torch.equal(cached, plain)

    source_class = family.row.source_class("ForCausalLM")
    assert set(source_class._no_split_modules) == model._no_split_modules
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert f"model.layers.*.mlp.{part}" in model._tp_plan
    modules = [name.replace(".0.", ".*.") for name, _ in model.named_modules()]
    assert set(model._tp_plan) <= {*modules, "model.embed_tokens", "lm_head"}

    tuned = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules="all-linear", r=2))
    trained = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    for index in range(2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert any(f"layers.{index}.mlp.{part}.lora_A" in name for name in trained)
    tuned(TOKEN_IDS, labels=TOKEN_IDS).loss.backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)


LOAD = """
import json, sys, torch
sys.modules["bilinearize"] = None  # importing it raises
from transformers import AutoModel, AutoModelForCausalLM
ids = torch.tensor(json.loads(sys.argv[1]))
logits = {}
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    with torch.no_grad():
        logits[folder] = model(ids).logits
trunk = AutoModel.from_pretrained(folder, trust_remote_code=True)
assert type(trunk) is type(model.model)
torch.save(logits, sys.argv[2])
"""


def test_all_load_without_the_package(refitted, tmp_path):
    folders = [str(folder) for folder, _ in refitted.values()]
    ids = json.dumps(TOKEN_IDS.tolist())
    result = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, ids, tmp_path / "logits.pt", *folders],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "",
        },
    )
    assert result.returncode == 0, result.stderr
    found = torch.load(tmp_path / "logits.pt")
    for folder in folders:
        assert torch.equal(found[folder], logits(Path(folder))), folder


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("arcee", {}, "'arcee' .no gated MLP: up_proj, down_proj, act_fn. is not supported"),
        (
            "nemotron",
            {"num_hidden_layers": 1, "num_key_value_heads": 8},
            "'nemotron' .no gated MLP: up_proj, down_proj, act_fn.",
        ),
        ("bitnet", {}, "'bitnet' .gated MLP: gate_proj, .*ffn_sub_norm. is not supported"),
        ("deepseek_v2", {}, "mixture of experts .num_experts = 64."),
    ],
)
def test_other_shapes_are_refused_saying_what_was_found(kind, options, named, tmp_path):
    options = options or {"num_hidden_layers": 1}
    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path / "source")
    with pytest.raises(InputError, match=named):
        convert(str(tmp_path / "source"), tmp_path / "out", method="taylor")
    assert not (tmp_path / "out").exists()


def test_experts_are_found_by_structure_too():
    config = AutoConfig.for_model("mixtral", num_hidden_layers=1)
    assert describe_mlp(config) == "mixture of experts: gate, experts"


def test_a_layer_of_another_shape_is_named():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
        assert check_shape(model, Path("config.json")) is False
        model.model.layers[1].mlp.ffn_sub_norm = torch.nn.LayerNorm(48)
    with pytest.raises(InputError, match=r"config.json: layer 1 has a LlamaMLP .*ffn_sub_norm"):
        check_shape(model, Path("config.json"))
