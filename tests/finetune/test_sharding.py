"""Two processes that shard the model between them by FSDP2, over gloo on CPUs."""

import json

import pytest
import torch

from bilinearize.finetune.run import finetune
from bilinearize.model.checkpoint import load_causal_lm

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
STAGES = [
    {"tokens": 32 * 4 * 6, "homotopy": "blend", "homotopy_share": 0.6},
    {"tokens": 32 * 4 * 6, "train": "all", "learning_rate": 1e-3, "optimizer": "muon"},
]


def test_two_sharding_processes_follow_one(job, launch, documents_file, weights, history, tmp_path):
    run = job | {"stages": STAGES, "heldout_text": str(documents_file), "heldout_tokens": 160}
    run |= {"eval_every": 3, "save_every": 3, "keep_best": False}
    pair = run | {"batch_size": 2}
    again = pair | {"out": tmp_path / "again"}
    jobs = [pair | {"out": tmp_path / "out"}, again | {"interrupt_after": 5}, again]
    status, output = launch(*jobs, processes=2, **FSDP)
    assert status == 0, output
    assert output.count("sharded over 2 processes") == 5  # 2 stages, the first of one, 2 of one
    assert "Going on from" in output and output.count("interrupted") == 2
    one = finetune(**run, out=tmp_path / "one")
    names = {"loss", "kl", "gap", "t", "grad_norm_mlp", "heldout_gap", "heldout_kl"}
    for ours, theirs in zip(history(tmp_path / "out"), history(one), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() & names:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), name
    first, second = weights(tmp_path / "out"), weights(one)
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[n], second[n], atol=2e-3) for n in first)
    resumed = weights(tmp_path / "again")
    assert all(torch.equal(first[name], resumed[name]) for name in first)
    # What is written is one plain checkpoint.
    assert load_causal_lm(tmp_path / "out")(torch.arange(20)[None]).logits.isfinite().all()
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert record["settings"]["processes"] == 2
    assert record["stages"][0]["trained_parameters"] == 18912
