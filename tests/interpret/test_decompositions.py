"""Every decomposition equals the block at full rank, to 1e-10 in fp64; of a gated block, none."""

import pytest
import torch
from torch import Tensor, nn

from bilinearize import BilinearMLP, InputError
from bilinearize.interpret.features import feature_basis
from bilinearize.interpret.hosvd import change_basis, find_hosvd
from bilinearize.interpret.lowrank import shuffled, truncation_correlations
from bilinearize.interpret.spectrum import correlate, find_spectrum
from bilinearize.interpret.tensor import BilinearTensor, block_tensor

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 10, generator=GENERATOR, dtype=torch.float64)
READERS = torch.randn(13, 10, generator=GENERATOR, dtype=torch.float64)


def relative(ours: Tensor, right: Tensor) -> float:
    return float((ours - right).norm() / right.norm())


def by_tensor(tensor: BilinearTensor) -> Tensor:
    return tensor.output(X)


def by_whole_tensor(tensor: BilinearTensor) -> Tensor:
    x = tensor.augment(X)
    return torch.einsum("oij,ti,tj->to", tensor.materialise(), x, x)


def by_squares(tensor: BilinearTensor) -> Tensor:
    w, values = tensor.squares()
    return (tensor.augment(X) @ w.T).square() @ values.T


def by_eigenvectors(tensor: BilinearTensor) -> Tensor:
    return find_spectrum(tensor, torch.eye(10)).output(X)


def by_contributions(tensor: BilinearTensor) -> Tensor:
    return find_spectrum(tensor, torch.eye(10)).contributions(X).sum(-1)


def by_hosvd(tensor: BilinearTensor) -> Tensor:
    hosvd = find_hosvd(tensor)
    return find_spectrum(tensor, hosvd.directions).output(X) @ hosvd.directions


def by_output_basis(tensor: BilinearTensor) -> Tensor:
    return change_basis(tensor, READERS).output(X)


def by_features(tensor: BilinearTensor) -> Tensor:
    z = X @ torch.linalg.pinv(READERS)
    return feature_basis(tensor, READERS).output(z)


def by_features_with_bias(tensor: BilinearTensor) -> Tensor:
    bias = torch.linspace(-1, 1, 10, dtype=torch.float64)
    return feature_basis(tensor, READERS, bias).output((X - bias) @ torch.linalg.pinv(READERS))


WAYS = [
    by_tensor,
    by_whole_tensor,
    by_squares,
    by_eigenvectors,
    by_contributions,
    by_hosvd,
    by_output_basis,
    by_features,
    by_features_with_bias,
]


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_full_rank_equals_the_block(block, way):
    assert relative(way(block_tensor(block)), block(X)) < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_the_identities_fail_on_a_gated_block(make_block, way):
    gated = make_block(1, False, form="gated", act="silu")
    weights = (gated.gate_proj.weight, gated.up_proj.weight, gated.down_proj.weight)
    assert relative(way(BilinearTensor(*weights, constant=False)), gated(X)) > 0.1


@torch.no_grad()
def test_folded_norms(block):
    before, behind = torch.rand(2, 10, dtype=torch.float64) + 0.5
    tensor = block_tensor(block, input_scale=before, output_scale=behind)
    assert relative(tensor.output(X), behind * block(before * X)) < 1e-10


@torch.no_grad()
def test_truncation_error_is_as_the_theory_says(block):
    tensor = block_tensor(block)
    spectrum = find_spectrum(tensor, READERS)
    exact, size = spectrum.output(X), tensor.augment(X).square().sum(1, keepdim=True)
    for keep in range(1, spectrum.values.shape[1]):
        error = (spectrum.output(X, keep) - exact).abs()
        assert (error <= spectrum.values[:, keep].abs() * size + 1e-12).all()
        rest = torch.stack([tensor.interaction(u) for u in READERS])
        kept = spectrum.vectors[:, :keep]
        rest -= torch.einsum("bk,bki,bkj->bij", spectrum.values[:, :keep], kept, kept)
        assert torch.allclose(rest.flatten(1).norm(dim=1), spectrum.tail(keep), atol=1e-12)
    assert (spectrum.tail(5) < spectrum.tail(2)).all()


