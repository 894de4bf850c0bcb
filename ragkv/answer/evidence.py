"""Which tokens of its documents an answer looked at: the attention that recall gave them, added up over the answer.

Weights of recalled and exact tokens are counted as they are; what was estimated from a prototype is spread evenly over
the tokens of its cluster, once, in the end: until then each answer token costs work for clusters and recalled tokens,
and none for all the others. The second half of the layers is counted: the first looks at word forms and neighbours, and
finds the answer's passage less often (docs/evaluation.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ragkv.answer.passages import DocumentEvidence, merge_passages
from ragkv.errors import ConfigError
from ragkv.recall.attention import BlockRecall, Choice, PartShare, places
from ragkv.recall.composition import Composition, Document
from ragkv.recall.layers import ArchivedLayer, ClusterTable
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
        self._tallies: dict[tuple[int, int], _Tally] = {}
        self._last: dict[tuple[int, int], _Row] = {}
        self._held: dict[tuple[int, int], ArchivedLayer] = {}

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        """Add one block of rows of one layer (called by the attention function)."""
        if begins:
            self._settle(layer.index)
            self._check_is_one_answer(layer, n_rows=recall.shares[0].held.shape[1])
        for place, share in enumerate(recall.shares):  # recomputed tokens stand behind the documents
            self._last[layer.index, place] = _last_row(share)  # of the last block, in the end
            self._held[layer.index, place] = share.part.layer

    def by_layer(self, place: int) -> torch.Tensor:
        """Attention on the tokens of a document, prefix included: (n_layers, n_tokens) float64.

        The sum over answer tokens and query heads; rows of layers with a window are zero.
        """
        document = self._documents[place]
        mass = torch.zeros(len(document.layers), document.n_tokens, dtype=torch.float64)
        for index, layer in enumerate(document.layers):
            rows = self.by_row(index, place)
            if rows is not None:
                held = self._held.get((index, place), layer)  # with every token decoded, in a dense layer
                n_archived = rows.shape[1] - len(held.exact_positions)
                exact = held.exact_positions.cpu().expand(len(rows), -1)
                archived = document.positions(index)[:, :n_archived] if n_archived else exact[:, :0]
                positions = torch.cat([archived, exact], dim=1)
                mass[index].index_add_(0, positions.flatten(), rows.flatten())
            self._add_recomputed(mass[index], index, place)
        return mass

    def by_row(self, index: int, place: int) -> torch.Tensor | None:
        """Attention on the tokens of a document in one layer, in the order in which the layer holds them.

        (n_kv_heads, n_archived + n_exact) float64: archived tokens as their file has them, then exact ones; None where
        nothing was counted. ``place`` behind the last document stands for the tokens that were computed again.
        """
        self._settle(index)
        tally = self._tallies.get((index, place))
        return None if tally is None else tally.rows()

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
        again, rows = self._composition.recomputed, self.by_row(index, len(self._documents))
        if again is None or rows is None or place == 0:
            return
        own = again.layers[index].exact_positions.cpu() - self._composition.shifts[place]
        first = self._composition.prefix_tokens
        inside = (own >= first) & (own < min(first + again.count, len(mass)))
        mass.index_add_(0, own[inside], rows.sum(0)[inside])

    def _settle(self, index: int) -> None:
        """Count the last row of the call before, which is complete now."""
        for key in [key for key in self._last if key[0] == index]:
            row = self._last.pop(key)
            self._tallies.setdefault(key, _Tally(row.table)).add(row)


@dataclass(frozen=True)
class _Row:
    """Attention of one row on one layer of one document, summed over the query heads of a group, float64.

    ``held`` (n_kv_heads, n_held) on prototypes and exact tokens, ``near`` (n_kv_heads, width) on tokens recalled, which
    are the ``rows`` (n_kv_heads, width) int64 of the layer's file.
    """

    table: ClusterTable | None
    held: torch.Tensor
    rows: torch.Tensor | None = None
    near: torch.Tensor | None = None


@dataclass
class _Tally:
    """Attention that single rows gave to one layer of one document: on what is held, and on tokens recalled.

    ``held`` (n_kv_heads, n_held) float64 adds up prototypes and exact tokens. ``near`` lists (n_kv_heads, width) rows
    of the layer's file and their weights, ``n_near`` of them; ``folded`` (n_kv_heads, n_tokens) float64 is what they
    came to before. All on the layer's device: nothing waits for it until the end.
    """

    table: ClusterTable | None
    held: torch.Tensor | None = None
    near: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    n_near: int = 0
    folded: torch.Tensor | None = None

    def add(self, row: _Row) -> None:
        """Add one row."""
        self.held = row.held if self.held is None else self.held + row.held
        if self.table is None or row.rows is None or row.near is None:
            return
        self.near.append((row.rows, row.near))
        self.n_near += row.near.shape[1]
        if self.n_near >= self.table.n_tokens:  # so that a long answer is held in no more than the tokens it is of
            self._fold()

    def rows(self) -> torch.Tensor | None:
        """The sum by token, see `AttentionMass.by_row`."""
        if self.held is None or self.table is None:
            return None if self.held is None else self.held.cpu()
        self._fold()
        sizes, n_clusters = self.table.sizes.long(), self.table.n_clusters
        spread = (self.held[:, :n_clusters] / sizes.clamp_min(1)).flatten().repeat_interleave(sizes.flatten())
        archived = spread.view(len(sizes), -1)
        if self.folded is not None:
            archived = archived + self.folded
        return torch.cat([archived, self.held[:, n_clusters:]], dim=1).cpu()

    def _fold(self) -> None:
        """Add up the recalled tokens that are listed."""
        if self.table is None or not self.near:
            return
        rows, weights = (torch.cat(each, dim=1) for each in zip(*self.near, strict=True))
        if self.folded is None:
            self.folded = weights.new_zeros(len(weights), self.table.n_tokens)
        self.folded.scatter_add_(1, rows, weights)
        self.near, self.n_near = [], 0


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


def _last_row(share: PartShare) -> _Row:
    """The last row of a block: the others predict nothing of the answer."""
    table, choice = share.part.layer.clusters, share.choice
    held = share.held[:, -1].sum(1).double()
    if table is None or choice is None or share.near is None:
        return _Row(table, held)
    last = slice(-1, None)
    own = Choice(
        clusters=choice.clusters[:, last],
        kept=choice.kept[:, last],
        begins=choice.begins[:, last],
        ends=choice.ends[:, last].contiguous(),
        tokens=choice.tokens[:, last],
        width=choice.width,
    )
    return _Row(table, held, _rows_of(table, own), share.near[:, -1].sum(1).double())


def _rows_of(table: ClusterTable, choice: Choice) -> torch.Tensor:
    """Where the tokens recalled by the one row of `choice` stand in their layer's file: (n_kv_heads, width) int64."""
    place, wanted = places(choice)
    first = table.first_rows.unsqueeze(1)
    start = first.gather(2, choice.clusters) - choice.begins  # row of a cluster's first token, less its place
    return (start.gather(2, place) + wanted)[:, 0]
