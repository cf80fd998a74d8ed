"""`push` by the real client of the hub, over a real connection to a hub on loopback."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from bilinearize import InputError
from bilinearize.cli import main
from bilinearize.model.checkpoint import load_causal_lm
from bilinearize.publish.push import push

REPO = "me/pico-bilinear"
# The hub's client uploads in a way that its own HTTP library calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def listed(output: str) -> list[str]:
    """The files that a dry run lists."""
    return [line.split()[0] for line in output.splitlines() if line.endswith(" bytes")]


def error_line(capsys, *argv) -> str:
    """Run a command that must fail; returns its one line."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in argv])
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def environment(hub, **changes) -> dict:
    """For a process of its own: the hub's address, no cache in common."""
    names = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return os.environ | names | {"HF_TOKEN": hub.token, "OMP_NUM_THREADS": "1"} | changes


def test_a_dry_run_asks_nothing_and_lists_what_goes_up(hub, finished, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    main(["push", str(finished), REPO, "--dry-run"])
    output = capsys.readouterr().out
    assert hub.requests == []
    promised = listed(output)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    main(["push", str(finished), REPO])
    files = hub.files(REPO)
    assert sorted(files) == sorted([*promised, ".gitattributes"])
    for name, content in files.items():
        local = finished / "finetuned" / name
        if local.is_file() and name != "README.md" and not name.endswith(".json"):
            assert content == local.read_bytes(), name
    assert {"README.md", "eval/eval.json", "eval/eval.png", "model.safetensors"} <= set(files)
    assert files["README.md"].startswith(b"---\n") and len(hub.uploads) >= 2
    assert hub.tokens == {hub.token}


LOAD = """
import sys, torch
if sys.argv[2] == "package":
    import bilinearize
else:
    sys.modules["bilinearize"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
trust = {} if sys.argv[2] == "package" else {"trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **trust)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = torch.tensor([tokenizer("the old tree").input_ids])
torch.save(model(ids).logits, sys.argv[3])
"""


@pytest.mark.parametrize("how", ["package", "trust_remote_code"])
def test_what_was_pushed_loads_from_the_hub(how, hub, finished, tmp_path):
    push(finished, REPO)
    out = tmp_path / "logits.pt"
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, REPO, how, out],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(hub, HF_HOME=str(tmp_path / "cache")),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    model = load_causal_lm(finished / "finetuned")
    from bilinearize.model.checkpoint import load_tokenizer

    ids = torch.tensor([load_tokenizer(finished / "finetuned")("the old tree").input_ids])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, torch.load(out))
    # Negative control: it came from the hub.
    assert ("GET", f"/{REPO}/resolve/main/model.safetensors") in [
        (method, path.replace(hub.repos[REPO]["branches"]["main"][-1]["id"], "main"))
        for method, path in hub.requests
    ]


@pytest.fixture
def sharded(finished, tmp_path) -> Path:
    """The finetuned model in several files."""
    folder = tmp_path / "sharded"
    shutil.copytree(finished / "finetuned", folder)
    model = load_causal_lm(folder)
    (folder / "model.safetensors").unlink()
    config = (folder / "config.json").read_bytes()
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "config.json").write_bytes(config)
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


