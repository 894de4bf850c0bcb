"""The tokens file: token ids of prefix and document with their character offsets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ragkv.archive.parquet import plain_bytes, read_plain
from ragkv.errors import ArchiveCorruptError
from ragkv.model.prompt import PromptTokens

TOKENS_FILE = "tokens.parquet"
NO_OFFSET = -1
"""Character offset of prefix tokens, which are not part of the document."""

_SCHEMA = pa.schema([pa.field(name, pa.int32(), nullable=False) for name in ("token_id", "start", "end")])


@dataclass(frozen=True)
class TokenTable:
    """Prefix then document tokens: ``ids`` (n,) int64, ``start`` and ``end`` (n,) int64 character offsets."""

    ids: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor


def write_tokens(folder: Path, tokens: PromptTokens) -> None:
    n_prefix = len(tokens.prefix_ids)
    columns = (
        [*tokens.prefix_ids, *tokens.document_ids],
        [NO_OFFSET] * n_prefix + [start for start, _ in tokens.offsets],
        [NO_OFFSET] * n_prefix + [end for _, end in tokens.offsets],
    )
    raw = plain_bytes(_SCHEMA, [pa.array(column, pa.int32()) for column in columns])
    (folder / TOKENS_FILE).write_bytes(raw)


def read_tokens(raw: bytes, n_tokens: int) -> TokenTable:
    """The table in the bytes of a tokens file of `n_tokens` rows."""
    table = read_plain(TOKENS_FILE, raw, _SCHEMA)
    if table.num_rows != n_tokens:
        raise ArchiveCorruptError(f"{TOKENS_FILE}: {table.num_rows} tokens, the manifest says {n_tokens}")
    columns = (table.column(name).to_numpy().astype(np.int64) for name in _SCHEMA.names)
    tokens = TokenTable(*(torch.from_numpy(column) for column in columns))
    if bool((tokens.ids < 0).any()):
        raise ArchiveCorruptError(f"{TOKENS_FILE}: a token id is negative")
    return tokens
