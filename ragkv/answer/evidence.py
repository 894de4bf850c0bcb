"""Which tokens of its documents an answer looked at: the attention that recall gave them, added up over the answer.

Weights of recalled and exact tokens are counted as they are; what was estimated from a prototype is spread evenly over
the tokens of its cluster. The second half of the layers is counted: the first looks at word forms and neighbours, and
finds the answer's passage less often (docs/evaluation.md).
"""

from __future__ import annotations

import torch

from ragkv.answer.passages import DocumentEvidence, merge_passages
from ragkv.errors import ConfigError
from ragkv.recall.attention import BlockRecall, PartShare, places
from ragkv.recall.composition import Composition, Document
from ragkv.recall.layers import ArchivedLayer
from ragkv.recall.placed import PlacedLayer


class AttentionMass:
    """Adds up attention by document, layer and token; pass it as ``ArchiveCache(..., observer=AttentionMass(...))``.

    Counts the rows that answer tokens are predicted from: the last one of the question, and every one after it. For
    one question, which the model is given in one call, and its answer token by token.

    Raises
    ------
    ConfigError
        While it answers: if the cache is of other documents, or a later call has more than one token: a second question
        of a batch, whose rows cannot be told apart from those of the first.
    """

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        self._documents: tuple[Document, ...] = composition.documents
        self._begun: set[int] = set()
        self._total: dict[tuple[int, int], torch.Tensor] = {}
        self._last: dict[tuple[int, int], torch.Tensor] = {}

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        """Add one block of rows of one layer (called by the attention function)."""
        if begins:
            self._settle(layer.index)
            self._check_is_one_answer(layer, n_rows=recall.shares[0].held.shape[1])
        for place, share in enumerate(recall.shares[: len(self._documents)]):
            self._last[layer.index, place] = _row_mass(share)
        if len(recall.shares) > len(self._documents):
            self._last[layer.index, len(self._documents)] = _row_mass(recall.shares[-1])

    def by_layer(self, place: int) -> torch.Tensor:
        """Attention on the tokens of a document, prefix included: (n_layers, n_tokens) float64.

        The sum over answer tokens and query heads; rows of layers with a window are zero.
        """
        document = self._documents[place]
        mass = torch.zeros(len(document.layers), document.n_tokens, dtype=torch.float64)
        for index, layer in enumerate(document.layers):
            self._settle(index)
            rows = self._total.get((index, place))
            if rows is not None:
                n_archived = rows.shape[1] - len(layer.exact_positions)
                exact = layer.exact_positions.cpu().expand(len(rows), -1)
                archived = document.positions(index)[:, :n_archived] if n_archived else exact[:, :0]
                positions = torch.cat([archived, exact], dim=1)
                mass[index].index_add_(0, positions.flatten(), rows.flatten())
            self._add_recomputed(mass[index], index, place)
        return mass

    def evidence(self) -> tuple[DocumentEvidence, ...]:
        """What each document received, in order, and its best passages."""
        prefix = self._composition.prefix_tokens
        half = len(self._composition.shape.layers) // 2
        found = [self.by_layer(place)[half:, prefix:].sum(0) for place in range(len(self._documents))]
        total = float(sum(weights.sum() for weights in found)) or 1.0
        return tuple(
            _evidence(document, (weights / total).tolist())
            for document, weights in zip(self._documents, found, strict=True)
        )

    def _check_is_one_answer(self, layer: PlacedLayer, *, n_rows: int) -> None:
        """Refuse what would be counted for the wrong question or the wrong document."""
        if layer.index in self._begun:
            if n_rows > 1:
                raise ConfigError(
                    f"evidence is about one question, and {n_rows} tokens follow it at once; ask one question at a "
                    "time, with a cache and an AttentionMass of its own"
                )
            return
        self._begun.add(layer.index)
        again = self._composition.recomputed
        own = [(each.layers[layer.index], each.n_tokens) for each in self._documents]
        own += [] if again is None else [(again.layers[layer.index], 0)]
        held = [part.layer for part in layer.parts]
        if len(own) != len(held) or not all(_is_of(*pair) for pair in zip(held, own, strict=True)):
            raise ConfigError("the cache is of other documents than its AttentionMass; give both the same composition")

    def _add_recomputed(self, mass: torch.Tensor, index: int, place: int) -> None:
        """Tokens that were computed again count for the document that they are of."""
        again, rows = self._composition.recomputed, self._total.get((index, len(self._documents)))
        if again is None or rows is None or place == 0:
            return
        own = again.layers[index].exact_positions.cpu() - self._composition.shifts[place]
        first = self._composition.prefix_tokens
        inside = (own >= first) & (own < min(first + again.count, len(mass)))
        mass.index_add_(0, own[inside], rows.sum(0)[inside])

    def _settle(self, index: int) -> None:
        """Count the last row of the call before, which is complete now."""
        for key in [key for key in self._last if key[0] == index]:
            rows = self._last.pop(key)
            self._total[key] = self._total[key] + rows if key in self._total else rows


def _is_of(held: ArchivedLayer, own: tuple[ArchivedLayer, int]) -> bool:
    """Whether a layer is that of a document, as it is or (`RecallPolicy.dense_layers`) with every token decoded."""
    layer, n_tokens = own
    return held is layer or (held.clusters is None and held.keys.shape[1] == n_tokens)


def _evidence(document: Document, weights: list[float]) -> DocumentEvidence:
    spans = tuple((start, end, weight) for (start, end), weight in zip(document.spans, weights, strict=True))
    return DocumentEvidence(
        name=document.name,
        text=document.text,
        share=sum(weights),
        spans=spans,
        passages=merge_passages(document.text, spans),
    )


def _row_mass(share: PartShare) -> torch.Tensor:
    """Attention of the last row on archived tokens, in the order of their file, and then exact ones, float64.

    (n_kv_heads, n_archived + n_exact), summed over the query heads of the group. Heads with fewer tokens do not occur.
    """
    held = share.held[:, -1].sum(1).double().cpu()  # (n_kv_heads, n_held)
    table = share.part.layer.clusters
    if table is None:
        return held
    sizes = table.sizes.cpu()
    spread = held[:, : table.n_clusters] / sizes.clamp_min(1)
    archived = spread.flatten().repeat_interleave(sizes.flatten()).view(len(sizes), -1)
    if share.choice is not None and share.near is not None:
        place, wanted = places(share.choice)
        choice = share.choice
        first = (table.sizes.cumsum(1) - table.sizes).unsqueeze(1).expand(-1, choice.clusters.shape[1], -1)
        start = first.gather(2, choice.clusters) - choice.begins  # row of a cluster's first token, less its place
        row = (start.gather(2, place) + wanted)[:, -1].cpu()
        archived.scatter_add_(1, row, share.near[:, -1].sum(1).double().cpu())
    return torch.cat([archived, held[:, table.n_clusters :]], dim=1)