def test_a_killed_push_goes_on_where_it_was(hub, sharded, tmp_path):
    hub.hold_upload = 3
    command = [sys.executable, "-P", "-m", "bilinearize", "push", str(sharded), REPO]
    process = subprocess.Popen(
        command, env=environment(hub), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert hub.holding.wait(240)
    process.send_signal(signal.SIGKILL)
    process.wait()
    stored = list(hub.objects)
    assert len(stored) == 2 and list(hub.files(REPO)) == [".gitattributes"]
    hub.hold_upload = None
    push(sharded, REPO)
    assert all(hub.uploads.count(oid) == 1 for oid in stored)  # not sent again
    shards = [name for name in hub.files(REPO) if name.endswith(".safetensors")]
    assert len(shards) == len(list(sharded.glob("*.safetensors")))
    for name in shards:
        assert hub.files(REPO)[name] == (sharded / name).read_bytes()


def test_a_lost_connection_is_one_line_and_loses_nothing(hub, sharded, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's pauses
    hub.drop_upload = 2
    line = error_line(capsys, "push", sharded, REPO)
    assert f"no answer from {hub.endpoint}" in line and "run the same command again" in line
    assert list(hub.files(REPO)) == [".gitattributes"] and len(hub.objects) == 1
    hub.drop_upload = None
    push(sharded, REPO)
    assert "model.safetensors.index.json" in hub.files(REPO)


def test_a_repository_with_files_is_not_touched_unless_asked(hub, finished, sharded, capsys):
    push(sharded, REPO)
    before = dict(hub.files(REPO))
    line = error_line(capsys, "push", finished, REPO)
    assert f"{REPO} exists already and holds {len(before) - 1} files; add --update" in line
    assert hub.files(REPO) == before
    main(["push", str(finished), REPO, "--update"])
    after = hub.files(REPO)
    assert "model.safetensors" in after and ".gitattributes" in after
    assert not [name for name in after if name.startswith("model-") or "index" in name]
    assert len(hub.repos[REPO]["branches"]["main"]) == 3  # made, pushed, updated


def test_private_and_branch(hub, finished, sharded):
    main(["push", str(finished), REPO, "--private", "--revision", "v2", "--message", "Second"])
    repo = hub.repos[REPO]
    assert repo["private"] is True and repo["branches"]["v2"][-1]["message"] == "Second"
    assert "model.safetensors" in hub.files(REPO, "v2")
    assert list(hub.files(REPO)) == [".gitattributes"]
    push(sharded, REPO)
    kept = dict(hub.files(REPO))
    # A new branch starts with what main holds; no weights of main's are left on it.
    push(finished, REPO, revision="v3")
    assert "model.safetensors" in hub.files(REPO, "v3") and hub.files(REPO) == kept
    assert not [name for name in hub.files(REPO, "v3") if name.startswith("model-")]


def test_bad_credentials_are_one_line_without_the_token(hub, finished, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    line = error_line(capsys, "push", finished, REPO)
    assert "refused the token (401); log in again" in line and "hf_wrong" not in line
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(finished / "none"))
    assert "no Hugging Face token; run `hf auth login`" in error_line(
        capsys, "push", finished, REPO
    )
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.readonly = True
    assert f"may not write to {REPO} (403)" in error_line(capsys, "push", finished, REPO)
    assert hub.repos == {} and hub.objects == {}


def test_the_token_is_written_nowhere(hub, finished, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bilinearize", "push", str(finished), REPO],
        capture_output=True,
        timeout=240,
        env=environment(hub, HF_HOME=str(tmp_path / "home"), HF_DEBUG="1"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    held = [done.stdout, done.stderr, *hub.files(REPO).values()]
    held += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    held += [file.read_bytes() for file in finished.rglob("*") if file.is_file()]
    assert not [content for content in held if hub.token.encode() in content]


def test_no_network_is_one_line(hub, finished, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = error_line(capsys, "push", finished, REPO)
    assert "no answer from http://127.0.0.1:9: ConnectError" in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in error_line(capsys, "push", finished, REPO)


@pytest.mark.parametrize("repo", ["pico", "a/b/c", "me/..x", "me/a b", ""])
def test_bad_names(repo, finished, capsys):
    assert "no repository id" in error_line(capsys, "push", finished, repo)


def test_what_is_not_whole_does_not_go_up(hub, finished, capsys, tmp_path):
    assert "neither a checkpoint" in error_line(capsys, "push", tmp_path, REPO)
    folder = tmp_path / "broken"
    shutil.copytree(finished / "finetuned", folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "optimizer.pt").write_bytes(b"1")
    main(["push", str(folder), REPO, "--dry_run"])
    output = capsys.readouterr().out
    assert "left out: notes.txt" in output and "left out: optimizer.pt" in output
    assert "notes.txt" not in listed(output) and "eval/eval.json" not in listed(output)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    damaged = weights | {name: weights[name] * torch.nan}
    save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
    line = error_line(capsys, "push", folder, REPO)
    assert f"{name} holds NaN" in line
    del damaged[name]
    save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
    assert "missing keys" in error_line(capsys, "push", folder, REPO)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    next(folder.glob("modeling_*.py")).unlink()
    assert "which auto_map names" in error_line(capsys, "push", folder, REPO)
    (folder / "bilinearize.json").unlink()
    assert "no bilinearize.json" in error_line(capsys, "push", folder, REPO)
    assert hub.requests == []


def test_a_report_of_another_model_is_refused(finished, capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(finished / "finetuned", other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    line = error_line(capsys, "push", other, REPO, "--report", finished / "eval", "--dry-run")
    assert "no model in it has the weights" in line
    line = error_line(capsys, "push", other, REPO, "--report", tmp_path, "--dry-run")
    assert "no eval.json" in line
    old = tmp_path / "old"
    old.mkdir()
    (old / "eval.json").write_text('{"schema": 1}')
    line = error_line(capsys, "push", other, REPO, "--report", old, "--dry-run")
    assert "schema 1, not 2; evaluate the model again" in line


def test_a_run_pushes_at_its_end(hub, finished, capsys, monkeypatch):
    run = finished.parent / "run.yaml"
    main(["run", str(run), "--push", REPO, "--push_options.private"])
    assert hub.repos[REPO]["private"] and "eval/eval.json" in hub.files(REPO)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(finished / "none"))
    fresh = ["run", str(run), "--out", str(finished.parent / "fresh"), "--push", REPO]
    assert "no Hugging Face token" in error_line(capsys, *fresh)
    assert not (finished.parent / "fresh").exists()  # said before the work, not after it


def test_push_by_itself_needs_no_report(hub, finished):
    plan = push(finished / "converted", REPO, license="apache-2.0")
    assert plan.report is None and "eval/eval.json" not in hub.files(REPO)
    assert b"license: apache-2.0" in hub.files(REPO)["README.md"]
    with pytest.raises(InputError, match="exists already"):
        push(finished / "converted", REPO)
