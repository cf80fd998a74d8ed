"""`bilinearize interpret gallery`: a page on what a converted model's layers read and write.

For each layer and direction the leading eigenvectors, the tokens whose embeddings they read, the
places in real text where they are strongest, and how far they stand for the direction at all.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from bilinearize import InputError
from bilinearize.interpret.layers import layer_tensor, mlp_inputs
from bilinearize.interpret.measure import windows_of
from bilinearize.interpret.plot import draw_spectra
from bilinearize.interpret.readout import TokenReader, named_directions, token_reader
from bilinearize.interpret.run import SCHEMA, choose_layers, load, overview
from bilinearize.interpret.spectrum import Spectrum, correlate, find_spectrum
from bilinearize.model.page import Page, Tokens, show_direction

CANDIDATES = (
    " he -  she",
    " good -  bad",
    " is -  are",
    " was -  is",
    " France -  Germany",
    " not",
    " because",
    " three",
    " water",
    " music",
    " if",
    " people",
)
"""Directions to take by default, as far as the vocabulary has them as single tokens."""
TOKENS = 8
"""How many of them; the two strongest of each layer make ten."""
EIGENVECTORS = 3
THRESHOLD = 0.75
"""Correlation from which on two eigenvectors count as standing for a direction."""
BEFORE, AFTER = 5, 2
"""Tokens shown around the place where an eigenvector is strongest."""


def gallery(
    model: str,
    out: Path,
    text: str,
    text_column: str = "text",
    split: str = "test",
    directions: list[str] | None = None,
    layers: list[int] | None = None,
    tokens: int = 4096,
    window: int = 256,
) -> dict:
    """Write the gallery: README.md for a docs folder, index.html, report.json, PNGs.

    Args:
        model: folder, hub id or .gguf file of a converted model.
        out: new folder for the page.
        directions: as in `spectrum`; None or empty takes ten.

    Returns:
        what is in report.json.

    Raises:
        InputError: for a bad model, layer, direction or text, or an `out` that exists.
    """
    network, tokenizer = load(model, out)
    chosen, reader = choose_layers(network, layers), token_reader(network, tokenizer)
    specs = directions or default_directions(reader)
    windows = windows_of(tokenizer, text, text_column, split, tokens, window)
    page = Page(f"What {Path(model).name} reads and writes")
    page.text(
        "For each layer and output direction u: the eigenvectors of the quadratic form u . y(x), "
        "from the weights alone; then the tokens whose embeddings lie along and against each "
        f"(its sign is free), and where in {windows.numel():,} tokens of real text it contributes "
        "most. A contribution has the sign of its eigenvalue wherever it occurs."
    )
    data = {"schema": SCHEMA, "model": model, "overview": overview(network, page), "layers": {}}
    for layer in chosen:
        data["layers"][layer] = _layer(network, layer, specs, windows, reader, page)
    page.heading("What can't be read")
    for sentence in honest_comment(data["layers"]):
        page.text(sentence)
    page.write(out, data, markdown=True)
    return data


def default_directions(reader: TokenReader) -> list[str]:
    """Tokens that the vocabulary has, then the strongest directions of the layer."""
    found = []
    for spec in CANDIDATES:
        try:
            reader.direction(spec)
        except InputError:
            continue
        found.append(spec)
    return [*found[:TOKENS], "hosvd:0", "hosvd:1"]


def _layer(
    model: PreTrainedModel,
    layer: int,
    specs: list[str],
    windows: Tensor,
    reader: TokenReader,
    page: Page,
) -> list[dict]:
    """One layer's section; returns a record for each direction."""
    tensor = layer_tensor(model, layer)
    named = named_directions(specs, reader, tensor)
    vectors = torch.stack([vector.to(tensor.value) for _, vector in named])
    found = find_spectrum(tensor, vectors, EIGENVECTORS)
    x = mlp_inputs(model, windows, [layer], skip=1)[layer]
    full = tensor.output(x) @ found.directions.T
    correlations = correlate(full, found.output(x, 2)).nan_to_num(0.0).tolist()
    contributions = found.contributions(x)
    names = [show_direction(name) for name, _ in named]
    page.heading(f"Layer {layer}")
    values = {name: row.numpy() for name, row in zip(names, found.values, strict=True)}
    picture = draw_spectra(values, f"Layer {layer}: eigenvalues by direction")
    page.picture(f"spectra-{layer}", picture, f"Eigenvalues of {len(names)} directions")
    rows, records = [], []
    context = _context_of(windows, reader)
    for index, name in enumerate(names):
        record = _record(found, index, name, contributions[:, index], reader, context)
        record["correlation"] = correlations[index]
        records.append(record)
        for k, vector in enumerate(record["eigenvectors"]):
            shown = f"{name} (r = {correlations[index]:.2f})" if k == 0 else ""
            ends = (Tokens(vector["most"]), Tokens(vector["least"]))
            rows.append([shown, vector["eigenvalue"], *ends, vector["place"]])
    header = ["direction", "eigenvalue", "reads", "and, against", "strongest in"]
    page.text(
        "r: correlation of the direction with its first two eigenvectors' part, over the text. "
        "In the last column the token that it happened at is in ⟨brackets⟩."
    )
    page.table(header, rows)
    return records


