"""Calibration states in memory or on disk, and which of their tokens serve for what."""

import tempfile
from pathlib import Path

import torch

# One window in HELDOUT is kept from the fit, to choose the ridge and to report the error; of a
# long text fewer, some HELDOUT_TOKENS.
HELDOUT = 4
HELDOUT_TOKENS = 8192


class States:
    """Hidden states (windows, window, hidden_size) fp32, in memory or in a file past the budget."""

    def __init__(self, shape: tuple[int, ...], budget_bytes: int, folder: Path):
        count = torch.Size(shape).numel()
        if count * 4 <= budget_bytes:
            self.tensor = torch.empty(shape)
        else:
            with tempfile.NamedTemporaryFile(dir=folder, prefix="states-", delete=False) as file:
                name = file.name
            self.tensor = torch.from_file(name, shared=True, size=count).view(shape)
            Path(name).unlink()  # the mapping keeps it until this object goes


def heldout_windows(windows: torch.Tensor) -> torch.Tensor:
    """Which windows (windows, window) are kept from the fit: bool (windows), one at least."""
    every = min(len(windows), max(HELDOUT, windows.numel() // HELDOUT_TOKENS))
    return torch.arange(len(windows)) % every == every - 1


def sample_mask(shape: tuple[int, int], fitted: int, tokens: int) -> torch.Tensor:
    """Some `tokens` tokens of the first `fitted` windows at random: bool (windows, window).

    At random, since every n-th token of each window would take too many of the first ones, where
    models keep their massive activations.
    """
    count = fitted * shape[1]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(shape, dtype=torch.bool)
    mask.view(-1)[order[: min(tokens, count)]] = True
    return mask
