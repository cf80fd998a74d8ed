"""Cost of reading a model: python benchmarks/interpret.py [MODEL].

MODEL is a converted checkpoint folder, for the decomposition of all its layers; without one a model
of SmolLM2-135M's shape with random weights is read (hidden size 576, 1,536 slots, 30 layers).

Targets: one direction at TinyLlama's size (hidden size 2,048, 5,632 slots) at most 1.5 times the
dense eigendecomposition alone and under 3 s on 2 cores; the HOSVD of all layers within minutes, and
under 3 GB in all.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from bilinearize import BilinearLlamaConfig, BilinearLlamaForCausalLM
from bilinearize.interpret.hosvd import find_hosvd
from bilinearize.interpret.layers import converted_layers, layer_tensor
from bilinearize.interpret.spectrum import find_spectrum
from bilinearize.interpret.tensor import BilinearTensor
from bilinearize.model.checkpoint import load_causal_lm

RUNS = 5


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def one_direction(dtype: torch.dtype) -> None:
    """All eigenvectors of one direction against `torch.linalg.eigh` of the same matrix."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 5632, 2048, dtype=dtype) / 2048**0.5
    tensor = BilinearTensor(query, key, torch.randn(2048, 5632, dtype=dtype) / 75, False)
    direction = torch.randn(2048, dtype=dtype)
    matrix = tensor.interaction(direction)
    whole, alone = [], []
    for _ in range(RUNS):  # taken in turns, so that other load falls on both
        alone.append(seconds(lambda: torch.linalg.eigh(matrix)))
        whole.append(seconds(lambda: find_spectrum(tensor, direction)))
    ratio = median(a / b for a, b in zip(whole, alone, strict=True))
    print(
        f"{dtype}: one direction {median(whole):.2f} s (least {min(whole):.2f}), eigh alone "
        f"{median(alone):.2f} s (least {min(alone):.2f}), ratio {ratio:.2f}"
    )


def all_layers(model: str | None) -> None:
    """The HOSVD of every layer, and the memory that the whole process took."""
    if model is None:
        config = BilinearLlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
            bilinear_bias=True,
        )
        network = BilinearLlamaForCausalLM(config)
    else:
        network = load_causal_lm(Path(model))
    layers = converted_layers(network)
    took = seconds(lambda: [find_hosvd(layer_tensor(network, layer)).values for layer in layers])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"HOSVD of {len(layers)} layers in {took:.1f} s; peak memory, model included {peak:.2f} GB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder of a converted model")
    args = parser.parse_args()
    # Other work on the machine makes threads wait for each other: read the figures with this.
    print(f"load average {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    all_layers(args.model)
    for kind in (torch.float32, torch.float64):
        one_direction(kind)
