"""Several processes, one evaluation: under `accelerate launch` or `torchrun`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from bilinearize.model.errors import InputError

T = TypeVar("T")


def team() -> PartialState:
    """Which of how many processes this is; on a CPU they talk through gloo."""
    return PartialState(cpu=not torch.cuda.is_available())


def own_share(items: Sequence[T]) -> tuple[int, Sequence[T]]:
    """This process's part, contiguous and in order, and where it begins."""
    state = team()
    ends = [len(items) * rank // state.num_processes for rank in range(state.num_processes + 1)]
    first, last = ends[state.process_index : state.process_index + 2]
    return first, items[first:last]


def together(action: Callable[[], T]) -> T:
    """Call in every process; this process's own result, once all have succeeded.

    Raises:
        InputError: in the main process, if any process met one: the first by its rank. The others
            leave by SystemExit, so that nobody waits and one line is printed.
    """
    state = team()
    if state.num_processes == 1:
        return action()
    result, message = None, None
    try:
        result = action()
    except InputError as error:
        message = str(error)
    failed = [each for each in gather_object([message]) if each is not None]
    if failed and state.is_main_process:
        raise InputError(failed[0])
    if failed:
        raise SystemExit(2)
    return result  # pyright: ignore[reportReturnType]


def gather(part: T) -> list[T]:
    """The parts of all processes in order, in each process."""
    return gather_object([part])
