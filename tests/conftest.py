"""A pico Llama with a tokenizer of its own, made once per run; no network, no real model."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

# Before transformers reads them. No test asks the hub; pico models gain nothing from threads.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

torch.set_num_threads(1)

WORDS = (
    "the a one two tree house river stone light water runs stands falls turns over under and or "
    "small large old new quick slow green blue with without from into"
).split()


def sample_text(words: int, seed: int) -> str:
    """Deterministic word salad with sentence marks."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(WORDS), (words,), generator=generator).tolist()
    pieces = [WORDS[pick] + (". " if index % 9 == 8 else " ") for index, pick in enumerate(picks)]
    return "".join(pieces)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """One text of about 5,000 tokens."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(sample_text(4000, seed=0))
    return path


@pytest.fixture(scope="session")
def documents_file(tmp_path_factory) -> Path:
    """40 documents of about 100 tokens each, as jsonl."""
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    rows = (json.dumps({"text": sample_text(80, seed=index)}) for index in range(1, 41))
    path.write_text("\n".join(rows) + "\n")
    return path


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample_text(2000, seed=99)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


@pytest.fixture(scope="session")
def pico_llama(tmp_path_factory) -> Path:
    """A folder with a 3-layer random Llama (tied embeddings, sharp weights) and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,  # so that logits and gates are far from flat
    )
    folder = tmp_path_factory.mktemp("pico") / "pico-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()


@pytest.fixture
def browse() -> Callable[[Path, str], str]:
    """Open a page in headless Chromium, with a profile of its own; returns what it prints."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")

    def opened(page: Path, action: str) -> str:
        profile = f"--user-data-dir={page.parent / 'profile'}"
        command = [str(CHROMIUM), *FLAGS, profile, "--window-size=1200,2400", action, page.as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return opened


@pytest.fixture
def colours(browse, tmp_path) -> Callable[[str], dict[str, float]]:
    """Shares of pixels of a page in Chromium that are dark, and that are clearly not grey."""
    import matplotlib.image

    def seen(text: str) -> dict[str, float]:
        page, shot = tmp_path / "seen.html", tmp_path / "shot.png"
        page.write_text(text)
        browse(page, f"--screenshot={shot}")
        image = matplotlib.image.imread(shot)[..., :3]
        grey = image.max(-1) - image.min(-1) <= 0.3
        return {"dark": float((image.min(-1) < 0.5).mean()), "colour": float((~grey).mean())}

    return seen
