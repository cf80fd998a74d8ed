"""Turn one decoder layer's gated MLP into the block that replaces it."""

from typing import Any

import torch

from bilinearize.convert.block import (
    TERMS,
    build_block,
    corrected,
    derivative_at_zero,
    padded,
    restart,
    term_features,
    widen,
)
from bilinearize.convert.fit import NO_CORRECTION, Refit, refit
from bilinearize.convert.layerwise import optimise
from bilinearize.convert.pairs import FIXED, add_pair
from bilinearize.convert.scores import fit_scores
from bilinearize.convert.source import Layer
from bilinearize.convert.stream import Stream
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.symmetry import balance_

# A square has a direction of its own for each slot, so it overfits what the layers above read far
# more than the fixed products do: its held-out error has to be this many times theirs.
SQUARE_MARGIN = 0.9


class LayerConverter:
    """Fits one layer after the other; `stream` holds the calibration states between two layers.

    Args:
        method: "refit", "layerwise", "affine", or "taylor", which needs no stream.
        dtype: of the stored weights. Blocks are rounded to it at once, so that the layers above are
            fitted on what will really be loaded.
        activation: on the slots' scores, "identity" or a key of `ACT2FN`.
        epochs, learning_rate: of `layerwise.optimise`.
    """

    def __init__(
        self,
        method: str,
        dtype: torch.dtype,
        stream: Stream | None = None,
        activation: str = "identity",
        epochs: int = 3,
        learning_rate: float = 0.01,
    ):
        self.method = method
        self.dtype = dtype
        self.stream = stream
        self.activation = activation
        self.epochs = epochs
        self.learning_rate = learning_rate

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
    """One layer's steps; after each, the best by held-out error is kept.

    `best` is a block and the correction that belongs on it; `clean` the two put together without
    the held-out tokens, which is what the next step starts from. `linear` is the number of the
    pair, if any, that has a linear function of x, which each later correction solves anew.
    """

    def __init__(self, converter: LayerConverter, mlp: Any, rank: int, expand: int):
        assert converter.stream is not None
        self.converter, self.stream = converter, converter.stream
        self.mlp, self.rank, self.expand = mlp, rank, expand
        self.record: dict[str, Any] = {}
        self.linear: int | None = None

    def run(self, gates: torch.Tensor) -> tuple[BilinearMLP, dict]:
        gates = self._rounds(gates)
        if self.converter.method == "affine":
            return self.best[0], self.record
        if self.converter.activation != "identity":
            self._activate(gates)
        elif self.rank > 1:
            self._add_pairs()
        if self.expand > 1:
            self._widen()
        if self.converter.method == "layerwise":
            self._optimise()
        return self._final(), self.record

    def _rounds(self, gates: torch.Tensor) -> torch.Tensor:
        """Gates and down_proj in turn, twice; returns the last gates, (2, m)."""
        block, mlp = build_block(self.mlp, gates), self.mlp
        sums = self.stream.gate_sums(
            lambda x: term_features(mlp.gate_proj(x), mlp.up_proj(x), TERMS[1]),
            TERMS[1],
            mlp.down_proj,
        )
        for light in (True, False):
            gates = sums.solve(block.down_proj.weight, block.down_proj.bias, gates)
            block = build_block(self.mlp, gates)
            fitted, heldout = self.stream.down_sums(block, light=light)
            if light:
                self._begin(block, heldout.left())
                if self.converter.method == "affine":
                    break
            solved = refit(fitted, heldout)
            self._keep_better(block, solved)
            # The next round must not see the held-out tokens.
            block = corrected(block, solved.fitted_correction)
        return gates

    def _add_pairs(self) -> None:
        """The pairs from the second on: the next fixed kind, or a square if that leaves far less.

        What a lower rank takes is taken here too, so that no rank fits worse than a lower one.
        """
        fixed, square, pairs = list(FIXED), True, []
        while len(pairs) + 1 < self.rank and (fixed or square):
            clean, linear, kept = self.clean, self.linear, None
            for kind in fixed[:1] + ["square"] * square:
                self.linear = len(pairs) + 1 if kind == "linear" else linear
                block = add_pair(self.stream, clean, self.mlp, kind)
                restart(block, self.mlp, self.linear)
                sums = self.stream.down_sums(block, linear=self.linear is not None)
                margin = SQUARE_MARGIN if kind == "square" and fixed else 1.0
                if self._keep_better(block, refit(*sums), margin):
                    kept = kind, self.linear
            self.linear = kept[1] if kept else linear
            pairs += [kept[0]] if kept else []
            if kept is None or kept[0] != "square":
                # Not worth it once, it is not tried again until the fixed ones are used up.
                square, fixed = len(fixed) == 1, fixed[1:]
        self.record["pairs"] = pairs
        self.best = padded(self.best[0], self.mlp, self.rank), self.best[1]
        self.clean = padded(self.clean, self.mlp, self.rank)

    def _activate(self, gates: torch.Tensor) -> None:
        """Start anew with the activation on the scores."""
        block = fit_scores(self.stream, self.mlp, gates, self.rank, self.converter.activation)
        identity_error = self.record["heldout_error"]
        solved = refit(*self.stream.down_sums(block))
        self._begin(block, solved.uncorrected_error)
        self.record["identity_error"] = identity_error
        self._keep_better(block, solved)

    def _widen(self) -> None:
        wide = widen(self.clean, self.mlp, self.expand)
        narrow = widen(self._final(), self.mlp, self.expand)
        if not self._keep_better(wide, refit(*self.stream.down_sums(wide))):
            self.best, self.clean = (narrow, None), wide

    def _optimise(self) -> None:
        """Train every weight, then solve down_proj once more."""
        self.record["closed_form_error"] = self.record["heldout_error"]
        trained, errors = optimise(
            self.clean, self.stream, self.converter.epochs, self.converter.learning_rate
        )
        self.record["training_errors"] = errors
        self._keep_better(trained, refit(*self.stream.down_sums(trained)))

    def _final(self) -> BilinearMLP:
        """The best block with its correction from all tokens, held-out ones included."""
        block, solved = self.best
        return block if solved is None else corrected(block, solved.correction(), self.linear)

    def _begin(self, block: BilinearMLP, error: float) -> None:
        self.best: tuple[BilinearMLP, Refit | None] = block, None
        self.clean = block
        self.record["affine_error"] = error
        if self.converter.method != "affine":
            self.record |= {"heldout_error": error, "ridges": [], "kept_round": 0}

    def _keep_better(self, block: BilinearMLP, solved: Refit, margin: float = 1.0) -> bool:
        self.record["ridges"].append(None if solved.ridge == NO_CORRECTION else solved.ridge)
        if not solved.heldout_error <= margin * self.record["heldout_error"]:
            return False
        self.best = block, solved
        self.clean = corrected(block, solved.fitted_correction, self.linear)
        self.record["heldout_error"] = solved.heldout_error
        self.record["calibration_error"] = solved.calibration_error
        self.record["kept_round"] = len(self.record["ridges"])
        return True
