"""benchmarks/forms.py: what width, rank and method cost and buy."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def forms():
    """benchmarks/forms.py as a module."""
    spec = spec_from_file_location("benchmarks_forms", ROOT / "benchmarks" / "forms.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_forms_are_measured_and_finished_ones_kept(forms, pico_llama, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [str(pico_llama), str(out), "--text", str(text_file), "--heldout", str(text_file)]
    arguments += ["--tokens", "1024", "--heldout_tokens", "256", "--window", "32"]
    forms.main([*arguments, "refit", "rank-2"])
    first = (out / "refit" / "model.safetensors").stat().st_mtime_ns
    forms.main([*arguments, "refit", "rank-2", "expand-3"])
    assert (out / "refit" / "model.safetensors").stat().st_mtime_ns == first
    rows = json.loads((out / "forms.json").read_text())
    assert [row["form"] for row in rows] == ["refit", "rank-2", "expand-3"]
    assert [row["mlp_cost"] for row in rows] == pytest.approx([1, 5 / 3, 3])
    parameters = [row["parameters"] for row in rows]
    assert parameters == sorted(parameters) and len(set(parameters)) == 3
    assert rows[1]["layer_errors"][0] <= rows[0]["layer_errors"][0]
    assert (out / "forms.png").stat().st_size > 1000
    assert (out / "forms.md").read_text().count("\n") == 5
    with pytest.raises(SystemExit):
        forms.main([*arguments, "rank-0"])