def _context_of(windows: Tensor, reader: TokenReader) -> Callable[[int], str]:
    """A function from a row of `mlp_inputs(..., skip=1)` to the text around it."""
    width = windows.shape[1] - 1

    def context(row: int) -> str:
        window, position = windows[row // width].tolist(), row % width + 1
        before = "".join(map(reader.text, window[max(0, position - BEFORE) : position]))
        after = "".join(map(reader.text, window[position + 1 : position + 1 + AFTER]))
        return " ".join(f"{before}⟨{reader.text(window[position])}⟩{after}".split())

    return context


def _record(
    found: Spectrum,
    index: int,
    name: str,
    contributions: Tensor,
    reader: TokenReader,
    context: Callable[[int], str],
) -> dict:
    """One direction's numbers: (tokens, k) contributions of its eigenvectors among them."""
    vectors = []
    reads = reader.reads(found.vectors[index], 5)
    for k, read in enumerate(reads):
        vectors.append(
            {
                "eigenvalue": float(found.values[index, k]),
                "most": [text for text, *_ in read["most"]],
                "least": [text for text, *_ in read["least"]],
                "place": context(int(contributions[:, k].abs().argmax())),
            }
        )
    squares = found.values[index].square()
    return {
        "direction": name,
        "effective_rank": float(found.effective_rank()[index]),
        "share_of_two": float(squares[:2].sum() / squares.sum()),
        "eigenvectors": vectors,
    }


def honest_comment(layers: dict[int, list[dict]]) -> list[str]:
    """What the numbers say about how much of this is readable."""
    records = [record for layer in layers.values() for record in layer]
    good = [record for record in records if record["correlation"] > THRESHOLD]
    rank = median(record["effective_rank"] for record in records)
    share = median(record["share_of_two"] for record in records)
    sentences = [
        f"Two eigenvectors stand for the direction (r above {THRESHOLD:g}) in {len(good)} of "
        f"{len(records)} cases. In the others the table shows the largest terms of a sum of "
        f"hundreds: the median effective rank is {rank:.0f}, and two eigenvectors hold "
        f"{share:.0%} of the squared norm in the median."
    ]
    by_layer = []
    for layer, some in layers.items():
        count = sum(record["correlation"] > THRESHOLD for record in some)
        by_layer.append(f"layer {layer}: {count} of {len(some)}")
    sentences.append("By layer, " + "; ".join(by_layer) + ".")
    sentences.append(
        "A high r need not mean a readable feature: a few outlier tokens, such as line ends or "
        "the start of a text, can carry the whole correlation. Token lists compare an eigenvector "
        "with bare embeddings; past the first layers the residual stream holds much that no "
        "embedding resembles, and such lists are then mostly noise. The places in the text are "
        "the better evidence, and they are the few strongest, not typical ones."
    )
    return sentences
