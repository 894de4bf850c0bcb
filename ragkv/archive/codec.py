"""Codes for keys and values: a transform per KV head, few bits for each of its coefficients, a scale per token.

Keys are coded as residuals to their centroid and values as residuals to the mean of their head. The residuals of a head
are written in the basis that decorrelates them (the Karhunen-Loeve transform), keys in the metric that queries see, so
that bits go where they change a logit: coefficients of large variance take 8 bits, smaller ones 4, 2 or none, and the
quotas are those of least distortion for the bytes a codec has (reverse water-filling over the widths that pack into
bytes; Huang and Schultheiss 1963, Cover and Thomas, chapter 10). Each token has a scale of its own, found by search.

The transform never has to be undone token by token: a logit is the product of the transformed query with the codes,
and the weighted sum of codes is transformed back once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

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
        """Bytes of one token: its scale code and its coefficients."""
        return 1 + self.eight + self.four // 2 + self.two // 4

    def per_coefficient(self, eight: float, four: float, two: float) -> torch.Tensor:
        """One value for each stored coefficient, by its width: (n_kept,) float32."""
        return torch.tensor([eight] * self.eight + [four] * self.four + [two] * self.two, dtype=torch.float32)


@dataclass(frozen=True)
class Basis:
    """The transform of one tensor of one layer.

    A residual is the product of its coefficients with ``rows`` (n_kv_heads, n_kept, dim), whose lengths hold the step
    of the quantiser; the numbers are exact in bfloat16, as they are stored, and held so when read back. ``mean``
    (n_kv_heads, dim) float32 is what residuals of values are taken from; zero for keys, whose centroid plays that part.
    """

    widths: Widths
    rows: torch.Tensor
    mean: torch.Tensor

    @property
    def byte_rows(self) -> torch.Tensor:
        """What `read_bytes` numbers are multiplied with instead of levels: (n_kv_heads, n_kept, dim) float32.

        A byte is lo + 16 hi, or c0 + 4 c1 + 16 c2 + 64 c3; its low bits are lo, or c0, c0 + 4 c1, ... So the levels
        are differences of numbers that take one operation each, and the differences are taken of the rows, once.
        """
        eight, four, two = self.rows.float().split([self.widths.eight, self.widths.four, self.widths.two], dim=1)
        low, high = four[:, 0::2], four[:, 1::2] / 16
        parts = [two[:, place::4] / 4**place for place in range(4)]
        steps = [here - after for here, after in pairwise(parts)]
        return torch.cat([eight, low - high, high, *steps, parts[-1]], dim=1)

    @cached_property
    def middles(self) -> torch.Tensor:
        """What takes a level to the middle of its interval, in steps: (n_kept,) float32."""
        return self.widths.per_coefficient(-127.5, -7.5, -1.5).to(self.rows.device)

    @cached_property
    def centres(self) -> torch.Tensor:
        """Half of the largest number that each of the `read_bytes` can be: (n_kept,) float32.

        Taken off, a residual is the plain product with `byte_rows`, and products do not lose digits to large numbers
        of one sign.
        """
        widths = self.widths
        halves = [127.5] * widths.eight + [7.5] * (widths.four // 2) + [127.5] * (widths.four // 2)
        halves += [half for half in (1.5, 7.5, 31.5, 127.5) for _ in range(widths.two // 4)]
        return torch.tensor(halves, dtype=torch.float32, device=self.rows.device)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """`byte_rows` as queries are multiplied with them: (n_kv_heads, dim, n_kept)."""
        return self.byte_rows.transpose(1, 2).contiguous()

    @cached_property
    def sum_rows(self) -> torch.Tensor:
        """`byte_rows` and then `mean`, what weighted sums are multiplied with: (n_kv_heads, n_kept + 1, dim)."""
        return torch.cat([self.byte_rows, self.mean.unsqueeze(1)], dim=1)

    @cached_property
    def scales(self) -> torch.Tensor:
        """The scale that each byte stands for: (256,) float32."""
        return scale_of(torch.arange(256, dtype=torch.uint8, device=self.rows.device))

    @property
    def resident_bytes(self) -> int:
        """Bytes held by a basis that is recalled with: its numbers, and `logit_rows` or `sum_rows` in float32."""
        return self.rows.nbytes + 4 * self.rows.numel() + 2 * self.mean.nbytes

    def to(self, device: torch.device) -> Basis:
        return Basis(widths=self.widths, rows=self.rows.to(device), mean=self.mean.to(device))


def fit_basis(residuals: torch.Tensor, bits: int, *, metric: torch.Tensor | None = None) -> Basis:
    """Choose transform and widths for `residuals` (n_kv_heads, n_tokens, dim), `bits` per number on average.

    `metric` (n_kv_heads, dim, dim), symmetric, is A where the error of a residual e counts as ``|A e|^2``; plain
    squared error without it.
    """
    n_heads, _, dim = residuals.shape
    variance, axes, weigh = principal_axes(residuals, metric)
    widths = allocate(variance, -(-dim * bits // 8))
    kept = axes[..., : widths.n_kept].transpose(1, 2)  # (n_kv_heads, n_kept, dim) in the metric's space
    deviation = variance[:, : widths.n_kept].sqrt()
    deviation = deviation.masked_fill(deviation < (_EMPTY * deviation[:, :1]).clamp_min(_LEAST), 0)
    length = deviation * widths.per_coefficient(_STEP[8], _STEP[4], _STEP[2]).double()
    rows = torch.linalg.solve(weigh, (kept * length.unsqueeze(-1)).transpose(1, 2)).transpose(1, 2)
    stored = rows.to(torch.bfloat16).float().to(residuals.device)
    return Basis(widths=widths, rows=stored, mean=torch.zeros(n_heads, dim, device=residuals.device))


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


def allocate(variance: torch.Tensor, n_bytes: int) -> Widths:
    """The widths of at most `n_bytes` bytes with least distortion, the same for all heads of a layer.

    `variance` (n_heads, dim) of the coefficients, descending. Every choice of counts in that order is looked at.
    """
    dim = variance.shape[1]
    summed = torch.cat([torch.zeros(1, dtype=torch.float64), variance.double().sum(0).cumsum(0)])
    best: tuple[float, Widths] | None = None
    for eight in range(min(dim, n_bytes) + 1):
        for four in range(0, min(dim - eight, 2 * (n_bytes - eight)) + 1, 2):
            room = min(dim - eight - four, 4 * (n_bytes - eight - four // 2))
            two = room - room % 4
            first, second, third = eight, eight + four, eight + four + two
            cost = (
                _DISTORTION[8] * summed[first]
                + _DISTORTION[4] * (summed[second] - summed[first])
                + _DISTORTION[2] * (summed[third] - summed[second])
                + (summed[dim] - summed[third])
            )
            if best is None or float(cost) < best[0]:
                best = (float(cost), Widths(eight, four, two))
    return best[1] if best is not None else Widths(0, 0, 0)


def encode(residuals: torch.Tensor, basis: Basis, *, metric: torch.Tensor | None = None) -> torch.Tensor:
    """Code `residuals` (n_kv_heads, n_tokens, dim): (n_kv_heads, n_tokens, n_bytes) uint8, the scale code first.

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


