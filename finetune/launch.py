"""`bilinearize finetune --launch N`: the same command in N processes, started by accelerate."""

import os
import subprocess
import sys
from pathlib import Path

from bilinearize.model.errors import InputError

LAUNCHED = "BILINEARIZE_LAUNCHED"


def launch(arguments: list[str], processes: int, config: str | None) -> int:
    """Run `bilinearize ARGUMENTS` under `accelerate launch`; returns its exit status.

    The processes it starts find `LAUNCHED` in their environment, and start none themselves.

    Args:
        processes: how many processes, on this machine.
        config: a configuration of accelerate; None is one process per GPU, or gloo on the CPU.

    Raises:
        InputError: if there is no such file, or the number is below 1.
    """
    if processes < 1:
        raise InputError(f"--launch is {processes}; use 1 or more processes.")
    if config is not None and not Path(config).is_file():
        raise InputError(f"{config}: no such file; name a configuration of accelerate.")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if config is not None:
        command += ["--config_file", config]
    else:
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1"]
        command += ["--multi_gpu"] if processes > 1 else []
    command += ["--num_processes", str(processes), "--main_process_port", "0"]
    environment = {**os.environ, LAUNCHED: "1"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    return subprocess.run([*command, "-m", "bilinearize", *arguments], env=environment).returncode


def is_launched() -> bool:
    """Whether this process was started by a launcher."""
    return LAUNCHED in os.environ or "LOCAL_RANK" in os.environ
