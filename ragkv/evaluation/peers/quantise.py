"""Plain quantisation of a whole cache, for comparison only: asymmetric min/max, per token and head.

The document part is attended in full from its codes. Codes are residuals to nothing: this is what ragkv's own codecs
must beat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragkv.build.layer import Span
from ragkv.errors import ConfigError
from ragkv.model.attention import AttentionCall, dense_attention

_SCALE_BYTES = 4  # a scale and an offset in float16
_SMALLEST_SCALE = 2.0**-24  # of float16; also keeps a constant row from dividing by zero


@dataclass(frozen=True)
class Codes:
    """Quantised rows: ``codes`` (n_kv_heads, n_tokens, dim) uint8, ``scale`` and ``offset`` (..., 1) float16.

    Codes of 4 bits lie one to a byte here, and are counted two to a byte as a real implementation packs them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    bits: int

    @classmethod
    def of(cls, rows: torch.Tensor, bits: int) -> Codes:
        """Code `rows` (n_kv_heads, n_tokens, dim) against the scale and offset as they are stored.

        Raises
        ------
        ConfigError
            If a value is beyond float16.
        """
        levels, values = 2**bits - 1, rows.float()
        offset = values.amin(-1, keepdim=True).half()
        scale = ((values.amax(-1, keepdim=True) - offset.float()) / levels).clamp_min(_SMALLEST_SCALE).half()
        if not bool((offset.isfinite() & scale.isfinite()).all()):
            raise ConfigError(
                f"a key or value of magnitude {float(values.abs().max()):.3g} cannot be coded with float16 offsets; "
                "the largest allowed is 65504"
            )
        codes = ((values - offset.float()) / scale.float()).round_().clamp_(0, levels)
        return cls(codes.to(torch.uint8), scale, offset, bits)

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes, scales and offsets."""
        n_rows = self.codes.shape[0] * self.codes.shape[1]
        return n_rows * (-(-self.codes.shape[2] * self.bits // 8) + _SCALE_BYTES)

    def decode(self) -> torch.Tensor:
        """The rows again, (n_kv_heads, n_tokens, dim) float32."""
        return self.codes.float() * self.scale.float() + self.offset.float()


def attend_quantised(call: AttentionCall, keys: Codes, values: Codes, *, span: Span) -> torch.Tensor:
    """Dense attention with the document's keys and values taken from their codes, in float32 (batch of one)."""
    return dense_attention(
        AttentionCall(
            call.query,
            _replaced(call.key, keys, span),
            _replaced(call.value, values, span),
            mask=call.mask,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )
    )


def _replaced(dense: torch.Tensor, codes: Codes, span: Span) -> torch.Tensor:
    middle = codes.decode().unsqueeze(0)
    return torch.cat([dense[:, :, : span.head].float(), middle, dense[:, :, span.tail :].float()], dim=2)
