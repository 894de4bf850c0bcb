"""Codes for keys, values and prototypes: a transform per KV head, and few bits for each of its coefficients.

Centroids are coded relative to the mean key of their head, mean values relative to its mean value, and the keys and
values of tokens relative to the coded prototype of their cluster. Each of these four is written in the basis that
decorrelates it (the Karhunen-Loeve transform), keys in the metric that queries see, so that bits go where they change a
logit: coefficients of large variance take 8 bits, smaller ones 4, 2 or none, and the quotas are those of least
distortion for the bytes there are (reverse water-filling over the widths that pack into bytes; Huang and Schultheiss
1963, Cover and Thomas, chapter 10). Each token has a scale of its own, found by search; prototypes have none.

The transform never has to be undone number by number: a logit is the product of the transformed query with the codes,
and a weighted sum of codes is transformed back once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

SCALES_PER_OCTAVE = 8
ZERO_SCALE = 0
"""Scale code of a token whose residual is stored as exactly zero."""

_SCALE_BIAS = 128
_SCALE_STEPS = (-4, -1, 2, 5, 8)  # around the token's own root mean square, in steps of an eighth of an octave

# Directions of a smaller share of the largest deviation are left out. Few tokens span few directions, and rounding the
# others to bfloat16 reaches into the rest: there it would count in steps without end.
_EMPTY = 1e-3
_LEAST = 1e-30  # so are those that float32 cannot be divided by

# Step of the uniform quantiser with least squared error for a Gaussian of unit variance, and that error (Max 1960; the
# figures of 8 bits leave room for outliers of four standard deviations).
_STEP = {8: 0.0308, 4: 0.3352, 2: 0.9957}
_DISTORTION = {8: 0.0001, 4: 0.01154, 2: 0.1188}


@dataclass(frozen=True)
class Widths:
    """How many coefficients, in order of falling variance, take 8, 4 and 2 bits; the rest is not stored.

    ``four`` is even and ``two`` a multiple of four, so that each run fills whole bytes.
    """

    eight: int
    four: int
    two: int

    @property
    def n_kept(self) -> int:
        return self.eight + self.four + self.two

    @property
    def n_bytes(self) -> int:
        """Bytes of the coefficients of one vector."""
        return self.eight + self.four // 2 + self.two // 4

    def per_coefficient(self, eight: float, four: float, two: float) -> torch.Tensor:
        """One value for each stored coefficient, by its width: (n_kept,) float32."""
        return torch.tensor([eight] * self.eight + [four] * self.four + [two] * self.two, dtype=torch.float32)


@dataclass(frozen=True)
class Basis:
    """The transform of one kind of vectors in one layer.

    A vector is the product of its coefficients with ``rows`` (n_kv_heads, n_kept, dim) bfloat16, whose lengths hold the
    step of the quantiser.
    """

    widths: Widths
    rows: torch.Tensor

    @cached_property
    def middles(self) -> torch.Tensor:
        """What takes a level to the middle of its interval, in steps: (n_kept,) float32."""
        return self.widths.per_coefficient(-127.5, -7.5, -1.5).to(self.rows.device)

    def levels(self, packed: torch.Tensor) -> torch.Tensor:
        """Levels (..., n_kept) float32 of bytes (..., n_bytes) uint8; with `middles` added they are coefficients."""
        return unpack(packed, self.widths).float()

    def numbers(self, packed: torch.Tensor) -> torch.Tensor:
        """Coefficients (..., n_kept) float32, in steps, of bytes (..., n_bytes) uint8."""
        return self.levels(packed).add_(self.middles)

    def along(self, vectors: torch.Tensor) -> torch.Tensor:
        """Products of `vectors` (n_kv_heads, n, dim) float32 with the rows: (n_kv_heads, n, n_kept)."""
        return torch.bmm(vectors, self.rows.float().transpose(1, 2))

    def restored(self, numbers: torch.Tensor) -> torch.Tensor:
        """Vectors (n_kv_heads, n, dim) float32 of coefficients (n_kv_heads, n, n_kept) float32."""
        return torch.bmm(numbers, self.rows.float())

    def to(self, device: torch.device) -> Basis:
        return Basis(widths=self.widths, rows=self.rows.to(device))


def fit_basis(vectors: torch.Tensor, bits: float, *, metric: torch.Tensor | None = None, pairs: bool = True) -> Basis:
    """Choose transform and widths for `vectors` (n_kv_heads, n, dim), `bits` per number on average.

    `metric` (n_kv_heads, dim, dim), symmetric, is A where the error of a vector e counts as ``|A e|^2``; plain squared
    error without it. Without `pairs` no coefficient takes two bits.
    """
    variance, axes, weigh = principal_axes(vectors, metric)
    dim = vectors.shape[2]
    widths = allocate(variance, math.ceil(dim * bits / 8), pairs=pairs)
    kept = axes[..., : widths.n_kept].transpose(1, 2)  # (n_kv_heads, n_kept, dim) in the metric's space
    deviation = variance[:, : widths.n_kept].sqrt()
    deviation = deviation.masked_fill(deviation < (_EMPTY * deviation[:, :1]).clamp_min(_LEAST), 0)
    length = deviation * widths.per_coefficient(_STEP[8], _STEP[4], _STEP[2]).double()
    rows = torch.linalg.solve(weigh, (kept * length.unsqueeze(-1)).transpose(1, 2)).transpose(1, 2)
    return Basis(widths=widths, rows=rows.to(torch.bfloat16).to(vectors.device))


def principal_axes(
    residuals: torch.Tensor, metric: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Variances, descending, and unit directions of `residuals` (n_kv_heads, n_tokens, dim) in the space of a metric.

    Returns (n_kv_heads, dim), (n_kv_heads, dim, dim) with a direction in each column, and the metric itself; float64 on
    the host.
    """
    n_heads, n_tokens, dim = residuals.shape
    points = residuals.double()
    weigh = torch.eye(dim, dtype=torch.float64).expand(n_heads, -1, -1) if metric is None else metric.double().cpu()
    covariance = (points.transpose(1, 2) @ points / max(1, n_tokens)).cpu()
    variance, directions = torch.linalg.eigh(weigh @ covariance @ weigh)  # ascending
    return variance.flip(1).clamp_min(0), directions.flip(2), weigh


