"""`bilinearize interpret digits`: train small classifiers, show what their eigenvectors are."""

from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bilinearize import InputError
from bilinearize.interpret.digits import (
    Attack,
    BilinearClassifier,
    Images,
    accuracy,
    attack,
    class_rank,
    load_images,
    relu_classifier,
    train,
    truncated_accuracy,
)
from bilinearize.interpret.plot import COLOURS, DIVERGING, new_figure
from bilinearize.interpret.spectrum import find_spectrum
from bilinearize.model.checkpoint import check_new
from bilinearize.model.page import Page

SCHEMA = 1
"""Version of the layout of `report.json`; raised when a key changes its meaning or goes away."""
DECAYS = (0.0, 0.1, 0.3, 1.0, 3.0)
NOISES = (0.0, 0.15, 0.3)
SHOWN = (1.0, 0.0)
"""Weight decay and noise of the model whose eigenvectors are shown."""
KEEPS = (1, 2, 3, 5, 10, 20)
STRENGTHS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def digits(
    out: Path, images: str | None = None, hidden: int = 64, epochs: int = 60, seeds: int = 5
) -> dict:
    """Train the grid of decays, noises and seeds; write the report as page and README.md.

    Args:
        out: new folder for the report.
        images: a .npz file with `x` and `y`; None takes scikit-learn's digits.

    Returns:
        what is in report.json.

    Raises:
        InputError: for unreadable images, a size under 1, or an `out` that exists.
    """
    if min(hidden, epochs, seeds) < 1:
        raise InputError("hidden, epochs and seeds must be at least 1.")
    check_new(out)
    data = load_images(images)
    runs, models = [], []
    for decay, noise, seed in settings(seeds):
        model, run = train_pair(data, hidden, epochs, decay, noise, seed)
        runs.append(run)
        if (decay, noise) == SHOWN:
            models.append(model)
    attacks = attack_all(models[0], data)
    cosines = seed_cosines(models, data.classes)
    result = {"schema": SCHEMA, "images": images or "scikit-learn digits", "hidden": hidden}
    result |= {"epochs": epochs, "runs": runs, "cosine_across_seeds": cosines}
    result["attacks"] = {f"{s} as {t}": [a.success, a.control] for (s, t), a in attacks.items()}
    show(result, models[0], data, attacks).write(out, result, markdown=True)
    return result


def settings(seeds: int) -> Iterator[tuple[float, float, int]]:
    """(decay, noise, seed) of every run."""
    for decay in DECAYS:
        for noise in NOISES:
            yield from ((decay, noise, seed) for seed in range(seeds))


def train_pair(
    data: Images, hidden: int, epochs: int, decay: float, noise: float, seed: int
) -> tuple[BilinearClassifier, dict]:
    """A bilinear and a ReLU classifier trained alike, and what they reach on the test images."""
    pixels = data.train_x.shape[1]
    torch.manual_seed(seed)
    model = BilinearClassifier(pixels, hidden, data.classes)
    reference = relu_classifier(pixels, hidden, data.classes)
    for network in (model, reference):
        train(network, data, epochs, decay, noise, seed)
    with torch.no_grad():
        scores = [accuracy(network(data.test_x), data.test_y) for network in (model, reference)]
    tensor = model.tensor()
    keeps = [keep for keep in KEEPS if keep <= pixels]
    run = {"decay": decay, "noise": noise, "seed": seed, "bilinear": scores[0], "relu": scores[1]}
    run["effective_rank"] = class_rank(tensor)
    run["truncated"] = truncated_accuracy(tensor, data, keeps)
    return model, run


def attack_all(model: BilinearClassifier, data: Images) -> dict[tuple[int, int], Attack]:
    """Each class attacked to be taken for the one after next."""
    count, strengths = data.classes, list(STRENGTHS)
    pairs = [(source, (source + 2) % count) for source in range(count)]
    return {(s, t): attack(model, data, s, t, strengths) for s, t in pairs}