@torch.no_grad()
def test_hosvd_equals_the_svd_of_the_whole_tensor(block):
    tensor = block_tensor(block)
    left, values, _ = torch.linalg.svd(tensor.materialise().flatten(1), full_matrices=False)
    hosvd = find_hosvd(tensor)
    assert torch.allclose(hosvd.values, values, rtol=1e-9, atol=1e-9 * float(values[0]))
    overlap = (hosvd.directions @ left).abs()
    assert torch.allclose(overlap, torch.eye(10, dtype=torch.float64), atol=1e-6)
    whole = tensor.materialise()
    for keep in (0, 1, 4, 10):
        kept = hosvd.directions[:keep]
        rest = whole - torch.einsum("ko,kp,pij->oij", kept, kept, whole)
        assert float(rest.norm()) == pytest.approx(float(hosvd.tail(keep)), abs=1e-9)
        assert relative(hosvd.output(X, 10), tensor.output(X)) < 1e-10


def test_hosvd_in_strips_is_the_same(block, monkeypatch):
    whole = find_hosvd(block_tensor(block)).values
    monkeypatch.setattr("bilinearize.interpret.hosvd.STRIP", 5)
    assert torch.allclose(find_hosvd(block_tensor(block)).values, whole, rtol=1e-12)


def test_slot_spectrum_is_that_of_each_product(block):
    tensor = block_tensor(block)
    for q, k, closed in zip(tensor.query, tensor.key, tensor.slot_spectrum(), strict=True):
        values = torch.linalg.eigvalsh((q.outer(k) + k.outer(q)) / 2)
        assert torch.allclose(values[[-1, 0]], closed, atol=1e-12)
        assert torch.allclose(values[1:-1], torch.zeros(1, dtype=torch.float64), atol=1e-12)


def test_effective_rank():
    def rank(values):
        values = torch.tensor(values, dtype=torch.float64)
        unit = torch.eye(3, dtype=torch.float64)
        tensor = BilinearTensor(unit, unit, values[None], False)
        return float(find_spectrum(tensor, torch.ones(1)).effective_rank())

    assert rank([1.0, -1.0, 1.0]) == pytest.approx(3)
    assert rank([2.0, 0.0, 0.0]) == pytest.approx(1)
    assert rank([0.0, 0.0, 0.0]) == 0
    assert rank([3.0, -1.0, 0.0]) == pytest.approx(16 / 10)


def test_kept_eigenvectors_are_the_largest(block):
    tensor = block_tensor(block)
    few, all_of_them = find_spectrum(tensor, READERS, 3), find_spectrum(tensor, READERS)
    assert few.vectors.shape[1] == 3 and torch.equal(few.values, all_of_them.values)
    assert torch.equal(few.output(X), all_of_them.output(X, 3))
    assert torch.equal(few.effective_rank(), all_of_them.effective_rank())


def test_largest_feature_interactions_find_a_planted_one():
    torch.manual_seed(0)
    decoder = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64))[0]
    query, key = decoder[[2, 5]], decoder[[7, 5]]
    value = torch.tensor([[3.0, 0.5]], dtype=torch.float64)
    basis = feature_basis(BilinearTensor(query, key, value, False), decoder)
    (first, second) = basis.top(torch.ones(1), 2)
    assert first[:2] == (2, 7) and first[2] == pytest.approx(3.0)
    assert second[:2] == (5, 5) and second[2] == pytest.approx(0.5)


def test_all_interactions_add_up_to_the_feature(block):
    tensor, bias = block_tensor(block), torch.ones(10, dtype=torch.float64)
    basis = feature_basis(tensor, READERS, bias)
    z = torch.randn(14, dtype=torch.float64)
    z[-1] = 1
    total = sum(w * z[b] * z[c] for b, c, w in basis.top(READERS[0], 14 * 14))
    assert float(total) == pytest.approx(float(basis.output(z[:-1]) @ READERS[0]), rel=1e-10)


