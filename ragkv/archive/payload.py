"""The bytes of an archived token: its key and then its value, each either in the model's dtype or coded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragkv.archive.codec import Basis, decode
from ragkv.model.shape import LARGEST_NUMBER


@dataclass(frozen=True)
class Payload:
    """How the rows of a layer are laid out; a basis of None means numbers of `dtype`, bit for bit.

    Coded keys are residuals to the centroid of their cluster, coded values to its mean value.
    """

    dtype: torch.dtype
    key_dim: int
    value_dim: int
    key_basis: Basis | None
    value_basis: Basis | None

    @property
    def key_bytes(self) -> int:
        return 1 + self.key_basis.widths.n_bytes if self.key_basis else self.key_dim * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        return 1 + self.value_basis.widths.n_bytes if self.value_basis else self.value_dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    def key_part(self, rows: torch.Tensor) -> torch.Tensor:
        """The bytes of the keys in `rows` (..., row_bytes) uint8."""
        return rows[..., : self.key_bytes]

    def value_part(self, rows: torch.Tensor) -> torch.Tensor:
        """The bytes of the values in `rows` (..., row_bytes) uint8."""
        return rows[..., self.key_bytes :]

    @property
    def has_numbers(self) -> bool:
        """Whether rows hold numbers as they are, which may be NaN; every code stands for a finite one."""
        return self.key_basis is None or self.value_basis is None

    def fits(self, rows: torch.Tensor) -> bool:
        """Whether every number in `rows` (n, row_bytes) uint8 that is not coded is one that archives take."""
        keys = self.key_basis is not None or fits(from_bits(self.key_part(rows), self.dtype))
        return keys and (self.value_basis is not None or fits(from_bits(self.value_part(rows), self.dtype)))

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys, or residuals of keys, of `rows` (n_kv_heads, n_tokens, row_bytes) uint8, float32."""
        return _tensor(self.key_part(rows), self.key_basis, self.dtype)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Values, or residuals of values, of `rows` (n_kv_heads, n_tokens, row_bytes) uint8, float32."""
        return _tensor(self.value_part(rows), self.value_basis, self.dtype)


def _tensor(raw: torch.Tensor, basis: Basis | None, dtype: torch.dtype) -> torch.Tensor:
    return from_bits(raw, dtype).float() if basis is None else decode(raw, basis)


def to_bits(tensor: torch.Tensor) -> torch.Tensor:
    """(..., dim) of any dtype as (..., dim * itemsize) uint8, bit for bit."""
    return tensor.detach().contiguous().view(torch.uint8)


def from_bits(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (..., dim) of `dtype` whose bits `raw` (..., dim * itemsize) uint8 holds."""
    raw = raw.contiguous()
    # A part of a single row counts as contiguous where it stands, which need not be where a number may begin.
    if any(step % dtype.itemsize for step in (raw.storage_offset(), *raw.stride()[:-1])):
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(dtype)


def fits(numbers: torch.Tensor) -> bool:
    """Whether no number is NaN, infinite, or beyond what archives take and rounding may add to it."""
    return bool((numbers.abs() <= 2 * LARGEST_NUMBER).all())


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`numbers` in `dtype`; what lies beyond its range becomes its largest finite number, NaN stays.

    Decoded numbers are off by a share of a step, which near the end of float16 would be infinity.
    """
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)


_SCALE_BYTES = 4


def exact_bytes(dim: int, codec: str, dtype: torch.dtype) -> int:
    """Bytes of one exact token's key or value of `dim` numbers."""
    return dim * dtype.itemsize if codec == "lossless" else _SCALE_BYTES + dim


def encode_exact(tensor: torch.Tensor, codec: str) -> torch.Tensor:
    """Exact tokens (..., dim) as bytes: their bits, or a float32 scale and a signed byte for each number."""
    if codec == "lossless":
        return to_bits(tensor)
    numbers = tensor.float()
    scale = numbers.abs().amax(-1, keepdim=True) / 127
    levels = (numbers / scale.masked_fill(scale == 0, 1)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([to_bits(scale), levels.view(torch.uint8)], dim=-1)


def decode_exact(raw: torch.Tensor, codec: str, dtype: torch.dtype) -> torch.Tensor:
    """Exact tokens (..., dim) of `dtype` from bytes of `encode_exact`."""
    if codec == "lossless":
        return from_bits(raw, dtype)
    scale = from_bits(raw[..., :_SCALE_BYTES], torch.float32)
    scale = scale.masked_fill(scale.isinf(), torch.nan)  # which rounding would take for a very large number
    return rounded(raw[..., _SCALE_BYTES:].contiguous().view(torch.int8).float() * scale, dtype)
