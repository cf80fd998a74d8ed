"""The shipped recipes are read by what they are for, and the comparison of recipes runs."""

import json
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from bilinearize.convert.config import ConvertConfig
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.launch import launch
from bilinearize.model.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recovery():
    """benchmarks/recovery.py as a module."""
    path = ROOT / "benchmarks" / "recovery.py"
    spec = spec_from_file_location("benchmarks_recovery", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_recipe_of_the_comparison_is_valid():
    plan = yaml.safe_load((ROOT / "configs" / "recovery.yaml").read_text())
    for options in plan["students"].values():
        ConvertConfig(text="a.txt", **options)
    for name, recipe in plan["recipes"].items():
        assert recipe["student"] in plan["students"], name
        settings = {"text": "a.txt"} | plan["common"] | recipe.get("settings", {})
        stages = FinetuneConfig(**settings).stage_list()
        assert sum(stage.tokens for stage in stages) == settings["tokens"], name
        assert recipe["rates"], name


def test_recipes_are_compared_and_finished_runs_kept(
    recovery, pico_llama, text_file, tmp_path, capsys
):
    annealing = {"loss": "lm", "train": "all", "homotopy": "swish-beta"}
    plan = {
        "common": {
            "window": 32,
            "tokens": 1280,
            "heldout_tokens": 320,
            "eval_every": 5,
            "save_every": 1,
            "log_every": 1,
        },
        "students": {
            "refit": {"method": "refit", "tokens": 512, "window": 32},
            "gated": {"method": "gated"},
        },
        "recipes": {
            "kl": {"student": "refit", "rates": [1e-3], "settings": {"schedule": "constant"}},
            "annealing": {"student": "gated", "rates": [1e-3], "settings": annealing},
            "control": {
                "student": "gated",
                "rates": [1e-3],
                "settings": annealing | {"control": True},
            },
        },
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    arguments = [str(pico_llama), str(tmp_path / "out"), "--text", str(text_file)]
    arguments += ["--first", "512", "--plan", str(tmp_path / "plan.yaml")]
    recovery.main(arguments)
    runs = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert [run["recipe"] for run in runs] == ["kl", "annealing", "control"]
    assert runs[1]["start"] == pytest.approx(0, abs=1e-5) and runs[1]["kl"] > 0.01
    assert [tokens for tokens, _, _ in runs[0]["path"]] == [0, 640, 1280]
    parts = [
        (tmp_path / "out" / f"{name}.txt").read_text()
        for name in ("heldout", "train", "calibration")
    ]
    assert "".join(parts) == text_file.read_text() and all(parts)
    assert (tmp_path / "out" / "recovery.png").stat().st_size > 5000
    kept = tmp_path / "out" / "runs" / "kl-0.001" / "model.safetensors"
    made = kept.stat().st_mtime_ns
    capsys.readouterr()
    recovery.main([*arguments, "kl", "--rates", "0.001", "30"])
    assert kept.stat().st_mtime_ns == made
    table = capsys.readouterr().out
    assert "| kl | 30 | the loss is" in table
    recovery.main(
        [*arguments[:2], *arguments[-2:], "kl", "--rates", "0.001", "30", "7", "--finished"]
    )
    assert table.endswith(capsys.readouterr().out)
    out = tmp_path / "together"
    together = [*arguments[:1], str(out), *arguments[2:], "kl", "--together"]
    recovery.main(together)
    parts = [(out / f"{name}.txt").read_text() for name in ("heldout", "train")]
    assert "".join(parts) == text_file.read_text()
    record = json.loads((out / "students" / "refit" / "bilinearize.json").read_text())
    assert record["calibration"]["text"] == str(out / "train.txt")


ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path):
    config = load_config_from_file(str(path))
    assert config.num_machines == 1 and config.num_processes >= 1
    with path.open() as lines:
        use = [line for line in lines if line.startswith("#   bilinearize")]
    assert len(use) == 1 and f"--accelerate configs/accelerate/{path.name}" in use[0]
    if path.stem.startswith("zero"):
        assert (ROOT / config.deepspeed_config["deepspeed_config_file"]).is_file()


def test_every_configuration_is_read_by_some_test():
    kinds = {"accelerate", "slurm", "configs"}
    for path in (ROOT / "configs").rglob("*"):
        assert path.is_dir() or path.parent.name in kinds, path
    stems = {path.stem for path in ACCELERATE}
    assert stems == {"single-gpu", "ddp", "fsdp2", "fsdp2-cpu", "cpu", "zero2", "zero3"}


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_reads_its_configurations(stage):
    deepspeed = pytest.importorskip("deepspeed.runtime.config", reason="needs deepspeed")
    path = ROOT / "configs" / "accelerate" / f"zero{stage}.json"
    settings = json.loads(path.read_text())
    # accelerate fills in what is "auto" from the command's own settings.
    filled = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    zero = settings["zero_optimization"]
    numbers = {name: 10**8 for name, value in zero.items() if value == "auto"}
    config = deepspeed.DeepSpeedConfig(settings | filled | {"zero_optimization": zero | numbers})
    assert config.zero_config.stage == stage and config.bfloat16_config.enabled
    with pytest.raises(Exception, match="stage"):
        deepspeed.DeepSpeedConfig(settings | filled | {"zero_optimization": {"stage": 7}})


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_alike_and_resumes(stage, job, finished, history, weights, tmp_path):
    pair = job | {"batch_size": 2}
    again = pair | {"out": str(tmp_path / "again")}
    jobs = [pair | {"out": str(tmp_path / "out")}, again | {"interrupt_after": 6}, again]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", f"configs/accelerate/zero{stage}.yaml"]
    command += ["--main_process_port", "0", str(Path(__file__).with_name("job.py"))]
    done = subprocess.run([*command, json.dumps(jobs)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(history(tmp_path / "out"), history(finished), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
    first, second = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "slurm").glob("*.sh")))
def test_slurm_scripts_are_shell(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    assert "#SBATCH --requeue" in text and "143" in text


@pytest.mark.parametrize(
    "arguments, message",
    [((-1, None), "--launch is -1; use 1 or more"), ((2, "none.yaml"), "none.yaml: no such file")],
)
def test_a_launch_that_can_not_be_is_one_line(arguments, message):
    with pytest.raises(InputError, match=message):
        launch(["finetune"], *arguments)
