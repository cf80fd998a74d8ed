"""Trackers: what tensorboard is told, where its files end up, and names that can't be used."""

import pytest

from bilinearize.finetune.run import finetune
from bilinearize.model.errors import InputError


def test_tensorboard_has_the_held_out_gap_beside_the_result(job, text_file, tmp_path):
    pytest.importorskip("tensorboard")
    watched = {"heldout_text": str(text_file), "heldout_tokens": 320, "eval_every": 6}
    stages = [{"tokens": 32 * 4 * 6}, {"tokens": 32 * 4 * 6, "train": "mlp+norms"}]
    settings = job | watched | {"report_to": ["tensorboard"], "stages": stages}
    out = finetune(**settings, out=tmp_path / "out")
    for stage in (0, 1):
        (file,) = (out / "runs" / f"stage-{stage}").iterdir()
        events = file.read_bytes()
        for tag in (b"/kl", b"/tokens_per_second", b"/memory_gib", b"/grad_norm_mlp"):
            assert events.count(tag) == 6, tag  # once a step
        assert events.count(b"heldout_gap") == 2  # before the first step and after the last
    assert not out.with_name("out.work").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "--report_to is 'tensorbord'; Trainer knows azure_ml"),
        ("swanlab", "--report_to swanlab: not installed here"),
    ],
)
def test_a_tracker_that_can_not_be_used_is_named(job, tmp_path, name, message):
    with pytest.raises(InputError, match=message):
        finetune(**job | {"report_to": [name]}, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())
