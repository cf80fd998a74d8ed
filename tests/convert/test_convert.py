"""The converter on the pico Llama, against the source's logits and against a fit written out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from bilinearize import InputError
from bilinearize.convert.fit import GATE_RIDGE
from bilinearize.convert.run import convert, describe_fit
from bilinearize.convert.states import HELDOUT, sample_mask
from bilinearize.convert.stream import DRIFT, SAMPLE
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.model.text import pack_windows, read_documents

WINDOW, TOKENS = 32, 1024


@pytest.fixture(scope="session")
def converted(pico_llama, text_file, tmp_path_factory):
    """Folder and record of a refit conversion."""
    out = tmp_path_factory.mktemp("converted") / "refit"
    record = convert(str(pico_llama), out, text=str(text_file), tokens=TOKENS, window=WINDOW)
    return out, record


@pytest.fixture
def token_ids():
    return torch.randint(0, 290, (4, 40), generator=torch.Generator().manual_seed(5))


def test_gated_conversion_gives_the_source_logits_exactly(pico_llama, tmp_path, token_ids):
    convert(str(pico_llama), tmp_path / "gated", method="gated")
    source, gated = load_causal_lm(pico_llama), load_causal_lm(tmp_path / "gated")
    assert torch.equal(source(token_ids).logits, gated(token_ids).logits)
    convert(str(pico_llama), tmp_path / "taylor", method="taylor")  # negative control
    taylor = load_causal_lm(tmp_path / "taylor")
    assert not torch.allclose(source(token_ids).logits, taylor(token_ids).logits, atol=0.1)


def test_taylor_halves_the_gate(pico_llama, tmp_path):
    convert(str(pico_llama), tmp_path / "taylor", method="taylor")
    source, taylor = load_causal_lm(pico_llama), load_causal_lm(tmp_path / "taylor")
    x = torch.randn(6, 32)
    for old, new in zip(source.model.layers, taylor.model.layers, strict=True):
        g, u, d = old.mlp.gate_proj.weight, old.mlp.up_proj.weight, old.mlp.down_proj.weight
        expected = ((x @ g.T) / 2 * (x @ u.T)) @ d.T
        torch.testing.assert_close(new.mlp(x), expected, rtol=1e-4, atol=1e-4)
        assert new.mlp.gate_proj.bias is None


def ridge_lstsq(design, target, ridge):
    """Least squares with a ridge on unit-scaled columns, by rows appended to the design."""
    scale = design.square().sum(0).sqrt()
    padded = torch.cat([design / scale, ridge**0.5 * torch.eye(len(scale)).double()])
    zeros = torch.zeros(len(scale), target.shape[1]).double()
    return torch.linalg.lstsq(padded, torch.cat([target, zeros])).solution / scale[:, None]


def reference_gates(g, u, exact, root):
    """Slope and intercept of each slot by itself."""
    gates = []
    for j in range(g.shape[1]):
        design = torch.stack([g[:, j] * u[:, j], u[:, j]], 1) * root
        gates.append(torch.linalg.lstsq(design, exact[:, j : j + 1] * root).solution[:, 0])
    return torch.stack(gates, 1)


def reference_joint_gates(g, u, output, root, down, gates):
    """Slopes and intercepts of all slots at once, one row for each token and output."""
    columns = down.repeat(1, 2)  # (outputs, 2 slots)
    design = (torch.cat([g * u, u], 1)[:, None, :] * columns * root[:, :, None]).flatten(0, 1)
    start = gates.flatten()
    wanted = (output * root).flatten() - design @ start
    return (start + ridge_lstsq(design, wanted[:, None], GATE_RIDGE)[:, 0]).view(2, -1)


@torch.no_grad()
def reference_refit(folder, text, ridges):
    """The conversion in float64 on whole tensors, as the method is described.

    `ridges` are those that the converter chose, by layer and round kept. Returns slopes,
    intercepts, and the down_proj weight and bias of each layer.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = pack_windows(read_documents(str(text)), tokenizer, WINDOW, TOKENS)
    fitted = torch.arange(len(windows)) % HELDOUT != HELDOUT - 1
    teacher = model.model.embed_tokens(windows)
    student = teacher.clone()
    rotary = model.model.rotary_emb(teacher, torch.arange(WINDOW)[None])
    # The converter puts the held-out windows last, then draws its sample.
    order = torch.cat([torch.where(fitted)[0], torch.where(~fitted)[0]])
    shape = (len(windows), WINDOW)
    some = torch.zeros(shape, dtype=torch.bool)
    some[order] = sample_mask(shape, int(fitted.sum()), SAMPLE * 64)
    found = []
    for layer, rounds in zip(model.model.layers, ridges, strict=True):
        mlp = layer.mlp
        down = mlp.down_proj.weight

        def attend(states, layer=layer):
            normed = layer.input_layernorm(states)
            mixed = layer.self_attn(normed, position_embeddings=rotary, attention_mask=None)[0]
            return states + mixed

        middle = attend(teacher)
        update = mlp(layer.post_attention_layernorm(middle))
        teacher = middle + update
        power = teacher.square().mean(-1, keepdim=True) + update.square().mean(-1, keepdim=True)
        student = attend(student)
        x = layer.post_attention_layernorm(student)
        g, u = mlp.gate_proj(x), mlp.up_proj(x)
        exact = torch.nn.functional.silu(g) * u
        target = mlp(x) + DRIFT * (teacher - student - mlp(x))
        root = torch.maximum(power, target.square().mean(-1, keepdim=True)).rsqrt()
        gates = reference_gates(*(part[some] for part in (g, u, exact, root)))
        subset = [part[some] for part in (g, u, target, root)]
        new_down, bias = down, torch.zeros(len(down)).double()
        for number, ridge in enumerate(rounds, 1):
            last = number == len(rounds)
            which = torch.ones_like(some) if last else some
            gates = reference_joint_gates(
                subset[0], subset[1], subset[2] - bias, subset[3], new_down, gates
            )
            features = (gates[0] * g + gates[1]) * u
            ones = torch.cat([features, torch.ones_like(root)], -1) * root
            residual = (target - features @ down.T) * root
            used = [part[which] for part in (ones, residual)]
            correction = ridge_lstsq(*used, ridge)
            new_down, bias = down + correction[:-1].T, correction[-1]
        student = student + features @ new_down.T + bias
        found.append((*gates, new_down, bias))
    return found


