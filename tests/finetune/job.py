"""Finetunes in a process of its own: `python job.py JSON`, a list of arguments of `finetune`.

`"kill_after": n` kills the process with SIGKILL when step n is done, `"kill_in_save": n` in the
middle of writing the checkpoint of step n, `"kill_before_stage": n` when stage n - 1 is written;
`"terminate_after": n` sends it SIGTERM when step n is done; `"interrupt_after": n` ends only that
finetune. Steps count within a stage, the first or that of `"kill_in_stage"`.
"""

import json
import os
import signal
import sys

from bilinearize.finetune import run
from bilinearize.finetune.callbacks import HistoryFile
from bilinearize.finetune.run import finetune
from bilinearize.finetune.trainer import RecoveryTrainer

EVENTS = (
    "kill_in_stage",
    "kill_after",
    "kill_in_save",
    "kill_before_stage",
    "terminate_after",
    "interrupt_after",
)


class Interrupt(Exception):
    """Ends one finetune."""


def plant(event: dict[str, int]) -> None:
    """Make the event happen in the next finetune."""

    def here(args):
        return f"stage-{event.get('kill_in_stage', 0)}" in str(args.output_dir)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == event.get("kill_after") and here(args):
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == event.get("terminate_after"):
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step == event.get("interrupt_after"):
            raise Interrupt

    def _save_rng_state(self, output_dir):
        if self.state.global_step == event.get("kill_in_save") and here(self.args):
            os.kill(os.getpid(), signal.SIGKILL)
        save_rng_state(self, output_dir)

    def write_and_kill(model, trainer, student, stage):
        write_stage(model, trainer, student, stage)
        if stage.name == f"stage-{event.get('kill_before_stage', 0) - 1}":
            os.kill(os.getpid(), signal.SIGKILL)

    run.write_stage = write_and_kill
    HistoryFile.on_step_begin = on_step_begin
    RecoveryTrainer._save_rng_state = _save_rng_state


write_stage = run.write_stage
save_rng_state = RecoveryTrainer._save_rng_state


def run_job(job: dict) -> None:
    plant({name: job.pop(name) for name in EVENTS if name in job})
    try:
        finetune(**job)
    except Interrupt:
        print("interrupted", flush=True)


if __name__ == "__main__":
    jobs = json.loads(sys.argv[1])
    for number, job in enumerate(jobs):
        # Of several jobs, one that is to be killed runs in a child, which spares the imports.
        if number + 1 < len(jobs) and any(name.startswith("kill") for name in job):
            child = os.fork()
            if child == 0:
                run_job(job)
                os._exit(0)
            print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            run_job(job)
