"""Muon for matrices inside the model, AdamW for all else, as one optimizer."""

from typing import Any

from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """torch's Muon (Jordan et al. 2024) and AdamW over one list of groups and one state.

    Muon steps along the gradient's momentum made orthogonal, so every direction that a matrix can
    take moves alike; steps have AdamW's root mean square (Liu et al., arXiv 2502.16982), so one
    learning rate serves both.

    Args:
        groups: parameter groups, each with "muon": whether it goes to Muon. Those that do hold
            matrices only. Each has "lr" and "weight_decay".
        options: AdamW's own: betas, eps.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any):
        matrices = [group for group in groups if group["muon"]]
        rest = [group for group in groups if not group["muon"]]
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self.parts.append(AdamW(rest, **options))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts work on this optimizer's groups and state."""
        kinds = {Muon: True, AdamW: False}
        for part in self.parts:
            wanted = kinds[type(part)]
            part.param_groups = [group for group in self.param_groups if group["muon"] == wanted]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:  # what load_state_dict ends with
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of both."""
        for part in self.parts:
            part.step()