def test_refit_equals_the_method_written_out_in_float64(converted, pico_llama, text_file):
    out, record = converted
    ridges = [layer["ridges"][: layer["kept_round"]] for layer in record["layers"]]
    assert all(rounds and None not in rounds for rounds in ridges)
    expected = reference_refit(pico_llama, text_file, ridges)
    source, model = load_causal_lm(pico_llama), load_causal_lm(out)
    x = torch.randn(50, 32)
    for layer, original, (slope, intercept, down, bias) in zip(
        model.model.layers, source.model.layers, expected, strict=True
    ):
        g, u = original.mlp.gate_proj(x).double(), original.mlp.up_proj(x).double()
        reference = ((slope * g + intercept) * u) @ down.T + bias
        torch.testing.assert_close(layer.mlp(x).double(), reference, rtol=2e-3, atol=2e-3)


def test_refit_is_better_than_affine_and_affine_than_taylor(
    converted, pico_llama, text_file, tmp_path, token_ids
):
    for method in ("affine", "taylor"):
        convert(
            str(pico_llama),
            tmp_path / method,
            method=method,
            text=str(text_file),
            tokens=TOKENS,
            window=WINDOW,
        )
    source = load_causal_lm(pico_llama)
    tokenizer = AutoTokenizer.from_pretrained(pico_llama)
    windows = pack_windows(read_documents(str(text_file)), tokenizer, WINDOW)[-16:]
    expected = source(windows).logits.log_softmax(-1)
    divergence = {}
    for name, folder in (
        ("refit", converted[0]),
        ("affine", tmp_path / "affine"),
        ("taylor", tmp_path / "taylor"),
    ):
        found = load_causal_lm(folder)(windows).logits.log_softmax(-1)
        divergence[name] = (expected.exp() * (expected - found)).sum(-1).mean().item()
    assert divergence["refit"] < divergence["affine"]
    assert divergence["affine"] < 0.8 * divergence["taylor"]
    for layer in converted[1]["layers"]:
        assert layer["heldout_error"] <= layer["affine_error"]


