"""Two processes share the windows: the same result, one report, one line for bad input."""

import json
import os
import subprocess
import sys

import pytest

from bilinearize.eval.compare import evaluate
from bilinearize.eval.processes import own_share

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def launch(*argv) -> subprocess.CompletedProcess:
    """`bilinearize eval` in two processes. On a CPU `accelerate launch` starts but one."""
    command = [sys.executable, "-P", "-m", *TORCHRUN, "-m", "bilinearize", "eval"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command += [str(argument) for argument in argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_two_processes_give_what_one_gives(pico_llama, half, documents_file, text_file, tmp_path):
    text = {"web": str(documents_file), "words": str(text_file)}
    options = {"window": 64, "tokens": 320, "prompts": 3, "sample_tokens": 6}
    flags = [f"--{key}={value}" for key, value in options.items()]
    flags += [f"--text.{name}={path}" for name, path in text.items()]
    done = launch(pico_llama, half, "--out", tmp_path / "two", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| teacher") == 1
    two = json.loads((tmp_path / "two" / "eval.json").read_text())
    one = evaluate(str(pico_llama), {"half": str(half)}, tmp_path / "one", text=text, **options)
    assert (two["protocol"].pop("processes"), one["protocol"].pop("processes")) == (2, 1)
    for result in (one, two):
        for record in (result["teacher"], result["candidates"]["half"]):
            positions = record.pop("nll_by_position")
            assert len(positions) == 63
            record["mean_by_position"] = pytest.approx(sum(positions) / 63, rel=1e-12)
        for part in result["slices"].values():
            for record in (part["teacher"], part["candidates"]["half"]):
                del record["nll_by_position"]  # added up in another order
    assert two == one


def test_bad_input_is_one_line_from_two_processes(pico_llama, half, documents_file, tmp_path):
    out = tmp_path / "two"
    flags = ["--out", out, "--text", documents_file, "--window", 64, "--tokens", 63]
    done = launch(pico_llama, half, *flags)
    lines = [line for line in done.stderr.splitlines() if line.startswith("bilinearize: error:")]
    assert done.returncode != 0 and len(lines) == 1, done.stderr[-2000:]
    assert "63 tokens asked for" in lines[0] and not out.exists()


def test_one_process_has_all():
    assert own_share([1, 2, 3]) == (0, [1, 2, 3])
