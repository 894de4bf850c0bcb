"""The codes of keys and values: bytes that round-trip, widths of least distortion, errors within their bounds."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.archive.codec import Basis, Widths, allocate, decode, encode, fit_basis, pack, read_scaled, unpack
from ragkv.build.cluster import query_metric
from ragkv.recipe import CODEC_BITS, CODECS

COST = {8: 0.0001, 4: 0.01154, 2: 0.1188, 0: 1.0}
"""Squared error of a unit Gaussian under the best uniform quantiser of a width; nothing stored costs its variance."""
LEVELS = {8: 128, 4: 8, 2: 2}
QUICK = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1)

bits = st.sampled_from(sorted(CODEC_BITS.values()))
counts = st.builds(lambda a, b, c: Widths(a, 2 * b, 4 * c), st.integers(0, 9), st.integers(0, 5), st.integers(0, 4))


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(n_heads: int, n_tokens: int, dim: int, seed: int) -> torch.Tensor:
    """Numbers whose variances fall by four orders of magnitude along directions that are no axes."""
    mix = torch.linalg.qr(gaussian(n_heads, dim, dim, seed=seed + 1)).Q
    return gaussian(n_heads, n_tokens, dim, seed=seed) * torch.logspace(1, -1, dim) @ mix


def some_metric(n_heads: int, dim: int, seed: int) -> torch.Tensor:
    queries = correlated(n_heads, 50, dim, seed)
    return query_metric(queries.transpose(1, 2) @ queries / 50)


def squared_error(found: torch.Tensor, wanted: torch.Tensor, metric: torch.Tensor | None = None) -> torch.Tensor:
    """Squared error of each token, (n_heads, n_tokens) float64."""
    off = found.double() - wanted.double()
    return (off if metric is None else off @ metric.double()).square().sum(-1)


def coded_error(points: torch.Tensor, n_bits: int, metric: torch.Tensor | None = None) -> float:
    basis = fit_basis(points, n_bits, metric=metric)
    return float(squared_error(decode(encode(points, basis, metric=metric), basis), points, metric).mean())


# Names and bytes


def test_the_codecs_are_those_that_a_recipe_takes() -> None:
    assert {*CODEC_BITS, "lossless"} == set(CODECS)


@pytest.mark.parametrize("n_bits", CODEC_BITS.values())
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 128])
def test_a_token_takes_its_bits_per_number_and_one_byte_at_most(dim: int, n_bits: int) -> None:
    basis = fit_basis(gaussian(2, 300, dim, seed=0), n_bits)
    coded = encode(gaussian(2, 5, dim, seed=1), basis)
    assert coded.shape == (2, 5, 1 + basis.widths.n_bytes)
    assert coded.dtype == torch.uint8
    assert basis.widths.n_bytes <= -(-dim * n_bits // 8)


@QUICK
@given(widths=counts, seed=seeds)
def test_levels_of_any_widths_come_back_bit_for_bit(widths: Widths, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    limits = widths.per_coefficient(256, 16, 4)
    levels = (torch.rand(2, 3, widths.n_kept, generator=draw) * limits).to(torch.uint8)
    packed = pack(levels, widths)
    assert packed.shape == (2, 3, widths.n_bytes)
    assert torch.equal(unpack(packed, widths), levels)


@QUICK
@given(widths=counts, seed=seeds)
def test_bytes_of_any_widths_come_back_bit_for_bit(widths: Widths, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (4, widths.n_bytes), generator=draw, dtype=torch.uint8)
    assert torch.equal(pack(unpack(packed, widths), widths), packed)


def test_the_first_of_several_levels_takes_the_low_bits() -> None:
    packed = pack(torch.tensor([200, 3, 12, 1, 2, 3, 0], dtype=torch.uint8), Widths(1, 2, 4))
    assert packed.tolist() == [200, 3 + 12 * 16, 1 + 2 * 4 + 3 * 16 + 0 * 64]


def test_a_coded_token_by_hand() -> None:
    basis = Basis(widths=Widths(1, 2, 4), rows=torch.eye(7, dtype=torch.bfloat16).unsqueeze(0) * 10)
    raw = torch.tensor([[[136, 200, 195, 57], [120, 0, 0, 0], [0, 200, 195, 57]]], dtype=torch.uint8)
    numbers, scale = read_scaled(raw, basis)
    assert numbers[0, 0].tolist() == [72.5, -4.5, 4.5, -0.5, 0.5, 1.5, -1.5]
    assert scale.tolist() == [[2.0, 0.5, 0.0]]  # an eighth of an octave for each step from 128; 0 is zero
    assert decode(raw, basis)[0, 0].tolist() == [1450.0, -90.0, 90.0, -10.0, 10.0, 30.0, -30.0]
    assert decode(raw, basis)[0, 2].tolist() == [0.0] * 7


@QUICK
@given(seed=seeds, n_bits=bits)
def test_the_same_numbers_give_the_same_bytes(seed: int, n_bits: int) -> None:
    points, metric = correlated(2, 60, 16, seed), some_metric(2, 16, seed)
    first, second = (fit_basis(points.clone(), n_bits, metric=metric) for _ in range(2))
    assert first.widths == second.widths
    assert torch.equal(first.rows, second.rows)
    assert torch.equal(encode(points, first, metric=metric), encode(points.clone(), second, metric=metric))


@QUICK
@given(seed=seeds, n_bits=bits)
def test_a_transform_is_held_as_it_is_stored(seed: int, n_bits: int) -> None:
    assert fit_basis(correlated(2, 60, 16, seed), n_bits).rows.dtype == torch.bfloat16


# Widths


def falling(seed: int, n_heads: int, dim: int) -> torch.Tensor:
    exponents = gaussian(n_heads, dim, seed=seed) * 3
    return exponents.exp().sort(dim=1, descending=True).values


def cost_of(widths: tuple[int, ...], variance: torch.Tensor) -> float:
    summed = variance.double().sum(0).tolist()
    return sum(COST[width] * own for width, own in zip(widths, summed, strict=True))


def as_sequence(widths: Widths, dim: int) -> tuple[int, ...]:
    kept = (8,) * widths.eight + (4,) * widths.four + (2,) * widths.two
    return kept + (0,) * (dim - len(kept))


@QUICK
@given(seed=seeds, dim=st.integers(1, 10), n_bytes=st.integers(0, 11))
def test_no_other_falling_widths_of_as_many_bytes_lose_less(seed: int, dim: int, n_bytes: int) -> None:
    variance = falling(seed, 2, dim)
    chosen = allocate(variance, n_bytes)
    assert chosen.n_bytes <= n_bytes
    assert (chosen.four % 2, chosen.two % 4) == (0, 0)
    others = [
        widths
        for widths in combinations_with_replacement((8, 4, 2, 0), dim)
        if sum(widths) <= 8 * n_bytes and widths.count(4) % 2 == 0 and widths.count(2) % 4 == 0
    ]
    least = min(cost_of(widths, variance) for widths in others)
    assert cost_of(as_sequence(chosen, dim), variance) == pytest.approx(least, rel=1e-6)


@QUICK
@given(seed=seeds, dim=st.sampled_from([16, 32, 64]), width=st.sampled_from([2, 4, 8]))
def test_widths_lose_no_more_than_one_width_for_all(seed: int, dim: int, width: int) -> None:
    variance = falling(seed, 3, dim)
    chosen = allocate(variance, dim * width // 8)
    assert chosen.n_bytes <= dim * width // 8
    assert cost_of(as_sequence(chosen, dim), variance) <= cost_of((width,) * dim, variance) * (1 + 1e-6)


def test_equal_variances_and_room_for_all_give_one_width() -> None:
    assert allocate(torch.ones(1, 16), 16) == Widths(16, 0, 0)
    assert allocate(torch.ones(1, 16), 8) == Widths(0, 16, 0)
    assert allocate(torch.ones(1, 16), 4) == Widths(0, 0, 16)
    assert allocate(torch.ones(1, 16), 0) == Widths(0, 0, 0)


# Errors


def unclipped(wanted: torch.Tensor, widths: Widths) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients (..., n_kept) under the smallest scale of the grid that clips none of them, and that scale."""
    half = torch.tensor([LEVELS[8]] * widths.eight + [LEVELS[4]] * widths.four + [LEVELS[2]] * widths.two)
    exponent = ((wanted.abs() / half).amax(-1, keepdim=True).log2() * 8).ceil()
    scale = 2 ** (exponent.clamp(-127, 127) / 8)
    levels = (wanted / scale).floor().minimum(half - 1).maximum(-half)
    return (levels + 0.5) * scale, scale


