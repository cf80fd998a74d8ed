"""The Llama family: equal to the original where it should be, whole after saving, strict."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

from bilinearize import BilinearLlamaConfig, BilinearLlamaForCausalLM, BilinearLlamaModel
from bilinearize.model import modeling_bilinear

TOKENS = torch.arange(60).view(3, 20) * 7 % 290


def bilinear_from(folder, **options) -> BilinearLlamaForCausalLM:
    """The pico Llama's weights in our class: every MLP gated, or its gate halved."""
    source = LlamaForCausalLM.from_pretrained(folder)
    values = source.config.to_dict()
    del values["model_type"], values["architectures"]
    model = BilinearLlamaForCausalLM(BilinearLlamaConfig(**values, **options))
    model.load_state_dict(source.state_dict())
    return model.eval()


@pytest.fixture
def bilinear(pico_llama):
    return bilinear_from(pico_llama)


def test_gated_form_gives_the_source_logits_exactly(pico_llama):
    source = LlamaForCausalLM.from_pretrained(pico_llama).eval()
    gated = bilinear_from(pico_llama, bilinear_form="gated")
    assert torch.equal(gated(TOKENS).logits, source(TOKENS).logits)
    half_gated = bilinear_from(pico_llama, bilinear_form=["gated", "bilinear", "gated"])
    assert not torch.equal(half_gated(TOKENS).logits, source(TOKENS).logits)


def test_generation_with_cache_equals_generation_without(bilinear):
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=1)
    prompt = TOKENS[:1, :5]
    mask = torch.ones_like(prompt)
    cached = bilinear.generate(prompt, attention_mask=mask, use_cache=True, **options)
    plain = bilinear.generate(prompt, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached, plain)
    assert len(set(cached[0].tolist())) > 3  # not one token over and over


def test_gradient_checkpointing_gives_the_same_gradients(bilinear):
    bilinear.train()
    bilinear(TOKENS, labels=TOKENS).loss.backward()
    plain = {name: p.grad.clone() for name, p in bilinear.named_parameters()}
    bilinear.zero_grad()
    bilinear.activation_checkpointing_enable({"use_reentrant": False})
    bilinear(TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in bilinear.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name])


def test_save_and_reload(bilinear, tmp_path):
    bilinear.save_pretrained(tmp_path / "saved")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert isinstance(loaded, BilinearLlamaForCausalLM)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.eval()(TOKENS).logits, bilinear(TOKENS).logits)
    assert isinstance(AutoModel.from_pretrained(tmp_path / "saved"), BilinearLlamaModel)
    assert (tmp_path / "saved" / "modeling_bilinear.py").is_file()


def test_per_layer_settings_survive_a_reload(pico_llama, tmp_path):
    model = bilinear_from(pico_llama, bilinear_form=["gated", "bilinear", "bilinear"])
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert [layer.mlp.form for layer in loaded.model.layers] == ["gated", "bilinear", "bilinear"]
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_layers_may_be_wider_or_narrower_than_the_source(pico_llama, tmp_path):
    config = LlamaForCausalLM.from_pretrained(pico_llama).config.to_dict()
    del config["model_type"], config["architectures"]
    sizes = [128, 64, 7]
    model = BilinearLlamaForCausalLM(
        BilinearLlamaConfig(**config, bilinear_intermediate_size=sizes, bilinear_rank=[1, 3, 2])
    ).eval()
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    mlps = [layer.mlp for layer in loaded.model.layers]
    assert [mlp.down_proj.in_features for mlp in mlps] == sizes
    assert [mlp.gate_proj.out_features for mlp in mlps] == [128, 192, 14]
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_classes_pickle_and_unknown_names_do_not_exist(bilinear):
    for thing in (BilinearLlamaConfig, BilinearLlamaModel, BilinearLlamaForCausalLM):
        assert pickle.loads(pickle.dumps(thing)) is thing
    copied = pickle.loads(pickle.dumps(bilinear))
    assert torch.equal(copied(TOKENS).logits, bilinear(TOKENS).logits)
    with pytest.raises(AttributeError, match="BilinearMixtralConfig"):
        _ = modeling_bilinear.BilinearMixtralConfig


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bilinear_rank": "two"}, "bilinear_rank"),
        ({"bilinear_rank": 0}, "bilinear_rank is 0"),
        ({"bilinear_rank": [1, 2]}, "2 entries for 32 layers"),
        ({"bilinear_intermediate_size": 0}, "bilinear_intermediate_size is 0"),
        ({"bilinear_intermediate_size": 1.5}, "bilinear_intermediate_size"),
        ({"bilinear_intermediate_size": [64]}, "1 entries for 32 layers"),
        ({"bilinear_activation": "swoosh"}, "swoosh"),
        ({"bilinear_form": "cubic"}, "cubic"),
    ],
)
def test_config_is_strict(options, named):
    with pytest.raises(Exception, match=named):
        BilinearLlamaConfig(**options)


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
{first}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], {options}).eval()
assert type(model).__module__.startswith("{module}"), type(model).__module__
torch.save(model(torch.arange(60).view(3, 20) * 7 % 290).logits, sys.argv[2])
"""
BLOCKED = "sys.modules['bilinearize'] = None  # importing it raises"


@pytest.mark.parametrize(
    ("first", "options", "module", "loads"),
    [
        ("import bilinearize", "", "bilinearize.model", True),
        (BLOCKED, "trust_remote_code=True", "transformers_modules", True),
        (BLOCKED, "", "nowhere", False),
    ],
    ids=["package", "trust_remote_code", "neither"],
)
def test_loading_in_a_fresh_process(bilinear, tmp_path, first, options, module, loads):
    bilinear.config.auto_map = {
        "AutoConfig": "modeling_bilinear.BilinearLlamaConfig",
        "AutoModelForCausalLM": "modeling_bilinear.BilinearLlamaForCausalLM",
    }
    folder = tmp_path / "saved.v1"  # a path with a dot
    bilinear.save_pretrained(folder)
    code = LOAD.format(first=first, options=options, module=module)
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, folder, tmp_path / "logits.pt"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": ""},
    )
    if loads:
        assert result.returncode == 0, result.stderr
        logits = torch.load(tmp_path / "logits.pt")
        assert torch.equal(logits, bilinear(TOKENS).logits)
    else:
        assert result.returncode != 0
        assert "trust_remote_code" in result.stderr


def test_auto_map_names_all_three_classes_and_survives_saving(bilinear, tmp_path):
    from bilinearize.model.families import FAMILIES

    bilinear.config.auto_map = copy.deepcopy(FAMILIES["llama"].auto_map)
    bilinear.save_pretrained(tmp_path / "first")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    config = AutoConfig.from_pretrained(tmp_path / "second")
    assert set(config.auto_map) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
