"""Options of a conversion, checked and made plain."""

import re
from dataclasses import dataclass

from bilinearize.convert.block import MAX_EXPAND, TERMS
from bilinearize.model.errors import InputError

ACTIVATIONS = ("identity", "relu", "relu2", "silu", "gelu")
# Methods that fit more than the gates.
FITTING = ("refit", "layerwise")


@dataclass(frozen=True)
class Plan:
    """What becomes of one layer: left as it is, or a block of this rank and width."""

    kept: bool = False
    rank: int = 1
    expand: int = 1


def make_plan(
    count: int,
    method: str,
    rank: int | list[int],
    expand: int,
    layers: str | None,
    activation: str = "identity",
) -> list[Plan]:
    """One `Plan` for each of `count` layers.

    Raises:
        InputError: for a rank, width or layer that there is not, or that the method can't fit.
    """
    ranks = rank if isinstance(rank, list) else [rank] * count
    if len(ranks) != count:
        raise InputError(f"--rank has {len(ranks)} entries; the source has {count} layers.")
    if not 1 <= expand <= MAX_EXPAND:
        raise InputError(f"--expand is {expand}; use 1 to {MAX_EXPAND}.")
    if activation not in ACTIVATIONS:
        raise InputError(f"--activation is {activation!r}; use one of {', '.join(ACTIVATIONS)}.")
    for value in ranks:
        if value < 1:
            raise InputError(f"--rank is {value}; use 1 or more.")
        if activation != "identity" and value not in TERMS:
            raise InputError(
                f"--rank is {value}; with --activation {activation} use 1 to {max(TERMS)}."
            )
    if method not in FITTING and (set(ranks) != {1} or expand != 1 or activation != "identity"):
        raise InputError(
            f"--method {method} has rank 1, the source's width and no activation on its scores; "
            f"use {' or '.join(FITTING)}."
        )
    if method == "gated":
        return [Plan(kept=True)] * count
    wanted = set(range(count)) if layers is None else parse_layers(layers, count)
    return [
        Plan(rank=ranks[index], expand=expand) if index in wanted else Plan(kept=True)
        for index in range(count)
    ]


def check_training(epochs: int, learning_rate: float) -> None:
    """Raise InputError for a `layerwise` that would train nothing or diverge by its settings."""
    if epochs < 1:
        raise InputError(f"--epochs is {epochs}; use 1 or more.")
    if not 0 < learning_rate < 1:
        raise InputError(f"--learning_rate is {learning_rate}; use a share between 0 and 1.")


def parse_layers(layers: str, count: int) -> set[int]:
    """Layer numbers of "0-5,8", both ends included.

    Raises:
        InputError: if it is written otherwise, or a layer is out of range.
    """
    found: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise InputError(f"--layers is {layers!r}; write it like 0-5,8.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= count or first > last:
            raise InputError(f"--layers {part.strip()}: the source has layers 0 to {count - 1}.")
        found.update(range(first, last + 1))
    return found


def parse_size(size: str) -> int:
    """Bytes of "5GB", "800MB" or a plain number.

    Raises:
        InputError: for anything else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, factor = (
        (size[:-2], units[size[-2:].upper()]) if size[-2:].upper() in units else (size, 1)
    )
    try:
        value = int(float(number) * factor)
    except ValueError:
        value = 0
    if value <= 0:
        raise InputError(f"{size!r} is no size; write it like 5GB or 800MB.")
    return value
