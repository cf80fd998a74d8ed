"""What surrounds the decoder layers: the embedded tokens, and the arguments each layer gets."""

import copy
from typing import Any

import torch
from torch import nn

from bilinearize.convert.source import Source


class Trunk:
    """The source's own trunk with its decoder layers taken out.

    Whatever the family does before its first layer (scaled embeddings) and hands to each layer
    (rotary positions by kind of layer, causal and sliding masks) comes from its own forward pass.

    Attributes:
        calls: each layer's keyword arguments, for any number of windows of one length.
    """

    def __init__(self, source: Source, windows: torch.Tensor, device: torch.device):
        """windows: int64 (windows, window); only the rows of their tokens' embeddings are kept."""
        self.calls: list[dict[str, Any]] = [{} for _ in range(source.layers)]
        self.device = device
        self.model = copy.deepcopy(source.skeleton.model).eval().requires_grad_(False)
        vocabulary, self.ids = windows.unique(return_inverse=True)
        self._materialise(source.read("model.embed_tokens.weight")[vocabulary].float())
        for index, layer in enumerate(self.model.layers):
            layer.forward = self._recorder(index)
        self.embed(slice(0, 1))
        for layer in self.model.layers:
            layer.forward = _pass_on

    def _materialise(self, rows: torch.Tensor) -> None:
        """Everything but the layers, off the meta device; `rows` (tokens, d) is the embedding."""
        embedding = self.model.embed_tokens
        embedding.padding_idx = None
        embedding.weight = nn.Parameter(torch.empty_like(rows), requires_grad=False)
        for top in (embedding, self.model.rotary_emb):
            top.to_empty(device=self.device)
            for module in top.modules():
                self.model._init_weights(module)  # fills the buffers, which no file holds
        embedding.weight.copy_(rows)
        self.model.norm.forward = _pass_on

    def _recorder(self, index: int):
        def forward(hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
            self.calls[index] = arguments
            return hidden_states

        return forward

    @torch.no_grad()
    def embed(self, rows: slice) -> torch.Tensor:
        """What the first layer reads for these windows, fp32 (rows, window, d)."""
        ids = self.ids[rows].to(self.device)
        return self.model(input_ids=ids, use_cache=False).last_hidden_state


def _pass_on(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    return hidden_states
