"""A shallow bilinear classifier of images, whose classes are matrices with eigenvectors.

`logit_c(x) = sum_n (q_n . x)(k_n . x) v_cn` without biases, after Pearce et al. (arXiv 2410.08417,
section 4), so that each class's eigenvectors are images. The reference is a ReLU network with as
many parameters and the same training.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bilinearize import InputError
from bilinearize.interpret.spectrum import find_spectrum
from bilinearize.interpret.tensor import BilinearTensor

BATCH = 128
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Images:
    """Images as rows with values from 0 to 1, cut into training and test."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    shape: tuple[int, int]

    @property
    def classes(self) -> int:
        return int(self.train_y.max()) + 1


def load_images(path: str | None, seed: int = 0) -> Images:
    """The digits of scikit-learn, or the `x` and `y` of a .npz file; a fifth is for testing.

    Raises:
        InputError: if scikit-learn is missing, or the file is unreadable or of another layout.
    """
    if path is None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise InputError("the digits need scikit-learn: pip install scikit-learn.") from error
        bunch = load_digits()
        x, y = np.asarray(bunch.images), np.asarray(bunch.target)  # type: ignore
    else:
        x, y = _read_npz(Path(path))
    order = np.random.default_rng(seed).permutation(len(x))
    rows = torch.from_numpy((x[order] / x.max()).reshape(len(x), -1).astype(np.float32))
    labels = torch.from_numpy(y[order].astype(np.int64))
    cut = len(x) // 5
    return Images(rows[cut:], labels[cut:], rows[:cut], labels[:cut], x.shape[1:])


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = file["x"], file["y"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a .npz file with x and y: {error}") from error
    if x.ndim != 3 or y.shape != x.shape[:1] or len(x) < 50 or not np.isfinite(x).all():
        raise InputError(
            f"{path}: x {list(x.shape)}, y {list(y.shape)}; finite images (n, height, width) and n "
            "labels are read, at least 50."
        )
    if y.min() < 0 or x.max() <= 0:
        raise InputError(f"{path}: labels count from 0, and images have a largest value above 0.")
    return x, y


class BilinearClassifier(nn.Module):
    """(..., pixels) to (..., classes) by one bilinear layer without biases."""

    def __init__(self, pixels: int, hidden: int, classes: int):
        super().__init__()
        self.query = nn.Linear(pixels, hidden, bias=False)
        self.key = nn.Linear(pixels, hidden, bias=False)
        self.value = nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.query(x) * self.key(x))

    def tensor(self) -> BilinearTensor:
        """The classifier as a tensor in float64; each class is an output coordinate."""
        weights = (self.query.weight, self.key.weight, self.value.weight)
        return BilinearTensor(*(weight.detach().double() for weight in weights), constant=False)


def relu_classifier(pixels: int, hidden: int, classes: int) -> nn.Sequential:
    """A ReLU network with as many parameters as the bilinear one of `hidden` products."""
    parameters = (2 * pixels + classes) * hidden
    width = round((parameters - classes) / (pixels + classes + 1))
    return nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes))


def train(
    model: nn.Module, images: Images, epochs: int, decay: float, noise: float, seed: int
) -> None:
    """AdamW with a cosine schedule, in place.

    Args:
        decay: weight decay, decoupled.
        noise: standard deviation of the Gaussian noise added to each pixel, anew at each step.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        order = torch.randperm(len(images.train_x), generator=generator)
        for batch in order.split(BATCH):
            x = images.train_x[batch]
            x = x + noise * torch.randn(x.shape, generator=generator)
            loss = nn.functional.cross_entropy(model(x), images.train_y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) == labels).double().mean())


def truncated_accuracy(
    tensor: BilinearTensor, images: Images, keeps: list[int]
) -> dict[int, float]:
    """Test accuracy with each class by its first `keep` eigenvectors."""
    spectrum = find_spectrum(tensor, torch.eye(images.classes))
    return {keep: accuracy(spectrum.output(images.test_x, keep), images.test_y) for keep in keeps}


def class_rank(tensor: BilinearTensor) -> float:
    """Effective rank of the classes' matrices, their mean."""
    return float(find_spectrum(tensor, torch.eye(tensor.outputs), 1).effective_rank().mean())


@dataclass(frozen=True)
class Attack:
    """One eigenvector added to images of one class to have them taken for another."""

    success: dict[float, float]
    """Strength (share of the image's norm) to share of the class's images taken for another."""
    control: dict[float, float]
    """The same with random directions of the same size."""
    pattern: Tensor
    """(pixels), of norm 1, with the sign that does more on average."""


@torch.no_grad()
def attack(
    model: BilinearClassifier, images: Images, source: int, target: int, strengths: list[float]
) -> Attack:
    """Add the leading eigenvector of `target - source` to the test images of class `source`.

    No gradient and no image is looked at: the pattern is read from the weights; of its two signs
    each image takes the one that raises `target - source` more.
    """
    direction = torch.zeros(images.classes)
    direction[target], direction[source] = 1, -1
    spectrum = find_spectrum(model.tensor(), direction)
    pattern = spectrum.vectors[0, int(spectrum.values[0].argmax())].float()
    x = images.test_x[images.test_y == source]
    x = x[model(x).argmax(-1) == source]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    noise /= noise.norm(dim=1, keepdim=True)
    gains = [float((model(x + sign * pattern) @ direction).mean()) for sign in (1, -1)]
    pattern = pattern if gains[0] >= gains[1] else -pattern
    return Attack(
        {size: _fooled(model, x, pattern.expand_as(x), direction, size) for size in strengths},
        {size: _fooled(model, x, noise, direction, size) for size in strengths},
        pattern,
    )


def _fooled(
    model: nn.Module, x: Tensor, pattern: Tensor, direction: Tensor, strength: float
) -> float:
    """Share of images that change class when `pattern` is added with the better sign."""
    step = strength * x.norm(dim=1, keepdim=True) * pattern
    plus, minus = model(x + step), model(x - step)
    better = (plus @ direction > minus @ direction)[:, None]
    source = int(direction.argmin())
    return float((torch.where(better, plus, minus).argmax(-1) != source).double().mean())
