"""A crudely converted pico model, and short ways to finetune it in this process or in others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bilinearize.finetune.arguments import training_arguments
from bilinearize.finetune.run import finetune
from bilinearize.model.families import FAMILIES

JOB = Path(__file__).with_name("job.py")
SETTINGS = {
    "window": 32,
    "tokens": 32 * 4 * 12,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "save_every": 4,
    "log_every": 1,
    "kl_chunk": 50,
}


def crude_student(teacher: Path, folder: Path, noise: float = 0.02) -> Path:
    """`silu(z)` replaced by `z / 2`, with noise and biases: a bad start, and no gauge fixed."""
    source = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    family = FAMILIES["llama"]
    shape = source.config.to_dict() | {"bilinear_form": "bilinear", "bilinear_bias": True}
    for name in ("model_type", "architectures", "dtype"):
        shape.pop(name, None)
    student = family.causal_lm(family.config(**shape))
    student.load_state_dict(source.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in student.model.layers:
            layer.mlp.gate_proj.weight.mul_(0.5)
            for tensor in layer.mlp.parameters():
                draw = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(draw * noise if tensor.dim() == 1 else tensor * (1 + noise * draw))
    student.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    record = {"source": str(teacher), "method": "taylor", "form": "bilinear", "rank": 1}
    record |= {"activation": "identity", "layers": [], "parameters": student.num_parameters()}
    record |= {"versions": {"bilinearize": "0.1.0"}}
    (folder / "bilinearize.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices are slower on more threads, and sums then depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def student(pico_llama, tmp_path_factory) -> Path:
    """The folder of a converted pico Llama."""
    return crude_student(pico_llama, tmp_path_factory.mktemp("student") / "crude")


@pytest.fixture(scope="session")
def job(student, pico_llama, text_file):
    """The keyword arguments of a short finetune of 12 steps, all but `out`."""
    return {
        "student": str(student),
        "teacher": str(pico_llama),
        "text": str(text_file),
        **SETTINGS,
    }


@pytest.fixture(scope="session")
def launch():
    """Run `job.py` in other processes: `launch(job, ..., processes=2) -> (exit status, output)`,
    with further environment variables."""

    def start(*jobs: dict, processes: int = 1, **variables: str) -> tuple[int, str]:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
            command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
        done = subprocess.run(
            [*command, str(JOB), json.dumps(jobs, default=str)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    return start


@pytest.fixture(scope="session")
def finished(job, tmp_path_factory) -> Path:
    """The result of `job`, undisturbed."""
    return finetune(**job, out=tmp_path_factory.mktemp("finished") / "out")


@pytest.fixture(scope="session")
def weights():
    """Read a folder's tensors: `weights(folder) -> {name: tensor}`."""
    return lambda folder: load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def history():
    """Read a folder's log: `history(folder) -> [entry, ...]`."""
    return lambda folder: [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def step_arguments():
    """Trainer arguments without warmup or clipping: `step_arguments(folder, batch_size=4)`."""

    def make(folder, batch_size=4, accumulation=1, weight_decay=0.0):
        return training_arguments(
            folder / "checkpoints",
            learning_rate=1e-3,
            warmup=0.0,
            schedule="constant",
            weight_decay=weight_decay,
            max_grad_norm=0.0,
            batch_size=batch_size,
            accumulation=accumulation,
            save_every=100,
            log_every=1,
            bf16=False,
            seed=0,
        )

    return make
