"""Ways to recover, on the same text: benchmarks/recovery.py MODEL OUT [RECIPE...] --text FILE

Runs each recipe of configs/recovery.yaml (all, if none is named) at each of its learning rates, and
writes OUT/recovery.md, recovery.json and recovery.png: the held-out gap to the teacher and KL at
the end, the tokens that it took to come within given gaps, and the gap against the best control.
What is finished is not run again; a killed run goes on; --finished runs nothing and tabulates. The
held-out text is --heldout FILE, or the first --first tokens of --text, a .txt; the training text is
what follows, and calibration starts where training ends (with --together both start there). Runs
that diverge are listed as such.
"""

import argparse
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
import yaml

from bilinearize.convert.run import convert
from bilinearize.finetune.run import finetune
from bilinearize.model.checkpoint import load_tokenizer, resolve_checkpoint
from bilinearize.model.errors import InputError

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

TICKS = (-0.4, -0.2, 0, 0.1, 0.2, 0.3, 0.4, 1, 2, 4)
REACHED = (0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
# How WikiText marks what its tokenizer set apart.
MARKS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": ".", " ,": ",", " .": ".", " 's": "'s", " n't": "n't"}


def split_text(
    model: str, file: Path, cuts: list[int], wikitext: bool, names: list[str], out: Path
) -> list[Path]:
    """Cut a text after so many tokens each: paths of the parts, `names` in `out`."""
    text = file.read_text(encoding="utf-8")
    for mark, plain in MARKS.items() if wikitext else ():
        text = text.replace(mark, plain)
    text = text.replace("<unk>", "unknown") if wikitext else text
    tokenizer = load_tokenizer(resolve_checkpoint(model))
    spans = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    if cuts and len(spans.input_ids) <= cuts[-1]:
        raise InputError(f"{file}: {len(spans.input_ids)} tokens; more than {cuts[-1]} are needed.")
    ends = [spans["offset_mapping"][cut][0] for cut in cuts]
    paths = [out / name for name in names]
    for path, start, end in zip(paths, [0, *ends], [*ends, None], strict=True):
        path.write_text(text[start:end], encoding="utf-8")
    return paths


def run_recipe(
    model: str, out: Path, texts: dict[str, Path], plan: dict[str, Any], name: str, rate: float
) -> None:
    """Convert and finetune, unless that is done."""
    recipe = plan["recipes"][name]
    student = out / "students" / recipe["student"]
    if not student.is_dir():
        options = {"text": str(texts["calibration"])} | plan["students"][recipe["student"]]
        convert(model, student, **options)
    folder, failed = places(out, name, rate)
    settings = plan["common"] | {"text": str(texts["train"])}
    settings |= {"heldout_text": str(texts["heldout"])}
    settings |= recipe.get("settings", {}) | {"learning_rate": rate}
    if not folder.is_dir() and not failed.is_file():
        print(f"{name}, learning rate {rate:g}", flush=True)
        try:
            finetune(str(student), model, folder, **settings)
        except InputError as error:
            failed.parent.mkdir(parents=True, exist_ok=True)
            failed.write_text(f"{error}\n")


def places(out: Path, name: str, rate: float) -> tuple[Path, Path]:
    """Where a run's result is, and where its failure is told."""
    folder = out / "runs" / f"{name}-{rate:g}"
    return folder, folder.with_name(f"{folder.name}.failed.txt")


def result(out: Path, name: str, rate: float) -> dict[str, Any] | None:
    """What a run says of itself; None if it is not finished."""
    folder, failed = places(out, name, rate)
    if failed.is_file():
        return {"recipe": name, "rate": rate, "failed": failed.read_text().strip()}
    if not folder.is_dir():
        return None
    record = json.loads((folder / "finetune.json").read_text())
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {"recipe": name, "rate": rate} | summary(record, entries)


def summary(record: dict[str, Any], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The held-out figures of one run. Tokens of the stages before count."""
    watched, tokens = [], 0
    for entry in entries:
        tokens = entry.get("tokens", tokens)
        if "heldout_gap" in entry:
            watched.append(entry | {"tokens": tokens})
    final = [entry for entry in watched if entry.get("heldout_t", 1) == 1]
    reached = {
        str(gap): next((e["tokens"] for e in final if e["heldout_gap"] <= gap), None)
        for gap in REACHED
    }
    return {
        "tokens": record["tokens"],
        "trained_parameters": record["trained_parameters"],
        "tokens_per_second": record["tokens_per_second"],
        "path": [[e["tokens"], e["heldout_gap"], e.get("heldout_t", 1)] for e in watched],
        "start": watched[0]["heldout_gap"],
        "gap": watched[-1]["heldout_gap"],
        "kl": watched[-1]["heldout_kl"],
        "cross_entropy": watched[-1]["heldout_cross_entropy"],
        "reached": reached,
    }


def format_table(runs: list[dict[str, Any]]) -> str:
    """Markdown, best first within a recipe as given."""
    controls = [r["cross_entropy"] for r in runs if r["recipe"] == "control" and "gap" in r]
    heads = ["recipe", "rate", "gap at start", "gap, nats", "to control", "KL", "tokens/s"]
    heads += [f"to {gap}" for gap in REACHED]
    lines = [" | ".join(heads), " | ".join(["---"] + ["--:"] * (len(heads) - 1))]
    for run in runs:
        if "failed" in run:
            lines.append(f"{run['recipe']} | {run['rate']:g} | {run['failed']}" + " | " * 10)
            continue
        against = f"{run['cross_entropy'] - min(controls):+.3f}" if controls else ""
        tokens = [f"{n:,}" if n is not None else "" for n in run["reached"].values()]
        cells = [run["recipe"], f"{run['rate']:g}", f"{run['start']:+.3f}", f"{run['gap']:+.3f}"]
        cells += [against, f"{run['kl']:.3f}", f"{run['tokens_per_second']:.0f}", *tokens]
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Each recipe's best rate: held-out gap against tokens."""
    figure, axes = plt.subplots(figsize=(8, 5))
    finished = [run for run in runs if "gap" in run]
    for name in dict.fromkeys(run["recipe"] for run in finished):
        best = min((r for r in finished if r["recipe"] == name), key=lambda run: run["gap"])
        tokens, gaps, _ = zip(*best["path"], strict=True)
        axes.plot(tokens, gaps, marker=".", label=f"{name}, {best['rate']:g}")
    axes.set(xlabel="training tokens", ylabel="held-out gap to the teacher, nats")
    axes.set_yscale("symlog", linthresh=0.4, linscale=2)
    axes.set_yticks(TICKS, labels=[f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.axhline(0, color="gray", linewidth=0.5)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the source: folder, hub id or .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="*", help="names in the plan; none is all")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--first", type=int, default=8192)
    parser.add_argument("--finished", action="store_true", help="run nothing, tabulate")
    parser.add_argument("--together", action="store_true", help="calibrate on the training text")
    parser.add_argument("--wikitext", action="store_true", help="put WikiText's marks back")
    parser.add_argument("--plan", type=Path, default=Path("configs/recovery.yaml"))
    parser.add_argument("--rates", type=float, nargs="*", help="in place of the recipes' own")
    parser.add_argument("--tokens", type=int, help="in place of the plan's")
    options = parser.parse_intermixed_args(argv)
    if not (options.text or options.finished):
        parser.error("--text FILE is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    plan = yaml.safe_load(options.plan.read_text())
    plan["common"] |= {"tokens": options.tokens} if options.tokens else {}
    recipes = {name: plan["recipes"][name]["rates"] for name in options.recipes or plan["recipes"]}
    wanted = [(name, rate) for name in recipes for rate in options.rates or recipes[name]]
    if not options.finished:
        texts = texts_of(options, plan["common"]["tokens"])
        for name, rate in wanted:
            run_recipe(options.model, options.out, texts, plan, name, rate)
            report(options.out, wanted)
    print(format_table(report(options.out, wanted)))


def texts_of(options: argparse.Namespace, tokens: int) -> dict[str, Path]:
    """The files with the text for each purpose."""
    lengths = {"heldout": options.first, "train": tokens, "calibration": 0}
    if options.heldout:
        del lengths["heldout"]
    if options.together:
        del lengths["calibration"]
    names = list(lengths)
    cuts = list(accumulate(lengths.values()))[:-1]
    files = [f"{name}.txt" for name in names]
    parts = split_text(options.model, options.text, cuts, options.wikitext, files, options.out)
    texts = {"heldout": options.heldout} | dict(zip(names, parts, strict=True))
    texts.setdefault("calibration", texts["train"])
    return texts


def report(out: Path, wanted: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Write recovery.json, .md and .png of what is finished, and return it."""
    runs = [found for found in (result(out, name, rate) for name, rate in wanted) if found]
    (out / "recovery.json").write_text(json.dumps(runs, indent=2) + "\n")
    (out / "recovery.md").write_text(format_table(runs))
    draw(runs, out / "recovery.png")
    return runs


if __name__ == "__main__":
    main()
