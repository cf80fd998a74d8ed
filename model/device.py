"""Where models run."""

import torch

from bilinearize.model.errors import InputError


def choose_device(device: str) -> torch.device:
    """The device of that name; `auto` is the first GPU, else the CPU.

    Raises:
        InputError: if there is no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"device {device!r} can't be used: {reason}") from error
