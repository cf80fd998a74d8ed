"""The model card of a converted checkpoint, from the records in its folder.

A conversion and a finetune write a first card; `bilinearize push` writes it anew with what an
evaluation measured and with the hub's metadata. Every number comes from a record.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bilinearize.model.errors import InputError
from bilinearize.model.tables import format_table

DESCRIPTIONS = {
    "refit": "each gate replaced by its best line on calibration text, then `down_proj` solved in "
    "closed form, layer by layer on the converted model's own inputs",
    "layerwise": "as `refit`, then every weight of each block trained towards its layer's output "
    "on those inputs",
    "affine": "each gate replaced by its best line on calibration text",
    "taylor": "each gate replaced by its tangent at 0; no data used",
    "gated": "the MLPs kept as they were",
    "annealed": "kept at first, then the activation moved to `z / 2` while training "
    "(arXiv 2410.08417), and folded into the weights",
}
LOADING = """\
With bilinearize installed:

```python
import bilinearize
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

Without it, by the modeling file that travels with the weights:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
```"""
STOCK_LOADING = """\
It is a class that transformers has, so no custom code is needed:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""
LIMITS = """\
Softmax and RMSNorm are as they were, so the model as a whole is no polynomial. It inherits the \
limits and biases of the model that it was made from, and was measured on the text named here \
only: a small gap in perplexity doesn't show that it does as well at tasks."""
UNMEASURED = """\
A converted model that was not finetuned is far from its source: measure it with \
`bilinearize eval` before use."""
CITATIONS = """\
```bibtex
@misc{pearce2024bilinear,
  title = {Bilinear MLPs enable weight-based mechanistic interpretability},
  author = {Pearce, Michael T. and Dooms, Thomas and Rigg, Alice and Oramas, Jose M. and
            Sharkey, Lee},
  year = {2024}, eprint = {2410.08417}, archivePrefix = {arXiv}
}
@misc{breslow2026gated,
  title = {Gated MLPs as symmetry-broken rank-1 bilinear attention},
  author = {Breslow},
  year = {2026}, eprint = {2606.22172}, archivePrefix = {arXiv}
}
```"""


@dataclass(frozen=True)
class Records:
    """What a checkpoint folder says of itself."""

    folder: Path
    config: dict
    made: dict
    """`bilinearize.json`."""
    trained: dict | None
    """`finetune.json`, where it was finetuned."""
    exported: dict | None = None
    """`export.json`, where it was written in another form."""


def read_records(folder: Path) -> Records:
    """The records of a converted checkpoint.

    Raises:
        InputError: if it has none, or one can't be read.
    """
    if not (folder / "bilinearize.json").is_file():
        raise InputError(
            f"{folder}: no bilinearize.json; name a folder that convert or finetune wrote."
        )
    found = {
        name: read_json(folder / name) if (folder / name).is_file() else None
        for name in ("config.json", "finetune.json", "export.json")
    }
    # While a conversion is written its config.json comes last.
    return Records(
        folder,
        found["config.json"] or {},
        read_json(folder / "bilinearize.json"),
        found["finetune.json"],
        found["export.json"],
    )


def read_json(path: Path) -> dict:
    """A JSON file.

    Raises:
        InputError: if it can't be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from error


def read_license(folder: Path) -> str | None:
    """The licence that a checkpoint's own card names in its metadata; None if it names none."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---\n") or "\n---" not in text[4:]:
        return None
    try:
        metadata = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return None
    name = metadata.get("license") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None


def source_name(made: dict) -> str:
    """The source's hub id, or the last part of a local path."""
    source = made["source"]
    return source if is_hub_id(source) else Path(source).name


def is_hub_id(source: str) -> bool:
    """Whether a source reads as `owner/name` and is no local path."""
    parts = source.split("/")
    return len(parts) == 2 and all(parts) and source[0] not in "./~" and not Path(source).exists()


def metadata_of(records: Records, license_name: str | None) -> dict[str, Any]:
    """The hub's metadata that follows from the records."""
    made, trained = records.made, records.trained
    texts = [
        made.get("calibration", {}).get("text"),
        (trained or {}).get("settings", {}).get("text"),
    ]
    named = {text.partition(":")[0] for text in texts if isinstance(text, str) and is_hub_id(text)}
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if license_name is not None:
        found["license"] = license_name
    if is_hub_id(made["source"]):
        found |= {"base_model": [made["source"]], "base_model_relation": "finetune"}
    if named:
        found["datasets"] = sorted(named)
    custom = ["custom_code"] if is_custom(records) else []
    return found | {"tags": ["bilinearize", "bilinear", "bilinear-mlp", *custom]}