def allocate(variance: torch.Tensor, n_bytes: int, *, pairs: bool = True) -> Widths:
    """The widths of at most `n_bytes` bytes with least distortion, the same for all heads of a layer.

    `variance` (n_heads, dim) of the coefficients, descending. Every choice of counts in that order is looked at;
    without `pairs` those with no coefficient of two bits, which then take all of the bytes (at most one a number).
    """
    dim = variance.shape[1]
    summed = torch.cat([torch.zeros(1, dtype=torch.float64), variance.double().sum(0).cumsum(0)]).tolist()
    best: tuple[float, Widths] | None = None
    for eight in range(min(dim, n_bytes) + 1):
        for four in range(0, min(dim - eight, 2 * (n_bytes - eight)) + 1, 2):
            room = min(dim - eight - four, 4 * (n_bytes - eight - four // 2)) if pairs else 0
            widths = Widths(eight, four, room - room % 4)
            cost = _distortion(summed, widths)
            fills = not pairs and best is not None and cost == best[0]  # of equal ones, what takes all the bytes
            if best is None or cost < best[0] or fills:
                best = (cost, widths)
    return best[1] if best is not None else Widths(0, 0, 0)


def expected_distortion(variance: torch.Tensor, widths: Widths) -> float:
    """Squared error, summed over heads, that `widths` leave of coefficients of falling `variance` (n_heads, dim)."""
    summed = torch.cat([torch.zeros(1, dtype=torch.float64), variance.double().sum(0).cumsum(0)]).tolist()
    return _distortion(summed, widths)


def _distortion(summed: list[float], widths: Widths) -> float:
    first, second, third = widths.eight, widths.eight + widths.four, widths.n_kept
    return (
        _DISTORTION[8] * summed[first]
        + _DISTORTION[4] * (summed[second] - summed[first])
        + _DISTORTION[2] * (summed[third] - summed[second])
        + (summed[-1] - summed[third])
    )


def encode_plain(vectors: torch.Tensor, basis: Basis, *, metric: torch.Tensor | None = None) -> torch.Tensor:
    """Code `vectors` (n_kv_heads, n, dim) without a scale: (n_kv_heads, n, n_bytes) uint8."""
    inverse, _ = _analysis(basis, metric)
    wanted = vectors.float() @ inverse
    half = basis.widths.per_coefficient(128, 8, 2).to(wanted.device)
    levels = torch.maximum(torch.minimum(wanted.floor(), half - 1), -half)
    return pack((levels + half).to(torch.uint8), basis.widths)


def encode(residuals: torch.Tensor, basis: Basis, *, metric: torch.Tensor | None = None) -> torch.Tensor:
    """Code `residuals` (n_kv_heads, n_tokens, dim): (n_kv_heads, n_tokens, 1 + n_bytes) uint8, the scale code first.

    Of several scales the one with least squared error in the metric is taken, among them the smallest that clips
    nothing; the coefficients of residual e are those that bring ``|A (e - c rows)|`` to its least.
    """
    widths = basis.widths
    inverse, weight = _analysis(basis, metric)
    wanted = residuals.float() @ inverse  # (n_kv_heads, n_tokens, n_kept), in steps of the quantiser
    half = widths.per_coefficient(128, 8, 2).to(wanted.device)
    step = widths.per_coefficient(_STEP[8], _STEP[4], _STEP[2]).to(wanted.device)
    filled = widths.n_kept / (weight > 0).sum(-1, keepdim=True).clamp_min(1)  # 1 unless directions are left out
    size = (wanted * step).square().mean(-1, keepdim=True).mul(filled).sqrt()
    tiny = torch.finfo(torch.float32).tiny
    middle = (size.clamp_min(tiny).log2() * SCALES_PER_OCTAVE).round()
    unclipped = (wanted.abs() / half).amax(-1, keepdim=True).clamp_min(tiny).log2() * SCALES_PER_OCTAVE
    chosen = unclipped.ceil()
    codes, least = _quantise(wanted, chosen, half, weight)
    for offset in _SCALE_STEPS:
        tried, error = _quantise(wanted, middle + offset, half, weight)
        better = error < least
        codes, least = torch.where(better, tried, codes), torch.where(better, error, least)
        chosen = torch.where(better, middle + offset, chosen)
    scale = _scale_code(chosen).masked_fill_(size == 0, ZERO_SCALE)
    return torch.cat([scale, pack((codes + half).to(torch.uint8), widths)], dim=-1)


def read_scaled(raw: torch.Tensor, basis: Basis) -> tuple[torch.Tensor, torch.Tensor]:
    """Coded tokens (..., 1 + n_bytes) uint8 as coefficients (..., n_kept) float32, in steps, and scales (...,)."""
    return basis.numbers(raw[..., 1:]), scale_of(raw[..., 0])


def decode(raw: torch.Tensor, basis: Basis) -> torch.Tensor:
    """Residuals (n_kv_heads, n_tokens, dim) float32 of coded tokens (n_kv_heads, n_tokens, 1 + n_bytes) uint8."""
    numbers, scale = read_scaled(raw, basis)
    return basis.restored(numbers) * scale.unsqueeze(-1)


def pack(levels: torch.Tensor, widths: Widths) -> torch.Tensor:
    """Levels (..., n_kept) uint8, each below 2 to its width, as bytes.

    A byte holds levels that lie half (four bits) or quarters (two bits) of their run apart, the first in its low bits:
    so that whole runs come out of whole bytes.
    """
    eight, four, two = levels.split([widths.eight, widths.four, widths.two], dim=-1)
    low, high = four.tensor_split(2, dim=-1)
    a, b, c, d = two.tensor_split(4, dim=-1)
    return torch.cat([eight, low | (high << 4), a | (b << 2) | (c << 4) | (d << 6)], dim=-1)


def unpack(packed: torch.Tensor, widths: Widths) -> torch.Tensor:
    """The levels (..., n_kept) uint8 of `pack`."""
    if not widths.eight and not widths.two:
        return torch.cat([packed & 15, packed >> 4], dim=-1)
    eight, nibbles, pairs = packed.split([widths.eight, widths.four // 2, widths.two // 4], dim=-1)
    runs = [eight, nibbles & 15, nibbles >> 4]
    if widths.two:
        runs += [pairs & 3, (pairs >> 2) & 3, (pairs >> 4) & 3, pairs >> 6]
    return torch.cat(runs, dim=-1)


def scale_code(scale: torch.Tensor) -> torch.Tensor:
    """The byte that comes nearest to a scale of at least 0."""
    tiny = torch.finfo(torch.float32).tiny
    code = _scale_code((scale.clamp_min(tiny).log2() * SCALES_PER_OCTAVE).round())
    return code.masked_fill_(scale == 0, ZERO_SCALE)


def _scale_code(exponent: torch.Tensor) -> torch.Tensor:
    """The byte of a scale of 2 to the `exponent` eighths."""
    return (exponent + _SCALE_BIAS).clamp(ZERO_SCALE + 1, 255).to(torch.uint8)


def scale_of(code: torch.Tensor) -> torch.Tensor:
    """The scale, float32, that a byte stands for."""
    scale = code.float().sub_(_SCALE_BIAS).div_(SCALES_PER_OCTAVE).exp2_()
    return scale.masked_fill_(code == ZERO_SCALE, 0)


def _quantise(
    wanted: torch.Tensor, exponent: torch.Tensor, half: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels of `wanted` (n_kv_heads, n_tokens, n_kept) under one scale per token, and their weighted squared error."""
    scale = scale_of(_scale_code(exponent))
    levels = torch.maximum(torch.minimum((wanted / scale).floor(), half - 1), -half)
    return levels, ((levels + 0.5) * scale - wanted).square().mul_(weight).sum(-1, keepdim=True)


def _analysis(basis: Basis, metric: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What takes a residual to its coefficients (n_kv_heads, dim, n_kept), and what an error of each weighs."""
    rows = basis.rows.double()
    seen = rows if metric is None else rows @ metric.double()
    inverse = torch.linalg.pinv(seen) if metric is None else metric.double() @ torch.linalg.pinv(seen)
    return inverse.float(), seen.square().sum(-1).float().unsqueeze(1)
