"""`compare`: one table over finished reports."""

import json
import shutil
from copy import deepcopy

import matplotlib.image
import pytest

from bilinearize import InputError
from bilinearize.cli import main
from bilinearize.eval.runs import collect, compare, run_names


@pytest.fixture
def runs(report, tmp_path):
    """A report, and a run whose model has another rank, more tokens, and another text."""
    result, folder = report
    first = tmp_path / "first"
    shutil.copytree(folder, first)
    other = deepcopy(result)
    origin = {"source": "x", "method": "refit", "form": "bilinear", "rank": [1, 2, 4]}
    origin |= {"expand": 1, "activation": "identity", "converted_layers": 2, "layers": 3}
    origin |= {"calibration_tokens": 4096, "training_tokens": 100_000, "fit": {}, "training": None}
    other["candidates"] = {"half": result["candidates"]["half"] | {"origin": origin, "gap": 0.5}}
    other["protocol"]["tokens_sha256"] = "0" * 64
    second = tmp_path / "second" / "eval"
    second.mkdir(parents=True)
    (second / "eval.json").write_text(json.dumps(other))
    return first, tmp_path / "second", other


def test_comparison(runs, report, tmp_path, capsys):
    first, second, other = runs
    main(["compare", str(first), str(second), "--out", str(tmp_path / "out")])
    table = capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"]
    assert [(row["run"], row["model"]) for row in rows] == [
        *(("first", name) for name in ("copy", "half", "quarter")),
        ("second", "half"),
    ]
    assert [row["text"] for row in rows] == ["A", "A", "A", "B"]
    assert rows[1]["gap"] == report[0]["candidates"]["half"]["gap"] and rows[3]["gap"] == 0.5
    assert rows[1]["method"] is None and rows[3]["rank"] == [1, 2, 4]
    line = next(line for line in table.splitlines() if line.startswith("| second"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:10] == ["refit", "1-4", "1", "2 of 3", cells[6], "4,096", "100,000", "B"]
    assert "Gaps on different texts are not alike." in table and "A: " in table and "B: " in table
    assert table.split("\nWrote")[0] in (tmp_path / "out" / "compare.md").read_text()
    picture = matplotlib.image.imread(tmp_path / "out" / "compare.png")
    assert min(picture.shape[:2]) > 400 and picture[..., :3].std() > 0.05


def test_one_text_needs_no_warning(runs, report, tmp_path, capsys):
    compare([runs[0]], tmp_path / "out")
    assert "not alike" not in capsys.readouterr().out
    assert len({row.text for row in collect({"a": report[0], "b": report[0]})}) == 1


def test_bad_runs(runs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="no eval.json in it or its eval/"):
        compare([tmp_path], out)
    with pytest.raises(InputError, match="named twice"):
        run_names([runs[0], runs[0]])
    file = runs[0] / "eval.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 1}))
    with pytest.raises(InputError, match="eval.json: schema 1, not 2; evaluate again"):
        compare([runs[0]], out)
    file.write_text("{")
    with pytest.raises(InputError, match="not readable as JSON"):
        compare([runs[0]], out)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(InputError, match="exists already"):
        compare([runs[1]], out)
