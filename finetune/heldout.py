"""The loss on held-out windows, shared out over the processes."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from bilinearize.finetune.data import IGNORE


@torch.no_grad()
def heldout_sums(
    model: nn.Module, windows: Any, batch_size: int, accelerator: Any
) -> tuple[list[float], float]:
    """Sums of the loss and its parts over all windows, and the number of tokens that count.

    Args:
        model: the (wrapped) `StudentWithTeacher`; it is in training mode again afterwards.
        windows: a dataset of what it takes.
        batch_size: windows at a time in each process.
        accelerator: whose processes share the windows out; each makes as many passes.
    """
    training = model.training
    model.eval()
    world, rank = accelerator.num_processes, accelerator.process_index
    sums = None
    for start in range(0, len(windows), batch_size * world):
        mine = range(start + rank * batch_size, start + (rank + 1) * batch_size)
        # Past the end a process passes over windows in which nothing counts.
        rows = [windows[min(i, len(windows) - 1)] for i in mine]
        batch = {k: v.to(accelerator.device) for k, v in default_collate(rows).items()}
        beyond = torch.tensor([i >= len(windows) for i in mine], device=accelerator.device)
        batch["labels"] = batch["labels"].masked_fill(beyond[:, None], IGNORE)
        with accelerator.autocast():
            outputs = model(**batch)
        found = [outputs["loss"][None], outputs["parts"], outputs["count"][None]]
        found = torch.cat([x.double().cpu() for x in found])
        sums = found if sums is None else sums + found
    model.train(training)
    if sums is None:
        raise ValueError("no held-out windows")
    total = accelerator.reduce(sums.to(accelerator.device), "sum") if world > 1 else sums
    *parts, count = total.tolist()
    return parts, count
