"""The image classifier: exact eigenvectors, accuracy beside ReLU, and what decay and noise do."""

import json

import numpy as np
import pytest
import torch

from bilinearize import InputError
from bilinearize.interpret.digits import (
    BilinearClassifier,
    attack,
    class_rank,
    load_images,
    relu_classifier,
    truncated_accuracy,
)
from bilinearize.interpret.digits_report import digits, train_pair
from bilinearize.interpret.spectrum import find_spectrum

EPOCHS = 25


@pytest.fixture(scope="module")
def images():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return load_images(None)


@pytest.fixture(scope="module")
def trained(images) -> dict:
    """(decay, noise) to a model and what it reached."""
    kinds = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.3))
    return {kind: train_pair(images, 64, EPOCHS, *kind, seed=0) for kind in kinds}


def test_the_eigenvectors_are_the_classifier(images, trained):
    model, run = trained[1.0, 0.0]
    with torch.no_grad():
        right = model.double()(images.test_x.double())
        found = find_spectrum(model.tensor(), torch.eye(10))
        assert torch.allclose(found.output(images.test_x), right, rtol=1e-10)
        model.float()
    assert truncated_accuracy(model.tensor(), images, [64])[64] == run["bilinear"]


def test_accuracy_is_that_of_a_relu_network_of_the_same_size(trained):
    for _, run in trained.values():
        assert run["bilinear"] > 0.95 and run["bilinear"] > run["relu"] - 0.015
    sizes = [
        sum(weight.numel() for weight in network.parameters())
        for network in (BilinearClassifier(64, 64, 10), relu_classifier(64, 64, 10))
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_decay_lowers_the_rank_and_noise_does_not(trained):
    plain, decayed, noisy = (run["effective_rank"] for _, run in trained.values())
    assert decayed < 0.75 * plain < plain < noisy
    untrained = class_rank(BilinearClassifier(64, 64, 10).tensor())
    assert untrained > 2 * plain


def test_three_eigenvectors_nearly_do(trained):
    _, run = trained[1.0, 0.0]
    assert run["truncated"][3] > run["bilinear"] - 0.03 > run["truncated"][1]


def test_an_eigenvector_fools_where_random_directions_do_not(images, trained):
    found = attack(trained[1.0, 0.0][0], images, source=0, target=2, strengths=[0.0, 0.4])
    assert found.success[0.0] == 0 and found.success[0.4] > 0.5 > found.control[0.4] + 0.2


def test_the_report_from_a_file(tmp_path):
    generator = np.random.default_rng(0)
    x = np.zeros((90, 4, 6), dtype=np.uint8)
    y = np.arange(90) % 3
    for index, label in enumerate(y):
        x[index, label] = generator.integers(100, 255, 6)
    np.savez(tmp_path / "stripes.npz", x=x, y=y)
    result = digits(tmp_path / "out", str(tmp_path / "stripes.npz"), hidden=6, epochs=2, seeds=1)
    assert json.loads((tmp_path / "out/report.json").read_text())["runs"][0]["seed"] == 0
    assert (
        len(result["runs"]) == 15 and "Effective rank" in (tmp_path / "out/README.md").read_text()
    )


def test_bad_images(tmp_path):
    with pytest.raises(InputError, match="no.npz: not a .npz file with x and y"):
        load_images(str(tmp_path / "no.npz"))
    np.savez(tmp_path / "flat.npz", x=np.ones((60, 9)), y=np.zeros(60))
    with pytest.raises(InputError, match=r"flat.npz: x \[60, 9\], y \[60\]; finite images"):
        load_images(str(tmp_path / "flat.npz"))
    with pytest.raises(InputError, match="must be at least 1"):
        digits(tmp_path / "out", hidden=0)
    assert not (tmp_path / "out").exists()
