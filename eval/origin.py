"""How a candidate was made, from the records in its folder: `bilinearize.json`, `finetune.json`."""

import json
from pathlib import Path

from bilinearize.model.errors import InputError

CURVE = ("loss", "kl", "gap", "heldout_kl", "heldout_gap")


def read_origin(folder: Path) -> dict | None:
    """The record of a converted checkpoint, as it stands in `eval.json`; None for another model.

    Raises:
        InputError: if a record can't be read.
    """
    made = read_json(folder / "bilinearize.json")
    if made is None:
        return None
    trained = read_json(folder / "finetune.json")
    layers = [layer for layer in made["layers"] if layer.get("form", "bilinear") != "gated"]
    fit = {
        key: [layer.get(key) for layer in layers]
        for key in ("layer", "affine_error", "heldout_error", "calibration_error")
    }
    return {
        "source": made["source"],
        "method": made["method"],
        "form": made["form"],
        "rank": made["rank"],
        "expand": made.get("expand", 1),
        "activation": made["activation"],
        "converted_layers": len(layers),
        "layers": len(made["layers"]),
        "calibration_tokens": made.get("calibration", {}).get("tokens", 0),
        "training_tokens": 0 if trained is None else trained["tokens"],
        "fit": fit,
        "training": None if trained is None else read_curve(folder / "log.jsonl", trained),
    }


def read_json(path: Path) -> dict | None:
    """A JSON file; None where there is none.

    Raises:
        InputError: if it isn't JSON.
    """
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from error


def read_curve(log: Path, trained: dict) -> dict[str, list]:
    """Losses of a finetune against the tokens it had seen, over all of its stages.

    Training and held-out text have entries of their own; what an entry lacks is None.

    Raises:
        InputError: if the log can't be read.
    """
    curve: dict[str, list] = {"tokens": [], **{key: [] for key in CURVE}}
    if not log.is_file():
        return curve
    stages = trained.get("stages") or [trained]
    try:
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        for entry in entries:
            number = entry.get("stage", 0)
            before = sum(stage["tokens"] for stage in stages[:number])
            stage = stages[number]
            curve["tokens"].append(before + entry["step"] * stage["tokens"] // stage["steps"])
            for key in CURVE:
                curve[key].append(entry.get(key))
    except (ValueError, KeyError, IndexError) as error:
        raise InputError(f"{log}: not the log of a finetune: {error!r}") from error
    return curve
