"""Repairs of a composition that run the model: the first tokens of each document computed again.

A document that was prefilled alone begins with tokens that took the part of attention sinks and saw nothing before
them. Computing its first few tokens again, with the documents before it in sight, mends the seam for little
(EPIC, arXiv 2410.15332). It depends on the documents and their order, not on the question.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ragkv.errors import ConfigError
from ragkv.model.prefill import layer_tensors
from ragkv.recall.cache import ArchiveCache
from ragkv.recall.composition import CONSECUTIVE, Composition, Document, Recomputed
from ragkv.recall.layers import ArchivedLayer
from ragkv.recipe import check_whole


@torch.no_grad()
def recompute(
    composition: Composition, count: int, *, on_progress: Callable[[int, int], None] | None = None
) -> Composition:
    """The same documents with the first `count` tokens of all but the first computed again.

    Costs a prefill of `count` tokens per document; `on_progress` receives (documents done, documents in all).

    Raises
    ------
    ConfigError
        If the documents do not stand one after another, or an archive does not hold its first `count` tokens exactly
        (its recipe's ``sink_tokens`` says how many it does, prefix included).
    """
    check_whole("recompute", count, 1)
    if composition.positions != CONSECUTIVE:
        raise ConfigError("recompute needs documents that stand one after another; leave positions at 'consecutive'")
    documents = composition.documents
    for document in documents[1:]:
        _check_exact(document, count)
    pieces: list[list[ArchivedLayer]] = [[] for _ in composition.shape.layers]
    repaired = Composition(documents[:1], weighting=composition.weighting)
    for done, document in enumerate(documents[1:], start=1):
        for own, layer in zip(pieces, _first_tokens(repaired, document, count), strict=True):
            own.append(layer)
        recomputed = Recomputed(count, tuple(_joined(own) for own in pieces))
        repaired = Composition(documents[: done + 1], weighting=composition.weighting, recomputed=recomputed)
        if on_progress is not None:
            on_progress(done, len(documents) - 1)
    return repaired


def _first_tokens(before: Composition, document: Document, count: int) -> list[ArchivedLayer]:
    """Keys and values of the first tokens of `document` as the model computes them behind the documents `before`."""
    cache, start = ArchiveCache(before), document.prefix_tokens
    ids = document.tokens.ids[start : start + count].tolist()
    before.model.model.get_decoder()(**before.pad([ids]), cache=cache, use_cache=True)
    positions = torch.arange(before.n_tokens, before.n_tokens + len(ids), device=before.model.model.device)
    return [
        ArchivedLayer(shape.index, shape.window, keys[0], values[0], positions, None)
        for shape, (keys, values) in zip(before.shape.layers, layer_tensors(cache), strict=True)
    ]


def _joined(pieces: list[ArchivedLayer]) -> ArchivedLayer:
    first = pieces[0]
    return ArchivedLayer(
        index=first.index,
        window=first.window,
        keys=torch.cat([piece.keys for piece in pieces], dim=1),
        values=torch.cat([piece.values for piece in pieces], dim=1),
        exact_positions=torch.cat([piece.exact_positions for piece in pieces]),
        clusters=None,
    )


def _check_exact(document: Document, count: int) -> None:
    """Tokens can only be replaced where they are attended one by one."""
    start, end = document.prefix_tokens, min(document.prefix_tokens + count, document.n_tokens)
    for layer in document.layers:
        if layer.clusters is None:
            continue
        held = int(((layer.exact_positions >= start) & (layer.exact_positions < end)).sum())
        if held < end - start:
            raise ConfigError(
                f"recompute is {count} and archive {document.name!r} holds the first {held} tokens of its document "
                f"exactly; build it with sink_tokens = {start + count} in its recipe"
            )