def read_bytes(raw: torch.Tensor, basis: Basis) -> tuple[torch.Tensor, torch.Tensor]:
    """Coded tokens (..., n_bytes) uint8 as numbers (..., n_kept) float32 and scales (...,).

    The residual is ``(numbers @ basis.byte_rows) * scale``.
    """
    widths = basis.widths
    scale, eight, nibbles, pairs = raw.split([1, widths.eight, widths.four // 2, widths.two // 4], dim=-1)
    numbers = torch.cat([eight, nibbles & 15, nibbles, pairs & 3, pairs & 15, pairs & 63, pairs], dim=-1)
    return numbers.float().sub_(basis.centres), basis.scales[scale[..., 0].long()]


def coefficients(raw: torch.Tensor, basis: Basis) -> tuple[torch.Tensor, torch.Tensor]:
    """Coded tokens (..., n_bytes) uint8 level by level: (..., n_kept) float32, in steps, and scales (...,)."""
    return unpack(raw[..., 1:], basis.widths).float() + basis.middles, basis.scales[raw[..., 0].long()]


def decode(raw: torch.Tensor, basis: Basis) -> torch.Tensor:
    """Residuals (n_kv_heads, n_tokens, dim) float32 of coded tokens (n_kv_heads, n_tokens, n_bytes) uint8."""
    numbers, scale = read_bytes(raw, basis)
    return (numbers @ basis.byte_rows) * scale.unsqueeze(-1)


def pack(levels: torch.Tensor, widths: Widths) -> torch.Tensor:
    """Levels (..., n_kept) uint8, each below 2 to its width, as bytes; lower places first."""
    eight, four, two = levels.split([widths.eight, widths.four, widths.two], dim=-1)
    four = four.unflatten(-1, (-1, 2)) if widths.four else four.unsqueeze(-1).expand(*four.shape, 2)
    two = two.unflatten(-1, (-1, 4)) if widths.two else two.unsqueeze(-1).expand(*two.shape, 4)
    nibbles = four[..., 0] | (four[..., 1] << 4)
    pairs = two[..., 0] | (two[..., 1] << 2) | (two[..., 2] << 4) | (two[..., 3] << 6)
    return torch.cat([eight, nibbles, pairs], dim=-1)


def unpack(packed: torch.Tensor, widths: Widths) -> torch.Tensor:
    """The levels (..., n_kept) uint8 of `pack`."""
    eight, nibbles, pairs = packed.split([widths.eight, widths.four // 2, widths.two // 4], dim=-1)
    four = torch.stack([nibbles & 15, nibbles >> 4], dim=-1).flatten(-2)
    two = torch.stack([pairs & 3, (pairs >> 2) & 3, (pairs >> 4) & 3, pairs >> 6], dim=-1).flatten(-2)
    return torch.cat([eight, four, two], dim=-1)


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
    scale = ((code.float() - _SCALE_BIAS) / SCALES_PER_OCTAVE).exp2()
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