def exchange_(mlp):
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def scale_inversely_(mlp):
    factor = torch.linspace(-3, 3, len(mlp.gate_proj.weight))
    for linear, by in ((mlp.gate_proj, factor), (mlp.up_proj, 1 / factor)):
        linear.weight.data.mul_(by[:, None])
        if linear.bias is not None:
            linear.bias.data.mul_(by)


@pytest.mark.parametrize("change", [exchange_, scale_inversely_])
def test_symmetries_hold_for_the_converted_model_and_not_for_its_source(
    converted, pico_llama, token_ids, change
):
    changes = []
    for folder in (converted[0], pico_llama):
        model = load_causal_lm(folder)
        before = model(token_ids).logits
        for layer in model.model.layers:
            change(layer.mlp)
        changes.append(((model(token_ids).logits - before).norm() / before.norm()).item())
    assert changes[0] < 1e-5
    assert changes[1] > 0.05


def test_what_is_written(converted, pico_llama):
    out, record = converted
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (pico_llama / name).read_bytes()
    assert json.loads((out / "bilinearize.json").read_text()) == record
    config = json.loads((out / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert config["bilinear_bias"] is True
    source, written = (
        load_file(pico_llama / "model.safetensors"),
        load_file(out / "model.safetensors"),
    )
    for name in source:
        if ".mlp." not in name:
            assert torch.equal(source[name], written[name]), name
    assert "lm_head.weight" not in written  # tied
    for layer in AutoModelForCausalLM.from_pretrained(out).model.layers:
        q = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.gate_proj.bias[:, None]], 1).norm(
            dim=1
        )
        k = torch.cat([layer.mlp.up_proj.weight, layer.mlp.up_proj.bias[:, None]], 1).norm(dim=1)
        torch.testing.assert_close(q, k)


def test_states_on_disk_and_many_shards_give_the_same_weights(
    converted, pico_llama, text_file, tmp_path
):
    options = dict(text=str(text_file), tokens=TOKENS, window=WINDOW)
    out = tmp_path / "small"
    convert(str(pico_llama), out, state_budget="1KB", max_shard_size="20KB", **options)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 60_000 for shard in shards)
    written = {}
    for shard in shards:
        written |= load_file(shard)
    expected = load_file(converted[0] / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)
    load_causal_lm(out)
    assert not [path for path in out.iterdir() if path.name.startswith(("part-", "states-"))]


def test_sharded_source_with_a_layer_over_two_files(pico_llama, tmp_path, token_ids):
    folder = tmp_path / "sharded"
    LlamaForCausalLM.from_pretrained(pico_llama).save_pretrained(folder, max_shard_size="20KB")
    convert(str(folder), tmp_path / "gated", method="gated")
    source, gated = load_causal_lm(folder), load_causal_lm(tmp_path / "gated")
    assert torch.equal(source(token_ids).logits, gated(token_ids).logits)


def test_bfloat16_source_stays_bfloat16_unless_told(pico_llama, text_file, tmp_path):
    folder = tmp_path / "half"
    LlamaForCausalLM.from_pretrained(pico_llama, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico_llama).save_pretrained(folder)
    options = dict(text=str(text_file), tokens=256, window=WINDOW)
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        convert(str(folder), tmp_path / dtype, dtype=dtype, **options)
        written = load_file(tmp_path / dtype / "model.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {expected}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / dtype)
        assert model.dtype == expected


def test_untied_embeddings_and_source_biases(pico_llama, tmp_path, text_file, token_ids):
    config = LlamaForCausalLM.from_pretrained(pico_llama).config
    config.tie_word_embeddings, config.mlp_bias = False, True
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(pico_llama).save_pretrained(tmp_path / "source")
    convert(str(tmp_path / "source"), tmp_path / "gated", method="gated")
    gated = load_causal_lm(tmp_path / "gated")
    assert torch.equal(model(token_ids).logits, gated(token_ids).logits)
    convert(
        str(tmp_path / "source"),
        tmp_path / "affine",
        method="affine",
        text=str(text_file),
        tokens=512,
        window=WINDOW,
    )
    mlp, block = model.model.layers[0].mlp, load_causal_lm(tmp_path / "affine").model.layers[0].mlp
    x = torch.randn(400, 32)
    # Only the gates are approximated: most of the output's variance is explained.
    left = (block(x) - mlp(x)).norm() / (mlp(x) - mlp(x).mean(0)).norm()
    assert left < 0.7


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def poison(path):
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})


