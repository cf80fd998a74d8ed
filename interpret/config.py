"""What `bilinearize interpret ...` can be told; flags and YAML come from these dataclasses."""

from dataclasses import dataclass, field


@dataclass
class SpectrumConfig:
    """Eigenvectors of what layers write to directions, and the tokens these read and write."""

    directions: list[str] = field(default_factory=lambda: ["hosvd:0", "hosvd:1", "hosvd:2"])
    """Output directions: a token (`" Paris"`), a difference of two (`" he -  she"`), `hosvd:N` (the
    layer's N-th strongest), or a .npy file of vectors (a probe, an SAE's encoder)."""
    layers: list[int] | None = None
    """Layers to read; null takes the first, middle and last converted one."""
    eigenvectors: int = 4
    """Eigenvectors shown for each direction."""
    tokens: int = 6
    """Tokens shown at each end of each eigenvector."""


@dataclass
class AttributeConfig:
    """What made a layer write to a direction at one token of a prompt."""

    prompt: str
    """Text of the prompt."""
    direction: str
    """Output direction, as in `spectrum`."""
    layer: int
    """The layer."""
    position: int = -1
    """Token of the prompt, counted from 0, or from the end if negative."""
    count: int = 12
    """Eigenvectors and pairs shown."""


@dataclass
class SymmetryConfig:
    """How far gated MLPs are from the two symmetries, and that converted ones have them."""

    text: str
    """Real text: a .txt, .jsonl or .parquet file, or a `datasets` name (`name:config`)."""
    text_column: str = "text"
    """Field that holds the text, for all but .txt."""
    split: str = "test"
    """Split, for a `datasets` name."""
    tokens: int = 1024
    """Tokens to run."""
    window: int = 256
    """Tokens per window."""


@dataclass
class CorrelateConfig:
    """Whether a few eigenvectors stand for what layers write, on real text, with a control."""

    text: str
    """Real text: a .txt, .jsonl or .parquet file, or a `datasets` name (`name:config`)."""
    text_column: str = "text"
    """Field that holds the text, for all but .txt."""
    split: str = "test"
    """Split, for a `datasets` name."""
    tokens: int = 4096
    """Tokens to run."""
    window: int = 256
    """Tokens per window; the first position of each is left out, for its vectors are outliers."""
    layers: list[int] | None = None
    """Layers to read; null takes all converted ones."""
    directions: int = 32
    """Directions of each kind: random tokens, the layer's strongest, Gaussian."""
    keep: int = 2
    """Eigenvectors that stand for the direction."""
    threshold: float = 0.75
    """The share of directions above this correlation is reported."""
    seed: int = 0
    """Seed of the tokens, the Gaussian directions and the control."""


@dataclass
class GalleryConfig:
    """A page on what a converted model's layers read and write, and what can't be read."""

    text: str
    """Real text: a .txt, .jsonl or .parquet file, or a `datasets` name (`name:config`)."""
    text_column: str = "text"
    """Field that holds the text, for all but .txt."""
    split: str = "test"
    """Split, for a `datasets` name."""
    directions: list[str] = field(default_factory=list)
    """Output directions as in `spectrum`; empty takes ten: eight tokens and differences that the
    vocabulary has, and the two strongest of each layer."""
    layers: list[int] | None = None
    """Layers to read; null takes three: the first, middle and last converted one."""
    tokens: int = 4096
    """Tokens of the text to run."""
    window: int = 256
    """Tokens per window."""


@dataclass
class DigitsConfig:
    """A shallow bilinear classifier of images, its eigenvectors as pictures, and its controls."""

    images: str | None = None
    """A .npz file with `x` (n, height, width) and `y` (n), such as MNIST; null takes the 8 x 8
    digits bundled with scikit-learn."""
    hidden: int = 64
    """Products of the bilinear layer; a ReLU network of as many parameters is the reference."""
    epochs: int = 60
    """Passes over the training images."""
    seeds: int = 5
    """Runs behind each number."""