def test_correlation():
    a = torch.tensor([[1.0, 5.0], [2.0, 1.0], [3.0, 5.0], [9.0, 5.0]]).double()
    b = torch.tensor([[2.0, 1.0], [4.0, 1.0], [6.0, 1.0], [-7.0, 1.0]]).double()
    first_three = torch.tensor([True, True, True, False])[:, None].expand(4, 2)
    assert correlate(a, b, first_three)[0] == pytest.approx(1)
    whole = torch.corrcoef(torch.stack([a[:, 0], b[:, 0]]))[0, 1]
    assert correlate(a, b)[0] == pytest.approx(float(whole))
    assert correlate(a, b)[1].isnan()


def test_truncation_correlations(block):
    tensor = block_tensor(block)
    found = truncation_correlations(tensor, X, READERS, keep=tensor.query.shape[1])
    assert torch.allclose(found["all"], torch.ones(13, dtype=torch.float64))
    assert torch.allclose(found["active"], torch.ones(13, dtype=torch.float64))
    few = truncation_correlations(tensor, X, READERS, keep=1)
    assert (few["all"] < 1 - 1e-6).all()
    spectrum = find_spectrum(tensor, READERS[:1], 1)
    full, short = block(X).detach() @ READERS[0], spectrum.output(X)[:, 0]
    active = full > full.quantile(0.9)
    assert few["all"][0] == pytest.approx(float(pearson(full, short)))
    assert few["active"][0] == pytest.approx(float(pearson(full[active], short[active])))
    nothing = truncation_correlations(tensor, X, torch.zeros(1, 10), keep=1)
    assert nothing["all"] == 0 == nothing["active"]


def pearson(a: Tensor, b: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([a, b]))[0, 1]


def test_the_control_keeps_the_entries_and_loses_the_order(block):
    twin = shuffled(block, seed=0)
    for weight, mixed in zip(block.parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight.flatten().sort()[0], mixed.flatten().sort()[0])
        assert not torch.equal(weight, mixed)
    again = shuffled(block, seed=0)
    assert all(
        torch.equal(a, b) for a, b in zip(twin.parameters(), again.parameters(), strict=True)
    )


def test_refusals(make_block, block):
    with pytest.raises(InputError, match="layer 3 is gated: .*no quadratic form"):
        block_tensor(make_block(1, False, form="gated", act="silu"), name="layer 3")
    with pytest.raises(InputError, match="sigma = .* on the product: .*activation identity"):
        block_tensor(make_block(2, False, act="relu"))
    with pytest.raises(InputError, match="layer 0 is a Linear, not converted"):
        block_tensor(nn.Linear(3, 3), name="layer 0")
    tensor = block_tensor(block)
    with pytest.raises(InputError, match=r"direction of size \[9\]; the last must be 10"):
        find_spectrum(tensor, torch.ones(9))
    with pytest.raises(InputError, match="direction holds NaN"):
        find_spectrum(tensor, torch.full((10,), torch.nan))
    with pytest.raises(InputError, match=r"input of size \[4, 3\]"):
        tensor.output(torch.ones(4, 3))
    with pytest.raises(InputError, match="the 3 directions span 3 of 10 dimensions"):
        change_basis(tensor, READERS[:3])
    with pytest.raises(InputError, match="keep is 4; 2 eigenvectors are there"):
        find_spectrum(tensor, READERS, 2).output(X, 4)
    with pytest.raises(InputError, match=r"decoder row of size \[13, 9\]"):
        feature_basis(tensor, READERS[:, :9])


def test_damaged_weights_are_named(block):
    nn.init.constant_(block.up_proj.weight, torch.nan)
    assert isinstance(block, BilinearMLP)
    with pytest.raises(InputError, match="up_proj holds NaN"):
        block_tensor(block)