def is_custom(records: Records) -> bool:
    """Whether it needs our class to load: all but a stock export."""
    return (records.exported or {}).get("format") != "stock"


def describe_loading(records: Records, name: str) -> str:
    """How to load it from `name`, a folder or hub id."""
    return (LOADING if is_custom(records) else STOCK_LOADING).format(name=name)


def format_front(metadata: dict[str, Any]) -> str:
    """Metadata as the YAML block that a card starts with."""
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---"


def write_card(folder: Path) -> None:
    """Write `README.md` from the records in `folder`.

    Raises:
        InputError: if the folder has no records.
    """
    records = read_records(folder)
    source = source_name(records.made)
    metadata = metadata_of(records, records.made.get("license"))
    parts = [format_front(metadata), f"# {source}, bilinear MLPs", describe_change(records)]
    parts += describe_making(records)
    parts += ["## Loading", describe_loading(records, "FOLDER"), "## Limits"]
    parts += [LIMITS] if records.trained else [UNMEASURED, LIMITS]
    parts += ["## Citation", CITATIONS]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def describe_change(records: Records, before: int | None = None) -> str:
    """What was changed, in a sentence or two.

    Args:
        before: parameters of the source, where they are known.
    """
    made = records.made
    revision = f" at revision `{made['revision']}`" if made.get("revision") else ""
    layers = made["layers"]
    converted = sum(layer.get("form", "bilinear") != "gated" for layer in layers)
    exported = records.exported
    grown = made["parameters"] if exported is None else exported["parameters"]
    size = f"{grown:,} parameters" + (f", {before:,} before" if before else "")
    return (
        f"`{source_name(made)}`{revision} with the gated MLPs of {converted} of its {len(layers)} "
        "layers rewritten as bilinear blocks, `y(x) = Σ_j (q_j·x + b_j)(k_j·x + c_j) v_j + e`, by "
        f"bilinearize {made['versions']['bilinearize']}. Form `{made['form']}`, rank "
        f"{made['rank']}, {made.get('expand', 1)} slots for each of the source's, activation "
        f"`{made['activation']}`; {size}."
    ) + ("" if exported is None else f" Written as {exported['note']} (`{exported['class']}`).")


def describe_making(records: Records) -> list[str]:
    """How it was made: the conversion, its fit errors, the finetune."""
    made, trained = records.made, records.trained
    parts = ["## Conversion", f"Method `{made['method']}`: {DESCRIPTIONS[made['method']]}."]
    if "calibration" in made:
        facts = made["calibration"]
        parts[-1] += (
            f" Calibrated on {facts['tokens']:,} tokens of `{_shown(facts['text'])}` in windows of "
            f"{facts['window']}."
        )
        parts += _fit_table(made["layers"])
    if trained is not None:
        parts += ["## Finetune", *_training(trained)]
    return parts


def _shown(text: str) -> str:
    return text if is_hub_id(text) else Path(text).name


def _fit_table(layers: Sequence[dict]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("layer", "affine gates", "as written", "as written, on the text fitted")
    ]
    for layer in layers:
        names = ("affine_error", "heldout_error", "calibration_error")
        errors = [layer.get(name) for name in names]
        kept = layer.get("form") == "gated"
        cells = ["" if error is None else f"{error:.4f}" for error in errors]
        rows.append((str(layer["layer"]), *(("left as it was", "", "") if kept else cells)))
    note = (
        "Error of each layer's MLP output on held-out windows, as a share of its sum of squares, "
        "tokens weighted by the inverse power of the residual stream:"
    )
    return [note, format_table(rows)]


def _training(trained: dict) -> list[str]:
    settings = trained["settings"]
    last = ", ".join(
        f"{name} {trained['last'][key]:.4f}"
        for key, name in (("kl", "KL"), ("gap", "gap"), ("loss", "loss"))
        if trained.get("last", {}).get(key) is not None
    )
    text = settings.get("text")
    source = f" of `{_shown(text)}`" if isinstance(text, str) else ""
    said = (
        f"Distilled from the source on {trained['tokens']:,} tokens{source} in "
        f"{trained['steps']:,} steps; {trained['trained_parameters']:,} parameters trained."
    )
    if last:
        said += f" At the end, on training text and in nats per token: {last}."
    rows = [("setting", "value")]
    for key, value in settings.items():
        simple = isinstance(value, str | int | float | bool)
        if simple and not key.endswith("sha256"):
            rows.append((key, _shown(str(value)) if key == "text" else str(value)))
    return [said, format_table(rows)]
