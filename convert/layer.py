"""Turn one decoder layer's gated MLP into the block that replaces it."""

from typing import Any

import torch

from bilinearize.convert.block import (
    SKIP_RANK,
    TERMS,
    build_block,
    corrected,
    derivative_at_zero,
    widen,
)
from bilinearize.convert.fit import NO_CORRECTION, Refit, refit
from bilinearize.convert.source import Layer
from bilinearize.convert.stream import Stream
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_


class LayerConverter:
    """Fits one layer after the other; `stream` holds the calibration states between two layers.

    Args:
        method: "refit", "affine", or "taylor", which needs no stream.
        dtype: of the stored weights. Blocks are rounded to it at once, so that the layers above are
            fitted on what will really be loaded.
    """

    def __init__(self, method: str, dtype: torch.dtype, stream: Stream | None = None):
        self.method = method
        self.dtype = dtype
        self.stream = stream

    @torch.no_grad()
    def __call__(self, layer: Layer, rank: int = 1, expand: int = 1) -> tuple[BilinearMLP, dict]:
        """The block, holding weights as they will be stored, and the layer's record."""
        mlp = layer.mlp
        if self.stream is None:
            slope = torch.full((1, mlp.gate_proj.out_features), derivative_at_zero(mlp.act_fn))
            block, record = build_block(mlp, slope), {}
        else:
            self.stream.advance_teacher(layer)
            gates = self.stream.fit_gates(layer)
            block, record = _Fit(self, mlp, rank, expand).run(gates)
        balance_(block)
        block = block.to(self.dtype).float()
        if self.stream is not None:
            self.stream.advance_student(layer, block)
        return block, record

    @torch.no_grad()
    def keep(self, layer: Layer) -> None:
        """Leave the layer as it is; the states still move past it."""
        if self.stream is not None:
            self.stream.advance_teacher(layer)
            self.stream.pass_student(layer)


class _Fit:
    """One layer's rounds of gates and down_proj in turn; the best by held-out error is kept."""

    def __init__(self, converter: LayerConverter, mlp: Any, rank: int, expand: int):
        assert converter.stream is not None
        self.converter, self.stream = converter, converter.stream
        self.mlp, self.rank, self.expand = mlp, rank, expand
        self.record: dict[str, Any] = {}

    def run(self, gates: torch.Tensor) -> tuple[BilinearMLP, dict]:
        block = build_block(self.mlp, gates, self.rank)
        # Two rounds at rank 1, then one a rank, so that no rank fits worse than a lower one.
        for rank in [1, *range(1, self.rank + 1)]:
            gates = self.stream.join_gates(self.mlp, block, gates, TERMS[rank])
            block = build_block(self.mlp, gates, self.rank)
            skip = rank == SKIP_RANK
            fitted, heldout = self.stream.down_sums(self.mlp, block, skip)
            if not self.record:
                self._begin(block, heldout.error(torch.zeros_like(heldout.cross)))
                if self.converter.method == "affine":
                    return block, self.record
            solved = refit(fitted, heldout)
            self._keep_better(block, solved)
            # The next round must not see the held-out tokens.
            block = corrected(block, solved.fitted_correction)
        if self.expand > 1:
            narrow, kept = self.best, self.record["kept_round"]
            wide = widen(self.clean, self.mlp, self.expand)
            self._keep_better(wide, refit(*self.stream.down_sums(self.mlp, wide)))
            if self.record["kept_round"] == kept:
                return widen(self._final(*narrow), self.mlp, self.expand), self.record
        return self._final(*self.best), self.record

    def _final(self, block: BilinearMLP, solved: Refit | None) -> BilinearMLP:
        """The block with its correction from all tokens, held-out ones included."""
        return block if solved is None else corrected(block, solved.correction())

    def _begin(self, block: BilinearMLP, error: float) -> None:
        """`best` is a block and its correction, `clean` the two without the held-out tokens."""
        self.best: tuple[BilinearMLP, Refit | None] = block, None
        self.clean = block
        self.record["affine_error"] = error
        if self.converter.method != "affine":
            self.record |= {"heldout_error": error, "ridges": [], "kept_round": 0}

    def _keep_better(self, block: BilinearMLP, solved: Refit) -> None:
        self.record["ridges"].append(None if solved.ridge == NO_CORRECTION else solved.ridge)
        if solved.heldout_error <= self.record["heldout_error"]:
            self.best = block, solved
            self.clean = corrected(block, solved.fitted_correction)
            self.record["heldout_error"] = solved.heldout_error
            self.record["calibration_error"] = solved.calibration_error
            self.record["kept_round"] = len(self.record["ridges"])
