"""How well a few eigenvectors stand for what a layer writes, on real text.

The measure of Pearce et al. (arXiv 2410.08417, section 5): over tokens, the correlation of
`u . y(x)` with its truncation to `keep` eigenvectors. Their directions are rows of a sparse
autoencoder's encoder; without one these are what the weights themselves offer.
"""

import copy

import torch
from torch import Tensor, nn

from bilinearize.interpret.spectrum import correlate, find_spectrum
from bilinearize.interpret.tensor import BilinearTensor

ACTIVE = 0.9
"""A token counts as active for a direction above this quantile of its activations."""


def truncation_correlations(
    tensor: BilinearTensor, x: Tensor, directions: Tensor, keep: int = 2
) -> dict[str, Tensor]:
    """Correlation of each direction's activation with its truncation.

    Args:
        x: (tokens, inputs).
        directions: (b, o).

    Returns:
        `all`: over all tokens, (b); `active`: over the tokens above the direction's own 90 %
        quantile, (b); `effective_rank`: (b). A correlation is 0 where one side does not vary.
    """
    spectrum = find_spectrum(tensor, directions, keep)
    full = tensor.output(x) @ spectrum.directions.T
    short = spectrum.output(x)
    active = full > full.quantile(ACTIVE, 0)
    return {
        "all": correlate(full, short).nan_to_num(0.0),
        "active": correlate(full, short, active).nan_to_num(0.0),
        "effective_rank": spectrum.effective_rank(),
    }


def random_directions(size: int, count: int, seed: int) -> Tensor:
    """(count, size) Gaussian directions."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def shuffled(mlp: nn.Module, seed: int) -> nn.Module:
    """The control: a copy whose every parameter has the same entries in another order.

    Sizes, scales and distributions stay; what training put into the order goes.
    """
    twin, generator = copy.deepcopy(mlp), torch.Generator().manual_seed(seed)
    for weight in twin.parameters():
        order = torch.randperm(weight.numel(), generator=generator)
        weight.copy_(weight.flatten()[order].view_as(weight))
    return twin