def seed_cosines(models: list[BilinearClassifier], classes: int) -> float | None:
    """Mean |cosine| of the classes' leading positive eigenvectors between runs; None for one."""
    leading = []
    for model in models:
        found = find_spectrum(model.tensor(), torch.eye(classes))
        best = found.values.argmax(1)
        leading.append(found.vectors[torch.arange(classes), best])
    pairs = [(a, b) for i, a in enumerate(leading) for b in leading[:i]]
    return mean(float((a * b).sum(1).abs().mean()) for a, b in pairs) if pairs else None


def select(runs: list[dict], decay: float, noise: float) -> list[dict]:
    return [run for run in runs if run["decay"] == decay and run["noise"] == noise]


def show(
    result: dict, model: BilinearClassifier, data: Images, attacks: dict[tuple[int, int], Attack]
) -> Page:
    """The page: accuracy, rank, eigenvectors, truncation, attack."""
    runs, page = result["runs"], Page("Digits: a bilinear classifier read from its weights")
    chosen = select(runs, *SHOWN)
    page.text(
        f"{len(data.train_x):,} training and {len(data.test_x):,} test images, "
        f"{result['hidden']} products, {result['epochs']} epochs; every number is a mean of "
        f"{len(chosen)} seeds. The reference is a ReLU network with as many parameters and the "
        "same training."
    )
    page.heading("Accuracy and effective rank")
    rows = []
    for decay in DECAYS:
        for noise in NOISES:
            some = select(runs, decay, noise)
            means = [mean(run[key] for run in some) for key in ("bilinear", "relu")]
            rank = mean(run["effective_rank"] for run in some)
            kept = [mean(run["truncated"][keep] for run in some) for keep in (1, 3)]
            shown = [f"{value:.2%}" for value in (*means, *kept)]
            rows.append([decay, noise, *shown[:2], rank, *shown[2:]])
    header = ["weight decay", "input noise", "bilinear", "ReLU", "effective rank"]
    page.table([*header, "1 eigenvector a class", "3 a class"], rows)
    page.picture("rank", draw_ranks(runs), "Effective rank and truncated accuracy")
    page.text(rank_sentence(runs))
    page.heading("Eigenvectors as pictures")
    page.picture("eigenvectors", draw_eigenvectors(model, data), "Leading eigenvectors")
    cosine = result["cosine_across_seeds"]
    alike = (
        f"; across seeds the leading ones have a mean |cosine| of {cosine:.2f}" if cosine else ""
    )
    cost = mean(run["bilinear"] - run["truncated"][3] for run in chosen)
    page.text(
        f"Weight decay {SHOWN[0]:g}, no noise. Red and blue are opposite signs, of which either "
        f"may be read as ink. Keeping 3 eigenvectors a class costs {100 * cost:.2f} points of "
        f"accuracy{alike}."
    )
    page.heading("An adversarial pattern from an eigenvector")
    page.picture("attack", draw_attack(data, attacks), "Adversarial pattern and its success")
    page.text(
        "The leading eigenvector of one class minus another, scaled to a share of each image's "
        "norm and added to, or taken off, all images of the first class, whichever sign does more. "
        "The pattern comes from the weights alone. Random directions of the same size, signs "
        "chosen likewise, are the control."
    )
    return page


def rank_sentence(runs: list[dict]) -> str:
    """What decay and noise did to the rank, in words made from the numbers."""

    def rank(decay: float, noise: float) -> float:
        return mean(run["effective_rank"] for run in select(runs, decay, noise))

    low, high = DECAYS[0], DECAYS[-1]
    return (
        f"From weight decay {low:g} to {high:g} the effective rank goes from {rank(low, 0):.1f} "
        f"to {rank(high, 0):.1f} without noise; noise of {NOISES[-1]:g} takes it from "
        f"{rank(low, 0):.1f} to {rank(low, NOISES[-1]):.1f} without decay."
    )


