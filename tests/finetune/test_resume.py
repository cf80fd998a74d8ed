"""Runs that are killed and started again, and runs in two processes."""

import json
import random
import shutil
import signal

import pytest
import torch

from bilinearize.finetune import data
from bilinearize.finetune.run import finetune
from bilinearize.finetune.work import last_checkpoint
from bilinearize.model.errors import InputError


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.fixture(scope="module")
def killed(job, launch, tmp_path_factory):
    """The folder of a run that was killed after step 6 of 12; its last checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("killed")
    status, output = launch(job | {"out": folder / "out", "kill_after": 6})
    assert status == -signal.SIGKILL, output
    return folder


def test_killed_twice_ends_at_the_same_weights(
    job, killed, launch, finished, weights, history, tmp_path
):
    folder = shutil.copytree(killed, tmp_path / "killed")
    work = folder / "out.work"
    assert not (folder / "out").exists()
    assert last_checkpoint(work / "stage-0").endswith("checkpoint-4")
    status, output = launch(job | {"out": folder / "out", "kill_in_save": 8})
    assert status == -signal.SIGKILL, output
    assert "Going on from" in output
    # Step 8 was being written: its weights are there, its optimizer may be, and it is never picked.
    assert (
        work / "stage-0" / "checkpoints" / "saving" / "checkpoint-8" / "model.safetensors"
    ).exists()
    assert last_checkpoint(work / "stage-0").endswith("checkpoint-4")
    out = finetune(**job, out=folder / "out")
    assert equal(weights(out), weights(finished))
    logs = [history(folder) for folder in (out, finished)]
    for entries in logs:
        for entry in entries:
            for name in ("seconds", "tokens_per_second", "memory_gib"):
                del entry[name]
    assert logs[0] == logs[1]
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_killed_at_five_moments_ends_at_the_same_weights(job, launch, weights, history, tmp_path):
    """Among them while t is under way, while saving, between stages, and with LoRA factors."""
    step = 32 * 4
    stages = [
        {"tokens": 10 * step, "homotopy": "blend", "homotopy_share": 0.8, "optimizer": "muon"},
        {"tokens": 6 * step, "train": "lora", "lora_rank": 2},
        {"tokens": 4 * step, "loss": "lm", "train": "all", "learning_rate": 1e-3},
    ]
    run = job | {"stages": stages, "save_every": 2, "teacher_mode": "cached", "top_k": 20}
    whole = finetune(**run, out=tmp_path / "whole")
    draw = random.Random(0)
    moments = [
        {"kill_after": draw.choice([3, 5])},  # in the first stage, before the next save
        {"kill_in_save": draw.choice([6, 8])},
        {"kill_before_stage": 1},
        {"kill_in_stage": 1, "kill_after": draw.choice([3, 5])},
        {"kill_in_stage": 2, "kill_in_save": 2},
    ]
    run["out"] = tmp_path / "out"
    status, output = launch(*(run | moment for moment in moments), run)
    assert status == 0 and output.count(f"child: {-signal.SIGKILL}") == 5, output
    assert output.count("Going on from") == 3  # not where a stage begins, nor after none was saved
    assert equal(weights(tmp_path / "out"), weights(whole))
    losses = [[entry["loss"] for entry in history(tmp_path / name)] for name in ("out", "whole")]
    assert losses[0] == losses[1]


def test_the_comparison_sees_a_forgotten_optimizer(job, killed, finished, weights, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "killed")
    file = folder / "out.work" / "stage-0" / "checkpoints" / "checkpoint-4" / "optimizer.pt"
    state = torch.load(file)
    for moments in state["state"].values():
        moments["exp_avg"].zero_()
    torch.save(state, file)
    assert not equal(weights(finetune(**job, out=folder / "out")), weights(finished))


def test_sigterm_saves_the_step_in_progress_and_ends(job, launch, finished, weights, tmp_path):
    run = job | {"out": tmp_path / "out", "save_every": 100}
    status, output = launch(run | {"terminate_after": 6})
    assert status == 143 and "Traceback" not in output, output
    assert "Stopped at step 7; the same command goes on." in output
    assert last_checkpoint(tmp_path / "out.work" / "stage-0").endswith("checkpoint-7")
    out = finetune(**run)
    assert equal(weights(out), weights(finished))


@pytest.mark.parametrize(
    "setting, value", [("learning_rate", 2e-3), ("tokens", 32 * 4 * 13), ("train", "all")]
)
def test_a_changed_setting_is_refused(job, killed, setting, value):
    before = sorted(path.name for path in killed.rglob("*"))
    with pytest.raises(InputError, match=f"out.work: made with {setting} .*remove it"):
        finetune(**job | {setting: value}, out=killed / "out")
    assert sorted(path.name for path in killed.rglob("*")) == before


def test_a_changed_text_is_refused(job, text_file, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    shutil.copy(text_file, text)
    monkeypatch.setattr("bilinearize.finetune.run.write_result", lambda *args: exit(3))
    with pytest.raises(SystemExit):
        finetune(**job | {"text": str(text), "tokens": 256}, out=tmp_path / "out")
    text.write_text(text.read_text() + " more")
    with pytest.raises(InputError, match="made with text_sha256"):
        finetune(**job | {"text": str(text), "tokens": 256}, out=tmp_path / "out")


def test_the_order_covers_each_pass_and_its_start_is_fixed():
    whole, short = (data.training_order([10], [1.0], count, seed=3) for count in (25, 13))
    rows = whole[:, 1].tolist()
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert rows[:10] != rows[10:20]
    assert short[:, 1].tolist() == rows[:13]
    assert data.training_order([10], [1.0], 25, seed=3, start=5)[:, 1].tolist() == rows[5:]


def test_two_processes_follow_one(job, launch, finished, weights, history, tmp_path):
    pair = job | {"batch_size": 2}  # half the batch in each process
    again = pair | {"out": tmp_path / "again"}
    status, output = launch(
        pair | {"out": tmp_path / "out"}, again | {"interrupt_after": 6}, again, processes=2
    )
    assert status == 0, output
    assert output.count("Trains the MLPs") == 3 and output.count("interrupted") == 2
    for ours, theirs in zip(history(tmp_path / "out"), history(finished), strict=True):
        for name in ("loss", "kl", "gap", "cross_entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4)
    first, second = weights(tmp_path / "out"), weights(finished)
    assert all(torch.allclose(first[n], second[n], atol=1e-3) for n in first)
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert record["settings"]["processes"] == 2 and record["tokens"] == 12 * 4 * 32
    assert "Going on from" in output
    assert equal(weights(tmp_path / "again"), weights(tmp_path / "out"))
