"""What width, rank and method buy: forms.py MODEL OUT --text FILE --heldout FILE [FORM...]

Converts MODEL to each form (all of FORMS, if none is named) into OUT/<form>, where that is not done
yet, and measures all of them on the held-out text. Writes OUT/forms.md, forms.json and forms.png:
parameters and the MLPs' multiplications a token, as shares of the source's, against the held-out
fit error (median over layers) and perplexity.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

from bilinearize.convert.run import convert
from bilinearize.eval.compare import evaluate

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FORMS: dict[str, dict[str, Any]] = {
    "affine": {"method": "affine"},
    "refit": {},
    "layerwise": {"method": "layerwise"},
    "rank-2": {"rank": 2},
    "rank-4": {"rank": 4},
    "expand-2": {"expand": 2},
    "expand-3": {"expand": 3},
}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Convert what is missing, evaluate, and return a row for each form."""
    text = {"text": str(options.text), "bos": options.bos, "window": options.window}
    names = options.forms or list(FORMS)
    for name in names:
        if not (options.out / name).is_dir():
            print(name, flush=True)
            convert(options.model, options.out / name, **text, tokens=options.tokens, **FORMS[name])
    report = options.out / "report"
    if report.is_dir():
        shutil.rmtree(report)
    result = evaluate(
        options.model,
        {name: str(options.out / name) for name in names},
        report,
        text=str(options.heldout),
        tokens=options.heldout_tokens,
        window=options.window,
        bos=options.bos,
        prompts=0,
    )
    return [describe(options.out / name, result, name) for name in names]


def describe(folder: Path, result: dict[str, Any], name: str) -> dict[str, Any]:
    """One form's row."""
    record = json.loads((folder / "bilinearize.json").read_text())
    layers, found = record["layers"], result["candidates"][name]
    errors = [layer.get("heldout_error", layer.get("affine_error")) for layer in layers]
    fitted = [layer["calibration_error"] for layer in layers if "calibration_error" in layer]
    # A slot of rank r has 2 r + 1 vectors; the source's has 3.
    cost = sum((2 * layer["rank"] + 1) * record["expand"] / 3 for layer in layers) / len(layers)
    return {
        "form": name,
        "tokens": record["calibration"]["tokens"],
        "parameters": record["parameters"],
        "mlp_cost": cost,
        "heldout_error": median(errors),
        "calibration_error": median(fitted) if fitted else None,
        "layer_errors": errors,
        "perplexity": found["perplexity"],
        "times": found["ratio"],
        "gap": found["gap"],
        "seconds": record["seconds"],
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| form | tokens | parameters | MLP cost | fit error, held out | on fitted text "
        "| perplexity | times the teacher's | gap, nats |",
        "|---|" + "---:|" * 8,
    ]
    for row in rows:
        own = "" if row["calibration_error"] is None else f"{row['calibration_error']:.4f}"
        lines.append(
            f"| {row['form']} | {row['tokens']:,} | {row['parameters'] / 1e6:.1f}M "
            f"| {row['mlp_cost']:.2f} | {row['heldout_error']:.4f} | {own} "
            f"| {row['perplexity']:.1f} | {row['times']:.2f} | {row['gap']:+.3f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Perplexity over the teacher's against the MLPs' cost."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for row in rows:
        axes.plot(row["mlp_cost"], row["times"], "o", color="#0072b2")
        axes.annotate(
            row["form"],
            (row["mlp_cost"], row["times"]),
            xytext=(6, 3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xlabel="MLP cost, source = 1", ylabel="perplexity, teacher = 1")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the source: folder, hub id or .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("forms", nargs="*", metavar="form", help=f"among {', '.join(FORMS)}")
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--heldout", type=Path, required=True, help="text to measure on")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heldout_tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--bos", default="auto")
    options = parser.parse_intermixed_args(argv)
    unknown = [name for name in options.forms if name not in FORMS]
    if unknown:
        parser.error(f"no form {unknown[0]!r}; there are {', '.join(FORMS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = measure(options)
    (options.out / "forms.json").write_text(json.dumps(rows, indent=2) + "\n")
    (options.out / "forms.md").write_text(format_table(rows) + "\n")
    draw(rows, options.out / "forms.png")
    print(format_table(rows))


if __name__ == "__main__":
    main()
