"""The model card that a conversion writes: what was changed and how to load it."""

from pathlib import Path

DESCRIPTIONS = {
    "refit": "each gate replaced by its best line on calibration text, then `down_proj` solved in "
    "closed form, layer by layer on the converted model's own inputs",
    "layerwise": "as `refit`, then every weight of each block trained towards its layer's output "
    "on those inputs",
    "affine": "each gate replaced by its best line on calibration text",
    "taylor": "each gate replaced by its tangent at 0; no data used",
    "gated": "the MLPs kept as they were",
}


def write_card(path: Path, record: dict) -> None:
    """Write README.md from the conversion's record (see `bilinearize.json`)."""
    source = Path(record["source"]).name if Path(record["source"]).exists() else record["source"]
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {source}"] if source == record["source"] else []),
        "tags: [bilinearize, bilinear]",
        "---",
        f"# {source}, bilinear MLPs",
        "",
        f"Converted from `{source}` by bilinearize {record['versions']['bilinearize']}, method "
        f"`{record['method']}`: {DESCRIPTIONS[record['method']]}.",
        "",
        f"Form `{record['form']}`, rank {record['rank']}, activation {record['activation']}, "
        f"{record['parameters']:,} parameters.",
        "",
        *_fit_lines(record),
        "Load it with bilinearize installed (`import bilinearize` first), or without it:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)',
        "```",
        "",
        "A converted model that was not finetuned is far from its source: measure it with "
        "`bilinearize eval` before use. The MLPs alone are polynomial; softmax and RMSNorm remain.",
        "",
    ]
    path.write_text("\n".join(lines))


def _fit_lines(record: dict) -> list[str]:
    if "calibration" not in record:
        return []
    calibration = record["calibration"]
    rows = [
        f"Fitted on {calibration['tokens']:,} tokens (windows of {calibration['window']}). "
        "Error of each layer's MLP output on held-out windows, as a share of its sum of squares, "
        "tokens weighted by the inverse power of the residual stream:",
        "",
        "| layer | affine gates | with down_proj refitted |",
        "|---|---|---|",
    ]
    for layer in record["layers"]:
        if "affine_error" not in layer:
            rows.append(f"| {layer['layer']} | left as it was | |")
            continue
        refitted = layer.get("heldout_error")
        shown = "" if refitted is None else f"{refitted:.4f}"
        rows.append(f"| {layer['layer']} | {layer['affine_error']:.4f} | {shown} |")
    return [*rows, ""]
