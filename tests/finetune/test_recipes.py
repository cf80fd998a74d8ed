"""The shipped recipes are read by what they are for, and the comparison of recipes runs."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from bilinearize.convert.config import ConvertConfig
from bilinearize.finetune.config import FinetuneConfig

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
        assert sum(stage.tokens for stage in stages) == plan["common"]["tokens"], name
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
    whole = (
        (tmp_path / "out" / "train.txt").read_text(),
        (tmp_path / "out" / "heldout.txt").read_text(),
    )
    assert whole[1] + whole[0] == text_file.read_text()
    assert (tmp_path / "out" / "recovery.png").stat().st_size > 5000
    kept = tmp_path / "out" / "runs" / "kl-0.001" / "model.safetensors"
    made = kept.stat().st_mtime_ns
    capsys.readouterr()
    recovery.main([*arguments, "kl", "--rates", "0.001", "30"])
    assert kept.stat().st_mtime_ns == made
    assert "| kl | 30 | the loss is" in capsys.readouterr().out
