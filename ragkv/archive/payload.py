"""The bytes of an archived token: its key and then its value, each either in the model's dtype or coded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from ragkv.archive.codec import Basis, read_bytes


@dataclass(frozen=True)
class Numbers:
    """One tensor of some tokens, as attention multiplies it.

    ``numbers`` (..., n_tokens, n) float32; ``scale`` (..., n_tokens) is what those of a token are to be multiplied
    with, None where they are the tensor itself.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True)
class Payload:
    """How the rows of a layer are laid out; a basis of None means numbers of `dtype`, bit for bit."""

    dtype: torch.dtype
    key_dim: int
    value_dim: int
    key_basis: Basis | None
    value_basis: Basis | None

    @property
    def key_bytes(self) -> int:
        return self.key_basis.widths.n_bytes if self.key_basis else self.key_dim * self.dtype.itemsize

    @property
    def value_bytes(self) -> int:
        return self.value_basis.widths.n_bytes if self.value_basis else self.value_dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    def to(self, device: torch.device) -> Payload:
        """The same with the transforms on `device`."""
        bases = (self.key_basis, self.value_basis)
        key, value = (None if basis is None else basis.to(device) for basis in bases)
        return dataclasses.replace(self, key_basis=key, value_basis=value)

    def keys(self, rows: torch.Tensor) -> Numbers:
        """Keys of `rows` (..., row_bytes) uint8: themselves, or the coefficients of their residuals."""
        return _numbers(rows[..., : self.key_bytes], self.key_basis, self.dtype)

    def values(self, rows: torch.Tensor) -> Numbers:
        """Values of `rows` (..., row_bytes) uint8: themselves, or the coefficients of their residuals."""
        return _numbers(rows[..., self.key_bytes :], self.value_basis, self.dtype)


def _numbers(raw: torch.Tensor, basis: Basis | None, dtype: torch.dtype) -> Numbers:
    if basis is None:
        return Numbers(raw.contiguous().view(dtype).float(), None)
    return Numbers(*read_bytes(raw, basis))


def to_bits(tensor: torch.Tensor) -> torch.Tensor:
    """(..., dim) of any dtype as (..., dim * itemsize) uint8, bit for bit."""
    return tensor.detach().contiguous().view(torch.uint8)


def from_bits(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (..., dim) of `dtype` whose bits `raw` (..., dim * itemsize) uint8 holds."""
    return raw.contiguous().view(dtype)


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`numbers` in `dtype`; what lies beyond its range becomes its largest finite number, NaN stays.

    Stored centroids and decoded numbers are off by a share of a step, which near the end of float16 would be infinity.
    """
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)


def to_numpy(raw: torch.Tensor) -> np.ndarray:
    """(n_rows, n_bytes) uint8 on the host, C order."""
    return raw.detach().cpu().contiguous().numpy()
