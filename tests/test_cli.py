"""The command line: one clear line for bad input, and the whole pipeline as one resumable run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from bilinearize import InputError
from bilinearize.cli import COMMANDS, build_parser, main, spell_out
from bilinearize.model.checkpoint import load_causal_lm

ROOT = Path(__file__).parents[1]


def error_line(capsys, *argv) -> str:
    """Run a command that must fail; returns its one line."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in argv])
    assert stopped.value.code == 2
    message = capsys.readouterr().err.strip()
    lines = [line for line in message.splitlines() if line.startswith("bilinearize: error:")]
    assert message.splitlines()[-1:] == lines, message
    return lines[0]


def test_bad_input_is_one_line_and_status_2(capsys, pico_llama, text_file, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "bad.yaml").write_text("source: a\nout: b\nconvert: {methud: refit}\n")
    (tmp_path / "worse.yaml").write_text("source: [a\n")
    cases = [
        (("convert", pico_llama, out, "--methud", "refit"), "--methud"),
        (("convert", pico_llama, out, "--method", "magic"), "'affine', 'taylor'"),
        (("convert", pico_llama, out), "--text"),
        (("convert", tmp_path / "none", out, "--text", text_file), "no such checkpoint folder"),
        (("run", tmp_path / "bad.yaml"), "methud"),
        (("run", tmp_path / "worse.yaml"), "worse.yaml: "),
        (("run", tmp_path / "none.yaml"), "none.yaml"),
        (("finetune", pico_llama, out, "--teacher", pico_llama), "text"),
        (
            (
                "finetune",
                pico_llama,
                out,
                "--teacher",
                pico_llama,
                "--text",
                text_file,
                "--window",
                1,
            ),
            "--window is 1",
        ),
        (
            ("eval", pico_llama, pico_llama, "--out", out, "--text", tmp_path / "none.txt"),
            "none.txt",
        ),
        (("eval", pico_llama, pico_llama, "--out", out), "no text to evaluate on"),
        (("compare", tmp_path, "--out", out), "no eval.json"),
        (("push", tmp_path, "me/x"), "neither a checkpoint"),
        ((), "command"),
    ]
    for argv, named in cases:
        assert named in error_line(capsys, *argv)
        assert not out.exists()


@pytest.fixture(scope="module")
def run_folder(pico_llama, text_file, documents_file, tmp_path_factory):
    """A finished run and the YAML that made it."""
    folder = tmp_path_factory.mktemp("run")
    config = {
        "source": str(pico_llama),
        "out": str(folder / "out"),
        "baselines": ["taylor"],
        "convert": {"text": str(text_file), "tokens": 1024, "window": 32},
        "finetune": {"text": str(text_file), "tokens": 2048, "window": 32, "learning_rate": 1e-3},
        "eval": {"text": str(documents_file), "tokens": 1024, "window": 32, "sample_tokens": 8},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    main(["run", str(path)])
    return path, folder / "out"


def test_run_makes_every_part(run_folder):
    _, out = run_folder
    for name in ("converted", "taylor", "finetuned"):
        load_causal_lm(out / name)
    report = json.loads((out / "eval" / "eval.json").read_text())
    assert list(report["candidates"]) == ["taylor", "refit", "finetuned"]
    resolved = yaml.safe_load((out / "config.yaml").read_text())
    assert resolved["convert"]["tokens"] == 1024
    assert resolved["finetune"]["batch_size"] == 4  # a default, resolved


def test_a_second_run_skips_what_is_there_and_redoes_what_is_not(run_folder, capsys):
    path, out = run_folder
    kept = (out / "converted" / "model.safetensors").stat().st_mtime_ns
    report = out / "eval" / "eval.json"
    before = json.loads(report.read_text())["candidates"]
    for file in (out / "eval").iterdir():
        file.unlink()
    (out / "eval").rmdir()
    main(["run", str(path)])
    assert (out / "converted" / "model.safetensors").stat().st_mtime_ns == kept
    after = json.loads(report.read_text())["candidates"]
    assert before["refit"] == after["refit"]
    main(["run", str(path)])
    printed = capsys.readouterr().out
    assert printed.count("step skipped") >= 7 and "| taylor" in printed


def test_changed_settings_are_refused_by_name(run_folder, capsys):
    path, _ = run_folder
    line = error_line(capsys, "run", path, "--finetune.learning_rate", "0.5")
    assert "finetune.learning_rate changed since finetuned, eval" in line
    line = error_line(capsys, "run", path, "--convert.tokens", "512")
    assert "convert.tokens" in line and "converted" in line


def test_every_subcommand_is_carried_out():
    names = re.findall(r"{([a-z,]+)}", build_parser().format_help())[0].split(",")
    assert sorted(names) == sorted(COMMANDS)


def test_switches_need_no_value_and_hyphens_are_taken():
    words = spell_out(["push", "a-b", "me/c-d", "--dry-run", "--private", "false", "--message=x-y"])
    assert words == [
        *("push", "a-b", "me/c-d", "--dry_run", "true"),
        *("--private", "false", "--message=x-y"),
    ]
    assert spell_out(["--push_options.private"]) == ["--push_options.private", "true"]
    assert spell_out(["--text.my-text", "x"]) == ["--text.my-text", "x"]
    assert spell_out(["--kl-weight", "0.5"]) == ["--kl_weight", "0.5"]


def test_every_shipped_yaml_parses():
    # The others are read by tests/finetune/test_recipes.py.
    found = [p for p in sorted((ROOT / "configs").glob("*.yaml")) if p.name != "recovery.yaml"]
    assert found
    for path in found:
        args = build_parser().parse_args(["run", "--config", str(path), "--source", "x"])
        assert args.run.out


SLOW = """
import sys, time
from bilinearize.convert import stream
from bilinearize.cli import main
advance = stream.Stream.advance_student
def slowly(*args):
    time.sleep(0.5)
    advance(*args)
stream.Stream.advance_student = slowly
main(sys.argv[1:])
"""


def test_kill_during_convert_leaves_nothing_that_loads(pico_llama, text_file, tmp_path):
    out = tmp_path / "out"
    options = [
        "--text",
        text_file,
        "--tokens",
        "1024",
        "--window",
        "32",
        "--max_shard_size",
        "10KB",
    ]
    command = ["convert", pico_llama, out, *options]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SLOW, *command], stderr=subprocess.DEVNULL
    )
    partial = out.with_name("out.partial")
    deadline = time.monotonic() + 60
    while not list(partial.glob("part-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert list(partial.glob("part-*")), "killed before anything was written"
    assert not out.exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(partial)
    with pytest.raises(InputError):
        load_causal_lm(partial)
    main([str(argument) for argument in command])  # the same command again
    assert not partial.exists()
    assert torch.isfinite(load_causal_lm(out)(torch.arange(20)[None]).logits).all()