def draw_ranks(runs: list[dict]) -> Figure:
    figure, (ranks, kept) = new_figure(10, 3.3, 2)
    places = range(len(DECAYS))
    for index, noise in enumerate(NOISES):
        values = [mean(r["effective_rank"] for r in select(runs, d, noise)) for d in DECAYS]
        ranks.plot(places, values, "osD"[index] + "-", color=COLOURS[index], ms=4)
        ranks.lines[-1].set_label(f"noise {noise:g}")
    ranks.set(xlabel="weight decay", ylabel="effective rank", ylim=(0, None))
    ranks.set_xticks(list(places), [f"{decay:g}" for decay in DECAYS])
    keeps = list(runs[0]["truncated"])
    for index, decay in enumerate(DECAYS):
        some = select(runs, decay, 0.0)
        values = [mean(run["truncated"][keep] for run in some) for keep in keeps]
        kept.plot(keeps, values, "o-", color=COLOURS[index], ms=4, label=f"decay {decay:g}")
    kept.set(xlabel="eigenvectors kept a class", ylabel="test accuracy, no noise", xscale="log")
    kept.set_xticks(keeps, [str(keep) for keep in keeps])
    kept.minorticks_off()
    for axes in (ranks, kept):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(fontsize=8, frameon=False)
    return figure


def draw_eigenvectors(model: BilinearClassifier, data: Images) -> Figure:
    """Three eigenvectors of each class, by falling |eigenvalue|."""
    found = find_spectrum(model.tensor(), torch.eye(data.classes), 3)
    figure, _ = new_figure(1.15 * data.classes, 4.2)
    figure.clear()
    panels = figure.subplots(3, data.classes, squeeze=False)
    for row in range(3):
        for label, axes in enumerate(panels[row]):
            _picture(axes, found.vectors[label, row], data.shape, DIVERGING)
            axes.set_title(f"{float(found.values[label, row]):+.1f}", fontsize=8)
            if row == 2:
                axes.set_xlabel(str(label))
    figure.suptitle("Three leading eigenvectors of each class, with eigenvalues", fontsize=10)
    return figure


def draw_attack(data: Images, attacks: dict[tuple[int, int], Attack]) -> Figure:
    """An image, the pattern, both; and the success over strength, mean over all pairs."""
    (source, target), example = next(iter(attacks.items()))
    image = data.test_x[data.test_y == source][0]
    step = 0.3 * float(image.norm()) * example.pattern
    figure, (first, second, third, curve) = new_figure(11, 2.9, 4)
    shown = ((first, image, "Greys"), (second, example.pattern, DIVERGING))
    for axes, picture, colours in (*shown, (third, image + step, "Greys")):
        _picture(axes, picture, data.shape, colours)
    first.set_title(f"a {source}", fontsize=9)
    second.set_title(f"eigenvector of {target} minus {source}", fontsize=9)
    third.set_title("30 % of it added", fontsize=9)
    for name, colour in (("success", COLOURS[1]), ("control", COLOURS[7])):
        values = [mean(getattr(a, name)[s] for a in attacks.values()) for s in STRENGTHS]
        curve.plot(STRENGTHS, values, "o-", ms=3, color=colour)
        curve.lines[-1].set_label("eigenvector" if name == "success" else "random direction")
    curve.set(xlabel="strength, share of the norm", ylabel="taken for another", ylim=(-0.02, 1))
    curve.legend(fontsize=8, frameon=False)
    return figure


def _picture(axes, pixels: Tensor, shape: tuple[int, int], colours: str) -> None:
    limit = float(pixels.abs().max())
    low = -limit if colours == DIVERGING else 0
    axes.imshow(pixels.reshape(shape).numpy(), cmap=colours, vmin=low, vmax=limit)
    axes.set_xticks([])
    axes.set_yticks([])
