"""TransformerLens: the same logits, hooks on the block, and the silent SiLU it is guarded from."""

import copy
import sys
import warnings

import pytest
import torch
from transformers import LlamaForCausalLM

from bilinearize import BilinearLlamaForCausalLM, InputError
from bilinearize.interpret.lens import to_transformer_lens
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer

TOKENS = torch.tensor([[0, 40, 265, 270, 33, 280, 261, 44]])


@pytest.fixture(scope="module")
def lens():
    # Its dependencies warn at import.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformer_lens", reason="pip install transformer-lens")


@pytest.fixture(params=["partly converted", "rank 2, relu on the product"])
def converted(request, converted_pico):
    model = load_causal_lm(converted_pico)
    if request.param == "partly converted":
        return model
    settings = {"bilinear_form": "bilinear", "bilinear_rank": 2, "bilinear_activation": "relu"}
    config = copy.deepcopy(model.config)
    for name, value in (settings | {"bilinear_bias": True}).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return BilinearLlamaForCausalLM(config).eval()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("processed", [False, True])
def test_logits_are_the_same(lens, converted, converted_pico, processed):
    bridge = to_transformer_lens(converted, load_tokenizer(converted_pico))
    right = converted(TOKENS).logits
    if processed:
        bridge.enable_compatibility_mode()
        # Folding centres the unembedding: logits move by a constant, probabilities don't.
        ours, right = bridge(TOKENS).log_softmax(-1), right.log_softmax(-1)
    else:
        ours = bridge(TOKENS)
    assert torch.allclose(ours, right, atol=2e-4 * float(right.abs().max()))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_hooks_see_and_change_the_score(lens, converted, converted_pico):
    bridge = to_transformer_lens(converted, load_tokenizer(converted_pico))
    logits, cache = bridge.run_with_cache(TOKENS)
    q, k = (cache[f"blocks.0.mlp.{half}.hook_out"] for half in ("gate", "in"))
    rank = converted.model.layers[0].mlp.rank
    score = (q * k).unflatten(-1, (-1, rank)).sum(-1)
    assert torch.allclose(cache["blocks.0.mlp.hook_score"], score, atol=1e-6)
    hook = ("blocks.0.mlp.hook_score", lambda value, hook: value * 0)
    changed = bridge.run_with_hooks(TOKENS, fwd_hooks=[hook])
    assert not torch.allclose(changed, logits, atol=1e-2)
    twin = copy.deepcopy(converted)
    torch.nn.init.zeros_(twin.model.layers[0].mlp.down_proj.weight)
    assert torch.allclose(changed, twin(TOKENS).logits, atol=1e-4)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_the_stock_bridge_computes_silu_instead(lens, converted_pico, pico_llama):
    """Why the bridge exists: a stock Llama with `hidden_act: "linear"` comes out as another."""
    model = LlamaForCausalLM.from_pretrained(pico_llama, hidden_act="linear")
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore

    bridge = TransformerBridge.boot_transformers(
        "pico", hf_model=copy.deepcopy(model), tokenizer=load_tokenizer(converted_pico)
    )
    bridge.enable_compatibility_mode()
    ours, right = bridge(TOKENS).log_softmax(-1), model(TOKENS).logits.log_softmax(-1)
    assert not torch.allclose(ours, right, atol=0.1)


def test_a_missing_package_is_named(pico_llama, monkeypatch):
    model, tokenizer = load_causal_lm(pico_llama), load_tokenizer(pico_llama)
    missing = "transformer_lens.factories.architecture_adapter_factory"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match="pip install transformer-lens"):
        to_transformer_lens(model, tokenizer)


@pytest.mark.filterwarnings("ignore")
def test_source_models_are_refused(lens, pico_llama):
    with pytest.raises(InputError, match="LlamaForCausalLM is no converted model"):
        to_transformer_lens(load_causal_lm(pico_llama), load_tokenizer(pico_llama))
