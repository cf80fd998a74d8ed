"""The commands: one function each, plain arguments in, one report folder out."""

from pathlib import Path

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from bilinearize import InputError
from bilinearize.interpret.attribution import Attribution, attribute
from bilinearize.interpret.hosvd import find_hosvd
from bilinearize.interpret.layers import converted_layers, layer_tensor
from bilinearize.interpret.plot import draw_bars, draw_layers, draw_matrix, draw_spectra
from bilinearize.interpret.readout import TokenReader, named_directions, token_reader
from bilinearize.interpret.spectrum import Spectrum, find_spectrum
from bilinearize.model.checkpoint import (
    check_new,
    load_causal_lm,
    load_tokenizer,
    resolve_checkpoint,
)
from bilinearize.model.page import Page, Tokens, show_direction, show_token

SCHEMA = 1
"""Version of the layout of `report.json`; raised when a key changes its meaning or goes away."""


def load(model: str, out: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer; fails before any work if `out` is taken.

    Raises:
        InputError: if the checkpoint is not whole, or `out` exists.
    """
    check_new(out)
    folder = resolve_checkpoint(model)
    return load_causal_lm(folder), load_tokenizer(folder)


def choose_layers(model: PreTrainedModel, layers: list[int] | None) -> list[int]:
    """The layers asked for, else the first, middle and last converted one."""
    if layers is not None:
        if not layers:
            raise InputError("layers is an empty list; name some, or leave it out.")
        return list(dict.fromkeys(layers))
    found = converted_layers(model)
    return sorted({found[0], found[len(found) // 2], found[-1]})


def spectrum(
    model: str,
    out: Path,
    directions: list[str],
    layers: list[int] | None = None,
    eigenvectors: int = 4,
    tokens: int = 6,
) -> dict:
    """Eigenvectors of what layers write to directions; `bilinearize interpret spectrum`.

    Args:
        model: folder, hub id or .gguf file of a converted model.
        out: new folder for the report: index.html, report.json, PNGs.

    Returns:
        what is in report.json.

    Raises:
        InputError: for a bad model, layer or direction, or an `out` that exists.
    """
    if eigenvectors < 1 or tokens < 1 or not directions:
        raise InputError("directions, eigenvectors and tokens: at least one of each is needed.")
    network, tokenizer = load(model, out)
    chosen, reader = choose_layers(network, layers), token_reader(network, tokenizer)
    page = Page(f"Spectra of {Path(model).name}")
    page.text(
        "What a layer writes to a direction u is a quadratic form of what it reads; its "
        "eigenvectors are what it reads for that. The weights of the norm in front are folded in."
    )
    data: dict = {"schema": SCHEMA, "model": model, "overview": overview(network, page)}
    data["layers"] = {}
    for layer in chosen:
        page.heading(f"Layer {layer}")
        tensor = layer_tensor(network, layer)
        named = named_directions(directions, reader, tensor)
        vectors = torch.stack([vector.to(tensor.value) for _, vector in named])
        found = find_spectrum(tensor, vectors, eigenvectors)
        names = [show_direction(name) for name, _ in named]
        values = {name: row.numpy() for name, row in zip(names, found.values, strict=True)}
        picture = draw_spectra(values, f"Layer {layer}: eigenvalues by direction")
        page.picture(f"spectra-{layer}", picture, f"Eigenvalues of {len(names)} directions")
        data["layers"][layer] = [
            describe(found, index, name, layer, reader, tokens, page)
            for index, name in enumerate(names)
        ]
    page.write(out, data)
    return data


def overview(model: PreTrainedModel, page: Page) -> dict:
    """Over all converted layers: how many output directions a layer spreads over, how strongly."""
    ranks, strengths = {}, {}
    for layer in converted_layers(model):
        hosvd = find_hosvd(layer_tensor(model, layer, dtype=torch.float64))
        ranks[layer] = hosvd.effective_rank()
        strengths[layer] = float(hosvd.values[0] / hosvd.values.square().sum().sqrt())
    page.heading("Layers")
    page.text(
        "HOSVD of each layer's tensor: its effective number of output directions, "
        "(sum s)^2 / sum s^2, and the strongest direction's share of the norm."
    )
    picture = draw_layers({"effective output rank": ranks}, "directions", "Layer overview")
    page.picture("layers", picture, "Effective output rank over the layers")
    return {"effective_rank": ranks, "strongest_share": strengths}


def describe(
    found: Spectrum,
    index: int,
    name: str,
    layer: int,
    reader: TokenReader,
    tokens: int,
    page: Page,
    heat_map: bool = True,
) -> dict:
    """One direction's table of eigenvectors, with the heat map of the tokens that these read."""
    vectors, values = found.vectors[index], found.values[index]
    size = found.tensor.inputs
    reads = reader.reads(vectors, tokens)
    writes = reader.writes(found.tensor.apply(vectors, vectors), tokens)
    rank = float(found.effective_rank()[index])
    page.heading(name, 3)
    page.text(
        f"Effective rank {rank:.0f} of {len(values)}; these {len(vectors)} eigenvectors hold "
        f"{float(values[: len(vectors)].square().sum() / values.square().sum()):.1%} of the "
        "squared norm. An eigenvector reads the same at both ends: its sign is free."
    )
    rows, records = [], []
    for k, (read, write) in enumerate(zip(reads, writes, strict=True)):
        ends = [[text for text, *_ in read[end]] for end in ("most", "least")]
        written = [text for text, *_ in write["most"]]
        rows.append([k, float(values[k]), Tokens(ends[0]), Tokens(ends[1]), Tokens(written)])
        constant = float(vectors[k, -1]) if found.tensor.constant else 0.0
        records.append({"eigenvalue": float(values[k]), "reads": read, "writes": write})
        records[-1]["constant"] = constant
    header = ["", "eigenvalue", "reads, one end", "reads, other end", "layer's whole output then"]
    page.table(header, rows)
    record = {"direction": name, "effective_rank": rank, "eigenvectors": records}
    if heat_map:
        ids = list(
            dict.fromkeys(
                read[e][i][2] for read in reads for e in read for i in range(min(2, tokens))
            )
        )
        texts = [reader.text(token_id) for token_id in ids]
        rows_of = reader.embedding[ids]
        rows_of = torch.nn.functional.pad(rows_of.double(), (0, found.vectors.shape[2] - size))
        matrix = rows_of @ found.tensor.interaction(found.directions[index]).double() @ rows_of.T
        names = [show_token(text) for text in texts]
        picture = draw_matrix(matrix, names, f"Layer {layer}, {name}: pairs of embeddings")
        page.picture(f"tokens-{layer}-{index}", picture, "Interactions of token embeddings")
        record["token_interactions"] = {"tokens": texts, "matrix": matrix.tolist()}
    return record


def attribution(
    model: str,
    out: Path,
    prompt: str,
    direction: str,
    layer: int,
    position: int = -1,
    count: int = 12,
) -> dict:
    """What made a layer write to a direction; `bilinearize interpret attribute`.

    Raises:
        InputError: for a bad model, layer, position or direction, an empty prompt, or an `out`
            that exists.
    """
    if not prompt.strip() or count < 1:
        raise InputError("prompt is empty, or count under 1; give some text and at least 1.")
    network, tokenizer = load(model, out)
    reader = token_reader(network, tokenizer)
    ids = tokenizer(prompt, return_tensors="pt").input_ids[0]
    tensor = layer_tensor(network, layer)
    (name, vector), *more = named_directions([direction], reader, tensor)
    if more:
        raise InputError(f"{direction}: holds {1 + len(more)} vectors; attribute takes one.")
    found = attribute(network, ids, layer, vector, position)
    texts = [show_token(reader.text(index)) for index in ids.tolist()]
    page = Page(f"Layer {layer} writes to {show_direction(name)}")
    page.text(f"Prompt: {' '.join(texts)}")
    page.text(
        f"At token {found.position}, {texts[found.position]}: u . y = {found.total:.6g} from the "
        f"weights in float64, {found.model_total:.6g} as the model computed it. The eigenvectors' "
        f"contributions and the pairs' each add up to it exactly."
    )
    data = _show_attribution(found, texts, reader, page, min(count, len(found.eigenvectors)))
    data |= {"schema": SCHEMA, "model": model, "prompt": prompt, "direction": name, "layer": layer}
    page.write(out, data)
    return data


def _show_attribution(
    found: Attribution, texts: list[str], reader: TokenReader, page: Page, count: int
) -> dict:
    """Bars of eigenvectors and pairs, heat map of all parts; returns the numbers."""
    labels = [
        label if source is None else f"attention to {texts[source]} ({source})"
        for label, source in zip(found.labels, found.source, strict=True)
    ]
    order = found.eigenvectors.abs().argsort(descending=True)[:count].tolist()
    reads = reader.reads(found.spectrum.vectors[0, order], 3)
    names = []
    for k, read in zip(order, reads, strict=True):
        ends = (" ".join(show_token(t) for t, *_ in read[end]) for end in ("most", "least"))
        names.append(f"{k}: {' | '.join(ends)}")
    page.heading("By eigenvectors")
    rest = float(found.eigenvectors.sum() - found.eigenvectors[order].sum())
    bars = [float(found.eigenvectors[k]) for k in order]
    picture = draw_bars([*names, "all others"], [*bars, rest], "Contributions", "added to u . y")
    page.picture("eigenvectors", picture, "Contributions of eigenvectors")
    page.heading("By pairs of parts of the input")
    page.picture("pairs", draw_matrix(found.pairs, labels, "Pairs of parts"), "Pairs of parts")
    rows = top_pairs(found.pairs, labels, count)
    page.table(["part", "part", "added to u . y"], [list(row) for row in rows])
    return {
        "position": found.position,
        "total": found.total,
        "model_total": found.model_total,
        "eigenvectors": found.eigenvectors.tolist(),
        "parts": labels,
        "pairs": found.pairs.tolist(),
    }


def top_pairs(pairs: Tensor, labels: list[str], count: int) -> list[tuple[str, str, float]]:
    """The largest contributions, both orders of a pair added."""
    whole = torch.triu(pairs) + torch.triu(pairs, 1)
    order = whole.abs().flatten().argsort(descending=True)[:count].tolist()
    found = [divmod(index, len(labels)) for index in order]
    return [(labels[a], labels[b], float(whole[a, b])) for a, b in found]
