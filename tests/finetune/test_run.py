"""`finetune` from folder to folder: what changes, what is carried on, what is refused."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.run import finetune
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer
from bilinearize.model.errors import InputError
from bilinearize.model.text import pack_windows, read_documents

IDS = torch.arange(2, 66)[None]
UNTRUSTED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "bilinearize":
            raise ImportError("bilinearize is not installed")

sys.meta_path.insert(0, Blocker())
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert not any(name.startswith("bilinearize.") for name in sys.modules)
torch.save(model(torch.arange(2, 66)[None]).logits, sys.argv[2])
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except ValueError:
    sys.exit(0)
sys.exit("loads without trust")
"""


def kl_to(teacher, folder, rows):
    """Mean KL(teacher || folder) in nats per token, all positions."""
    with torch.no_grad():
        p, q = (load_causal_lm(f)(rows).logits.double().log_softmax(-1) for f in (teacher, folder))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_only_mlps_change(finished, student, weights):
    before, after = weights(student), weights(finished)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".mlp." in name}


def test_kl_falls(job, student, pico_llama, text_file, documents_file, tmp_path, history):
    longer = job | {"tokens": 32 * 4 * 100, "save_every": 100}
    out = finetune(**longer, out=tmp_path / "longer")
    assert [entry["step"] for entry in history(out)] == list(range(1, 101))
    documents = read_documents(str(documents_file))
    held_out = pack_windows(documents, load_tokenizer(student), 32, 512)
    before, after = (kl_to(pico_llama, folder, held_out) for folder in (student, out))
    assert kl_to(pico_llama, pico_llama, held_out) == 0
    assert after < 0.7 * before


def test_the_folder_is_complete(finished, student, text_file):
    record = json.loads((finished / "finetune.json").read_text())
    assert record["steps"] == 12 and record["tokens"] == 12 * 4 * 32
    assert record["teacher"] == "shared" and record["dtype"] == "float32"
    assert record["settings"]["learning_rate"] == 1e-2 and record["settings"]["processes"] == 1
    assert record["last"]["step"] == 12 and record["seconds"] > 0
    for name in ("tokenizer.json", "tokenizer_config.json", "bilinearize.json"):
        assert (finished / name).read_bytes() == (student / name).read_bytes()
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (finished, student))
    assert set(ours["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert ours | {"auto_map": 0} == theirs | {"auto_map": 0}
    assert not list(finished.parent.glob("out.*"))


def test_loads_with_and_without_the_package(finished, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(finished).eval()
    assert torch.equal(
        AutoModel.from_pretrained(finished).embed_tokens.weight, model.lm_head.weight
    )
    command = [sys.executable, "-c", UNTRUSTED, str(finished), str(tmp_path / "logits.pt")]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), model(IDS).logits, atol=1e-6)


def test_every_weight_trains(job, student, weights, tmp_path, capsys):
    short = job | {"tokens": 32 * 4 * 2, "learning_rate": 1e-3, "train": "all"}
    out = finetune(**short, out=tmp_path / "out")
    assert "every weight: 37,952 of 37,952" in capsys.readouterr().out
    before, after = weights(student), weights(out)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((out / "finetune.json").read_text())["teacher"] == "separate"
    load_causal_lm(out)


def test_stored_dtype_stays_and_an_unequal_teacher_is_named(
    job, student, weights, tmp_path, capsys
):
    half = shutil.copytree(student, tmp_path / "half")
    tensors = {name: tensor.bfloat16() for name, tensor in weights(student).items()}
    save_file(tensors, half / "model.safetensors", {"format": "pt"})
    short = job | {"student": str(half), "tokens": 32 * 4 * 2}
    out = finetune(**short, out=tmp_path / "out")
    assert {t.dtype for t in weights(out).values()} == {torch.bfloat16}
    assert json.loads((out / "finetune.json").read_text())["dtype"] == "bfloat16"
    assert "not shared: model.embed_tokens.weight differs" in capsys.readouterr().out
    assert torch.equal(weights(out)["model.norm.weight"], tensors["model.norm.weight"])


def test_memory_savers_change_nothing(job, finished, weights, tmp_path):
    checkpointed = job | {"gradient_checkpointing": True, "kl_chunk": 7}
    out = finetune(**checkpointed, out=tmp_path / "out")
    before, after = weights(finished), weights(out)
    assert all(torch.allclose(before[name], after[name], atol=1e-4) for name in before)


def test_autocast_and_plain_cross_entropy_run(job, tmp_path):
    other = {"bf16": True, "kl_weight": 0.0, "cross_entropy_weight": 1.0, "tokens": 32 * 4 * 4}
    out = finetune(**job | other, out=tmp_path / "out")
    record = json.loads((out / "finetune.json").read_text())
    assert record["teacher"] is None and "kl" not in record["last"]
    assert record["last"]["loss"] < record["first"]["loss"]
    assert AutoConfig.from_pretrained(out).dtype == torch.float32


def test_another_seed_orders_the_windows_otherwise(job, finished, weights, tmp_path):
    short = job | {"seed": 1}
    out = finetune(**short, out=tmp_path / "out")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(out)[name], weights(finished)[name])


