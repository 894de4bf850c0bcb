"""A text that is prefilled for one request and composed with archives: for documents that have no archive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ragkv.archive.tokens import NO_OFFSET, TokenTable
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import CapturedLayer, captured_layers, prefill_cache
from ragkv.model.prompt import PromptLayout, tokenize_prompt
from ragkv.model.shape import model_shape
from ragkv.recall.layers import ArchivedLayer
from ragkv.recipe import RecallPolicy


@dataclass(frozen=True)
class PrefilledDocument:
    """A document whose keys and values are all held, in the model's dtype; stands in a `Composition` like an archive.

    ``disk_bytes`` is 0, and nothing is recalled: every token is attended exactly.
    """

    model: LoadedModel
    layout: PromptLayout
    name: str
    text: str
    tokens: TokenTable
    prefix_tokens: int
    layers: tuple[ArchivedLayer, ...]
    policy: RecallPolicy = field(default_factory=RecallPolicy)
    disk_bytes: int = 0

    @property
    def n_tokens(self) -> int:
        """Prefix and document tokens."""
        return len(self.tokens.ids)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Character offsets into `text` of each document token."""
        start, end = (column[self.prefix_tokens :].tolist() for column in (self.tokens.start, self.tokens.end))
        return list(zip(start, end, strict=True))

    def whole_layer(self, index: int) -> ArchivedLayer:
        """The layer itself: nothing of it is archived."""
        return self.layers[index]

    def require_unchanged(self) -> None:
        """Nothing on disk is behind it."""

    def positions(self, index: int) -> torch.Tensor:
        """Positions of archived rows: there are none, (n_kv_heads, 0) int64."""
        return torch.empty(len(self.layers[index].keys), 0, dtype=torch.int64)


def prefill_document(
    model: LoadedModel,
    text: str,
    *,
    layout: PromptLayout | None = None,
    name: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> PrefilledDocument:
    """Prefill prefix and document with the model's own attention; `on_progress` receives (tokens done, tokens in all).

    Raises
    ------
    ConfigError
        If the document is empty or longer than the model's context.
    NonFiniteError
        If the model computed a NaN or infinite key or value.
    """
    layout = layout or model.layout
    prompt = tokenize_prompt(model.tokenizer, layout, text)
    ids = (*prompt.prefix_ids, *prompt.document_ids)
    shape = model_shape(model.model.config)
    captured = captured_layers(prefill_cache(model.model, ids, on_progress=on_progress))
    before = [(NO_OFFSET, NO_OFFSET)] * len(prompt.prefix_ids)
    start, end = torch.tensor([*before, *prompt.offsets], dtype=torch.int64).unbind(1)
    return PrefilledDocument(
        model=model,
        layout=layout,
        name=name,
        text=text,
        tokens=TokenTable(torch.tensor(ids, dtype=torch.int64), start, end),
        prefix_tokens=len(prompt.prefix_ids),
        layers=tuple(
            held_layer(layer.index, cached, window=layer.window)
            for layer, cached in zip(shape.layers, captured, strict=True)
        ),
    )


def held_layer(index: int, layer: CapturedLayer, *, window: int | None) -> ArchivedLayer:
    """A captured layer whose every token is attended exactly."""
    first = layer.first_position
    return ArchivedLayer(
        index=index,
        window=window,
        keys=layer.keys,
        values=layer.values,
        exact_positions=torch.arange(first, first + layer.keys.shape[1], device=layer.keys.device),
        clusters=None,
    )
