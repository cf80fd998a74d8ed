"""The closed-form fits: sums over tokens in float64, solved once per layer.

Notation, for one layer's gated MLP `y(x) = down(act(g) * u) + d`, `g = gate(x)`, `u = up(x)`:
N tokens, slot j of m (intermediate_size), outputs d (hidden_size), token weights w_n. All sums are
plain sums over tokens, so those of two parts of the text add up to those of the whole.
"""

import math
from dataclasses import dataclass

import torch

# Ridge of the down_proj correction, relative to features scaled to unit second moment.
RIDGES = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 5))
# Where the search starts, times unknowns over tokens: what most layers take.
FIRST_RIDGE = 2.5
NO_CORRECTION = float("inf")
# Ridge of the joint gate fit towards the gates it starts from, relative to unit-scaled features.
GATE_RIDGE = 1e-3


# Gram matrices are symmetric: computed in this many column blocks, only on and above the diagonal.
GRAM_BLOCKS = 4


def add_gram(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Add `rows.T @ rows` to float64 `total`, the blocks on and above the diagonal alone."""
    size = -(-rows.shape[1] // GRAM_BLOCKS)
    for start in range(0, rows.shape[1], size):
        columns = slice(start, start + size)
        total[columns, start:] += rows[:, columns].T @ rows[:, start:]


def full_gram(total: torch.Tensor) -> torch.Tensor:
    """The symmetric matrix whose upper triangle is that of `total`."""
    return total.triu() + total.triu(1).T


class AffineSums:
    """Sums for the weighted least squares of `act(g) u` on `(g u, u)`, slot by slot."""

    def __init__(self, slots: int, device: torch.device):
        self.sums = torch.zeros(5, slots, dtype=torch.float64, device=device)

    def add(self, gate: torch.Tensor, up: torch.Tensor, target: torch.Tensor, weight: torch.Tensor):
        """Add tokens: gate, up, target = act(g) u (tokens, slots), weight (tokens, 1)."""
        product = gate * up
        weighted, weighted_up = product * weight, up * weight
        pairs = ((weighted, product), (weighted, up), (weighted_up, up))
        pairs += ((weighted, target), (weighted_up, target))
        for row, (left, right) in enumerate(pairs):
            self.sums[row] += (left * right).sum(0)

    def solve(self) -> torch.Tensor:
        """Each slot's slope and intercept, float64 (2, slots): `act(g) ~ slope g + intercept`.

        A slot whose two features are collinear on the text gets the slope alone, or zero where the
        slot never fires.
        """
        aa, ab, bb, ya, yb = self.sums
        determinant = aa * bb - ab * ab
        sound = determinant > 1e-12 * aa * bb
        safe = torch.where(sound, determinant, 1.0)
        slope_alone = torch.where(aa > 0, ya / torch.where(aa > 0, aa, 1.0), 0.0)
        slope = torch.where(sound, (bb * ya - ab * yb) / safe, slope_alone)
        intercept = torch.where(sound, (aa * yb - ab * ya) / safe, 0.0)
        return torch.stack([slope, intercept])


class GateSums:
    """Sums for the joint least squares of all slots' scores towards the layer's output.

    Minimises `sum_n w_n |t_n - sum_j (sum_i a_ij f_nij) v_j|^2` over the coefficients a, f_nij the
    slot's features (see `block.term_features`) and v_j the columns of down_proj. That is linear in
    a, and its Gram matrix is that of the features times `v_i . v_j`, entry by entry, so the sums
    don't depend on down_proj, and one gathering serves every round.
    """

    def __init__(self, slots: int, terms: int, outputs: int, device: torch.device):
        self.slots, size = slots, slots * terms
        self.upper = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size, outputs, dtype=torch.float64, device=device)
        self.mean = torch.zeros(size, 1, dtype=torch.float64, device=device)

    def add(self, features, target, weight) -> None:
        """Add tokens: features (tokens, terms * slots), target (tokens, outputs), weight."""
        root = weight.sqrt()
        scaled = features * root
        add_gram(self.upper, scaled)
        self.cross += scaled.T @ (target * root)
        self.mean += scaled.T @ root

    def solve(self, down: torch.Tensor, bias: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """The coefficients, float64 (terms, slots), shrunk a little towards `start`.

        `down` (outputs, slots) and `bias` (outputs) are down_proj's; `start` may have fewer terms
        than there are sums for, the first ones.
        """
        down, size = down.double(), start.numel()
        terms = size // self.slots
        gram = full_gram(self.upper[:size, :size]) * (down.T @ down).repeat(terms, terms)
        cross = self.cross[:size] - self.mean[:size] * bias.double()
        slack = (cross * down.T.repeat(terms, 1)).sum(1) - gram @ start.flatten()
        diagonal = gram.diagonal()
        scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        gram *= scale[:, None]
        gram *= scale
        gram.diagonal().add_(GATE_RIDGE)
        step = torch.cholesky_solve((slack * scale)[:, None], torch.linalg.cholesky(gram))[:, 0]
        return start + (step * scale).view_as(start)


class LinearSums:
    """Sums for the ridge regression of a residual on features, a constant among them.

    `gram` is (m + 1, m + 1), `upper` its upper triangle, and `cross` (m + 1, d), float64; `energy`
    is the residual's and `target_energy` the target's weighted sum of squares.
    """

    def __init__(self, slots: int, outputs: int, device: torch.device):
        self.upper = torch.zeros(slots + 1, slots + 1, dtype=torch.float64, device=device)
        self.cross = torch.zeros(slots + 1, outputs, dtype=torch.float64, device=device)
        self.tokens, self.mirrored = 0, False
        self.energy = torch.zeros((), dtype=torch.float64, device=device)
        self.target_energy = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, features, residual, target, weight) -> None:
        """Add tokens: features (tokens, m), residual and target (tokens, d), weight (tokens, 1)."""
        root = weight.sqrt()
        scaled = torch.cat([features, torch.ones_like(root)], 1) * root
        residual = residual * root
        add_gram(self.upper, scaled)
        self.tokens, self.mirrored = self.tokens + len(features), False
        self.cross += scaled.T @ residual
        self.energy += residual.double().square().sum()
        self.target_energy += (target * root).double().square().sum()

    @property
    def gram(self) -> torch.Tensor:
        if not self.mirrored:
            self.upper, self.mirrored = full_gram(self.upper), True
        return self.upper

    def __add__(self, other: "LinearSums") -> "LinearSums":
        total = LinearSums(len(self.upper) - 1, self.cross.shape[1], self.upper.device)
        for name in ("tokens", "upper", "cross", "energy", "target_energy"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    def solve(self, ridge: float) -> torch.Tensor:
        """The correction (m + 1, d) that minimises error + ridge * |scaled correction|^2.

        Features are scaled to unit second moment first, so that `ridge` means the same for every
        layer and number of tokens. The constant is shrunk like any feature.
        """
        if ridge == NO_CORRECTION:
            return torch.zeros_like(self.cross)
        gram = self.gram
        diagonal = gram.diagonal()
        scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        scaled = gram * scale[:, None] * scale
        scaled.diagonal().add_(ridge)
        factor = torch.linalg.cholesky(scaled)
        return torch.cholesky_solve(self.cross * scale[:, None], factor) * scale[:, None]

    def left(self) -> float:
        """The residual's share of the target's sum of squares: the error without a correction."""
        return (self.energy / self.target_energy.clamp_min(1e-300)).item()

    def error(self, correction: torch.Tensor) -> float:
        """Weighted squared error left by `correction`, relative to the target's sum of squares."""
        explained = (correction * (2 * self.cross - self.gram @ correction)).sum()
        return ((self.energy - explained) / self.target_energy.clamp_min(1e-300)).item()


@dataclass
class Refit:
    """A solved down_proj correction and how well it does."""

    fitted_correction: torch.Tensor
    """The correction from the fitted tokens alone, to which the errors belong: float64 (m + 1, d),
    added to down_proj's transposed weight, the last row to its bias."""
    ridge: float
    """Chosen on the held-out tokens; infinity means that no correction was better than any."""
    uncorrected_error: float
    """Held-out error without a correction, as a share of the target's weighted sum of squares."""
    heldout_error: float
    """Held-out error with the correction fitted on the other tokens."""
    calibration_error: float
    """Error of that same correction on the tokens it was fitted on."""
    sums: tuple[LinearSums, LinearSums]
    """Of the fitted and the held-out tokens."""

    def correction(self) -> torch.Tensor:
        """The correction with the chosen ridge from all tokens, solved when asked for."""
        return (self.sums[0] + self.sums[1]).solve(self.ridge)


def refit(fitted: LinearSums, heldout: LinearSums) -> Refit:
    """Fit a correction, its ridge chosen by held-out error.

    The search walks the grid `RIDGES` downhill from what that many tokens usually take, then
    compares with no correction at all, so the held-out error is never above that of the block as it
    is.
    """
    solved: dict[int, tuple[float, torch.Tensor]] = {}

    def at(index: int) -> float:
        if index not in solved:
            correction = fitted.solve(RIDGES[index])
            solved[index] = heldout.error(correction), correction
        return solved[index][0]

    usual = FIRST_RIDGE * len(fitted.cross) / max(1, fitted.tokens)
    best = min(range(len(RIDGES)), key=lambda index: abs(math.log(RIDGES[index] / usual)))
    for step in (1, -1):
        while 0 <= best + step < len(RIDGES) and at(best + step) < at(best):
            best += step
    at(best)
    nothing = fitted.solve(NO_CORRECTION)
    without = heldout.left()
    if at(best) >= without:
        error = fitted.error(nothing)
        return Refit(nothing, NO_CORRECTION, without, without, error, (fitted, heldout))
    error, correction = solved[best]
    own_error = fitted.error(correction)
    return Refit(correction, RIDGES[best], without, error, own_error, (fitted, heldout))