def analysed(points: torch.Tensor, basis: Basis, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients of least squares in the metric, (n_heads, n_tokens, n_kept), and the weight of each, in float64."""
    seen = basis.rows.double() @ metric.double()
    back = torch.from_numpy(np.linalg.pinv(seen.numpy()))
    return points.double() @ metric.double() @ back, seen.square().sum(-1).unsqueeze(1)


@QUICK
@given(seed=seeds, plain=st.booleans())
def test_at_eight_bits_no_token_is_off_by_more_than_half_a_step_of_its_scale(seed: int, plain: bool) -> None:
    points = correlated(2, 80, 16, seed)
    metric = torch.eye(16).expand(2, -1, -1) if plain else some_metric(2, 16, seed)
    basis = fit_basis(points, 8, metric=metric)
    assert basis.widths == Widths(16, 0, 0)
    wanted, weight = analysed(points, basis, metric)
    _, scale = unclipped(wanted, basis.widths)
    bound = (scale[..., 0] / 2).square() * weight.sum(-1)
    error = squared_error(decode(encode(points, basis, metric=metric), basis), points, metric)
    assert bool((error <= bound * 1.02).all())  # the rows are at right angles but for their rounding to bfloat16


@QUICK
@given(seed=seeds, n_bits=bits, heavy=st.booleans())
def test_no_token_loses_more_than_under_the_scale_that_clips_nothing(seed: int, n_bits: int, heavy: bool) -> None:
    points, metric = correlated(2, 80, 16, seed), some_metric(2, 16, seed)
    points = points**3 if heavy else points
    basis = fit_basis(points, n_bits, metric=metric)
    wanted, weight = analysed(points, basis, metric)
    numbers, scale = read_scaled(encode(points, basis, metric=metric), basis)
    found = numbers.double() * scale.double().unsqueeze(-1)
    error = ((found - wanted).square() * weight).sum(-1)
    least = ((unclipped(wanted, basis.widths)[0] - wanted).square() * weight).sum(-1)
    assert bool((error <= least * 1.001 + 1e-9 * wanted.square().mul(weight).sum(-1)).all())


@QUICK
@given(seed=seeds, n_bits=bits)
def test_coding_what_was_decoded_moves_no_token_by_more_than_half_a_step(seed: int, n_bits: int) -> None:
    points = correlated(2, 80, 16, seed)
    basis = fit_basis(points, n_bits)
    once = encode(points, basis)
    numbers, scale = read_scaled(once, basis)
    again, other = read_scaled(encode(decode(once, basis), basis), basis)
    weight = basis.rows.double().square().sum(-1).unsqueeze(1)
    moved = (again * other.unsqueeze(-1) - numbers * scale.unsqueeze(-1)).double().square().mul(weight).sum(-1)
    assert bool((moved <= (scale.double() / 2).square() * weight.sum(-1) * 1.001).all())


@QUICK
@given(seed=seeds, n_bits=bits)
def test_a_zero_residual_stays_exactly_zero(seed: int, n_bits: int) -> None:
    points = correlated(2, 40, 16, seed)
    points[:, ::3] = 0
    basis = fit_basis(points, n_bits)
    coded = encode(points, basis)
    assert not coded[:, ::3, 0].any()
    assert not decode(coded, basis)[:, ::3].any()
    assert bool(coded[:, 1::3, 0].all())


@pytest.mark.parametrize("n_bits", CODEC_BITS.values())
def test_residuals_that_are_all_zero_stay_zero(n_bits: int) -> None:
    points = torch.zeros(2, 5, 16)
    basis = fit_basis(points, n_bits)
    assert torch.isfinite(basis.rows).all()
    assert not decode(encode(points, basis), basis).any()


@pytest.mark.parametrize("n_bits", CODEC_BITS.values())
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e5])
def test_the_error_follows_the_size_of_the_numbers(size: float, n_bits: int) -> None:
    points = correlated(2, 200, 16, seed=3)
    assert coded_error(points * size, n_bits) == pytest.approx(size**2 * coded_error(points, n_bits), rel=0.02)


@pytest.mark.parametrize("n_bits", CODEC_BITS.values())
def test_an_outlier_survives_and_spoils_no_other_token(n_bits: int) -> None:
    usual = gaussian(1, 4000, 16, seed=0)
    basis = fit_basis(usual, n_bits)
    points = torch.cat([usual, torch.full((1, 1, 16), 1e5 / 4)], dim=1)  # 1e5 long
    found = decode(encode(points, basis), basis)
    assert torch.isfinite(found).all()
    relative = (squared_error(found, points) / points.double().square().sum(-1)).sqrt()
    assert float(relative[0, -1]) < {8: 0.01, 4: 0.15, 3: 0.45, 2.5: 0.5, 2: 0.6}[n_bits]
    assert torch.equal(found[:, :-1], decode(encode(usual, basis), basis))


@pytest.mark.parametrize("n_bits", CODEC_BITS.values())
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-20, 1e-38])
def test_a_token_far_smaller_than_others_stays_small(size: float, n_bits: int) -> None:
    usual = gaussian(1, 4000, 16, seed=0)
    basis = fit_basis(usual, n_bits)
    found = decode(encode(usual[:, :50] * size, basis), basis)
    assert float(found.norm(dim=-1).max()) < 8 * max(size, 2**-15.875)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("n_bits", [8, 4, 3])
@pytest.mark.parametrize("n_tokens", [1, 2, 5])
def test_fewer_tokens_than_dimensions_lose_nearly_nothing(n_tokens: int, n_bits: int) -> None:
    """Their residuals have no part in most directions, which must not count."""
    points, metric = gaussian(2, n_tokens, 16, seed=4), some_metric(2, 16, 4)
    for each in (None, metric):
        size = squared_error(points, torch.zeros_like(points), each).mean()
        assert coded_error(points, n_bits, each) < 1e-3 * float(size)


def test_a_head_of_few_directions_beside_one_of_many_loses_little() -> None:
    points = gaussian(2, 300, 16, seed=4)
    points[1, :, 3:] = 0
    basis = fit_basis(points, 4)
    error = squared_error(decode(encode(points, basis), basis), points).mean(1)
    assert bool((error < 0.02 * points.square().sum(-1).mean(1)).all())


def test_eight_bits_lose_a_ten_thousandth() -> None:
    points = correlated(2, 500, 32, seed=5)
    assert coded_error(points, 8) < 1e-4 * float(points.square().sum(-1).mean())


@pytest.mark.parametrize("draw", [gaussian, correlated])
@pytest.mark.parametrize("with_metric", [False, True])
def test_more_bits_lose_less(draw: object, with_metric: bool) -> None:
    points = draw(2, 500, 32, seed=5)
    metric = some_metric(2, 32, 6) if with_metric else None
    errors = [coded_error(points, n_bits, metric) for n_bits in (8, 4, 3, 2)]
    assert errors == sorted(errors)
    assert errors[0] * 10 < errors[1]
    assert errors[1] * 1.5 < errors[2]


def min_max_error(points: torch.Tensor, n_bits: int) -> float:
    """A scale and an offset for each token, both exact and not counted."""
    low, high = points.amin(-1, keepdim=True), points.amax(-1, keepdim=True)
    step = (high - low) / (2**n_bits - 1)
    return float(squared_error(((points - low) / step).round() * step + low, points).mean())


@pytest.mark.parametrize("n_bits", [2, 3, 4])
def test_the_transform_loses_less_than_minimum_and_maximum_of_a_token(n_bits: int) -> None:
    points = correlated(2, 800, 32, seed=7)
    assert coded_error(points, n_bits) * 2 < min_max_error(points, n_bits)


@pytest.mark.parametrize("n_bits", [2, 3, 4])
def test_the_metric_moves_the_error_to_where_it_is_not_seen(n_bits: int) -> None:
    points, metric = correlated(2, 500, 32, seed=8), some_metric(2, 32, 9)
    plain = fit_basis(points, n_bits)
    blind = float(squared_error(decode(encode(points, plain), plain), points, metric).mean())
    assert coded_error(points, n_bits, metric) < 0.9 * blind