def drop(path):
    tensors = load_file(path)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "model.safetensors: truncated or damaged"),
        (poison, "model.layers.1.mlp.up_proj.weight holds NaN"),
        (drop, "model.layers.2.mlp.down_proj.weight is missing"),
        (lambda path: path.unlink(), "only safetensors weights are read"),
    ],
)
def test_damaged_source_is_refused_and_nothing_written(pico_llama, tmp_path, damage, named):
    import shutil

    folder = tmp_path / "source"
    shutil.copytree(pico_llama, folder)
    damage(folder / "model.safetensors")
    with pytest.raises(InputError, match=named):
        convert(str(folder), tmp_path / "out", method="taylor")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_missing_shard_is_named(pico_llama, tmp_path):
    folder = tmp_path / "sharded"
    LlamaForCausalLM.from_pretrained(pico_llama).save_pretrained(folder, max_shard_size="20KB")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(InputError, match=f"{victim.name}: shard named by .* is missing"):
        convert(str(folder), tmp_path / "out", method="taylor")


def config_of(kind, tmp_path, **options):
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **options).save_pretrained(tmp_path / "source")
    return str(tmp_path / "source")


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("gpt2", {"n_layer": 1}, "'gpt2' .no gated MLP: c_fc, c_proj.* is not supported"),
        ("mixtral", {"num_hidden_layers": 1}, "mixture of experts .num_local_experts = 8."),
        ("qwen3_moe", {"num_hidden_layers": 1}, "mixture of experts"),
        ("bert", {"num_hidden_layers": 1}, "'bert' .*not supported"),
        ("bilinear_llama", {}, "converted already"),
    ],
)
def test_sources_that_are_not_converted(kind, options, named, tmp_path):
    with pytest.raises(InputError, match=named):
        convert(config_of(kind, tmp_path, **options), tmp_path / "out", method="taylor")
    assert not (tmp_path / "out").exists()


def test_bad_options_are_named(pico_llama, text_file, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "there").mkdir()
    source, text, out = str(pico_llama), str(text_file), tmp_path / "out"
    cases = [
        (dict(), "needs calibration text"),
        (dict(text=str(tmp_path / "empty.txt"), window=32), "no text in it"),
        (dict(text=text, window=512), "at most 256 positions"),
        (dict(text=text, window=200, tokens=100), "fewer than one window"),
        (dict(text=text, window=32, tokens=40), "the fit needs two or more"),
        (dict(text=text, device="tpu9"), "device 'tpu9' can't be used"),
        (dict(text=text, max_shard_size="huge"), "'huge' is no size"),
    ]
    for options, named in cases:
        with pytest.raises(InputError, match=named):
            convert(source, out, **options)
        assert not out.exists() and not out.with_name("out.partial").exists()
    with pytest.raises(InputError, match="exists already"):
        convert(source, tmp_path / "there", method="taylor")
    with pytest.raises(InputError, match="no such checkpoint folder"):
        convert(str(tmp_path / "nowhere"), out, method="taylor")


def test_overfit_is_shown(pico_llama, text_file, tmp_path):
    options = dict(text=str(text_file), window=WINDOW)
    few = convert(str(pico_llama), tmp_path / "few", tokens=128, **options)
    many = convert(str(pico_llama), tmp_path / "many", tokens=4096, **options)
    assert "overfits its 128 tokens" in describe_fit(few)[-1]
    assert len(describe_fit(many)) == 1 and "held-out" in describe_fit(many)[0]
    assert "on the text fitted" in (tmp_path / "few" / "README.md").read_text()
    assert describe_fit(convert(str(pico_llama), tmp_path / "t", method="taylor")) == []
