"""Loading is all or nothing, writing too."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bilinearize import InputError
from bilinearize.model.checkpoint import (
    atomic_folder,
    list_tensors,
    load_causal_lm,
    load_tokenizer,
    resolve_checkpoint,
)


def copy(folder, target):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_checkpoint_that_lacks_a_weight_is_refused(pico_llama, tmp_path):
    folder = copy(pico_llama, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj.weight"
    kept = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"missing keys: {name}"):
        load_causal_lm(folder)
    AutoModelForCausalLM.from_pretrained(folder)  # control: transformers makes up a random gate
    save_file(
        tensors | {name: kept, "model.layers.9.extra": torch.ones(2)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(InputError, match="unexpected keys: model.layers.9.extra"):
        load_causal_lm(folder)


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or not")
    cases = {
        str(tmp_path / "none"): "no such checkpoint folder",
        str(tmp_path / "none.gguf"): "no such checkpoint folder",
        str(tmp_path / "model.bin"): "no such checkpoint folder",
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "broken.gguf"): "not a GGUF model",
        "nobody/no-such-model": "neither a local folder nor a hub model",
        "no such name": "neither a local folder nor a hub model",
    }
    for source, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            resolve_checkpoint(source)
        assert source in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(pico_llama, tmp_path):
    folder = copy(pico_llama, tmp_path / "copy")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="no tokenizer that transformers reads"):
        load_tokenizer(folder)


def test_an_index_that_promises_too_much_is_named(pico_llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pico_llama)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(set(list_tensors(tmp_path / "sharded").values())) > 3
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[0]
    tensors = load_file(shard)
    gone = sorted(tensors)[0]
    del tensors[gone]
    save_file(tensors or {"other": torch.ones(1)}, shard, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{shard.name}: lacks {gone}"):
        list_tensors(tmp_path / "sharded")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "result"
    with pytest.raises(KeyError), atomic_folder(target) as partial:
        (partial / "half").write_text("x")
        raise KeyError
    assert not target.exists() and not partial.exists()
    (tmp_path / "deep" / "result.partial").mkdir()  # what a killed run leaves
    (tmp_path / "deep" / "result.partial" / "stale").write_text("x")
    with atomic_folder(target) as partial:
        (partial / "whole").write_text("x")
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["whole"]
    with pytest.raises(InputError, match="exists already"), atomic_folder(target):
        pass