def llama(pico_llama, folder, **changes):
    """Another random Llama with the pico tokenizer."""
    config = LlamaConfig.from_pretrained(pico_llama)
    for name, value in changes.items():
        setattr(config, name, value)
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in pico_llama.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def short_text(pico_llama, folder):
    path = folder.with_name("short.txt")
    path.write_text("the old tree stands under water. " * 3)
    return str(path)


def other_vocabulary(pico_llama, folder):
    return llama(pico_llama, folder, vocab_size=301)


def other_tokenizer(pico_llama, folder):
    shutil.copytree(pico_llama, folder)
    text = (folder / "tokenizer.json").read_text()
    swapped = text.replace('"!": 2,', '"!": 3,').replace('"\\"": 3,', '"\\"": 2,')
    assert swapped != text
    (folder / "tokenizer.json").write_text(swapped)
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"text": short_text, "window": 64}, "short.txt: .* fewer than one window of 64"),
        ({"window": 512, "tokens": 512 * 4}, "--window 512 is longer than .* 256"),
        ({"tokens": 127}, "less than one step of 4 windows"),
        ({"text": "missing.txt"}, "missing.txt: no such text file"),
        ({"student": "./missing"}, "missing: no such checkpoint"),
        ({"teacher": other_vocabulary}, "vocab_size 301"),
        ({"teacher": other_tokenizer}, "its tokenizer has other tokens"),
        ({"student": other_vocabulary}, "not a converted model; convert it first"),
        ({"learning_rate": 0.0}, "--learning_rate is 0.0; use more than 0"),
        ({"kl_weight": 0.0}, "--kl_weight and --cross_entropy_weight are both 0"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(job, pico_llama, tmp_path, changes, message):
    made = {
        k: str(v(pico_llama, tmp_path / "made")) if callable(v) else v for k, v in changes.items()
    }
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError, match=message) as error:
        finetune(**job | made, out=tmp_path / "runs" / "out")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "runs").iterdir())


def test_an_existing_folder_is_refused(job, tmp_path):
    with pytest.raises(InputError, match="exists already"):
        finetune(**job, out=tmp_path)
    (tmp_path / "out.work").mkdir()
    with pytest.raises(InputError, match="no work folder of a finetune"):
        finetune(**job, out=tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list((tmp_path / "out.work").iterdir())


@pytest.mark.parametrize("field, value", [("bos", "some"), ("train", "none"), ("warmup", 1.0)])
def test_settings_out_of_range_are_refused(field, value):
    FinetuneConfig(text="t.txt")
    with pytest.raises(InputError, match=f"--{field} is {value!r}"):
        FinetuneConfig(text="t.txt", **{field: value})
