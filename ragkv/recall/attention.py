"""Attention over an archive: score prototypes, recall whole clusters, estimate the rest, all heads at once.

Every row (one query token of one sequence) chooses its own clusters per KV head: by the softmax mass that the query
heads of the group put on a prototype, raised by how far their logits spread inside the cluster. A cluster that is not
recalled takes part as one pseudo-token with the centroid as key, the mean value as value, and log(size) plus a small
correction for the spread of the cluster added to the logit. With every cluster recalled the result is dense attention
over the keys and values as they are stored.

Neither prototypes nor coded tokens are ever decoded: a logit is the product of the transformed query with the codes
(of a token, beside that of its prototype), and the weighted sum of value codes is transformed back once per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ragkv.archive.codec import read_scaled
from ragkv.archive.payload import Payload, from_bits
from ragkv.model.attention import AttentionCall, cap
from ragkv.recall.layers import ClusterTable
from ragkv.recall.placed import Part, PlacedLayer, Weighting
from ragkv.recall.row_view import RowView
from ragkv.recipe import Limit

_FEWEST, _TOKENS_OF_A_CLUSTER = 16, 4  # clusters looked at first: sorting all takes twice as long
_MAX_DEVIATION = 60.0  # its exponential still fits float32
_BLOCK_FLOATS = 1 << 22  # logits or recalled values held at once; longer questions are attended in blocks of rows


@dataclass(frozen=True)
class Choice:
    """Clusters that rows recall.

    ``clusters`` (n_kv_heads, n_rows, n_candidates) int64 in descending order of mass, of which the `kept` ones
    (boolean) are recalled; ``begins`` and ``ends`` bound their tokens in that order; ``tokens`` (n_kv_heads, n_rows)
    int64, recalled in all, at most ``width``.
    """

    clusters: torch.Tensor
    kept: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    tokens: torch.Tensor
    width: int

    def hit_ids(self) -> torch.Tensor:
        """Ids of the clusters recalled, (n_kv_heads, n_rows, n_candidates), -1 where a candidate was not."""
        return torch.where(self.kept & (self.ends > self.begins), self.clusters, -1)


@dataclass(frozen=True)
class Recalled:
    """Tokens that rows recall, filled up to the row with most.

    ``rows`` (n_kv_heads, n_rows, width, row_bytes) uint8; ``real`` (n_kv_heads, n_rows, width) boolean, true for
    tokens that are not filling; ``cluster`` (n_kv_heads, n_rows, width) int64 that each token is of.
    """

    rows: torch.Tensor
    real: torch.Tensor
    cluster: torch.Tensor


@dataclass(frozen=True)
class PartShare:
    """The attention that some rows gave to one document.

    ``held`` (n_kv_heads, n_rows, group, n_held) are the weights of its prototypes and exact tokens, ``near``
    (n_kv_heads, n_rows, group, width) those of the tokens recalled by ``choice``; both None where nothing was recalled.
    """

    part: Part
    held: torch.Tensor
    choice: Choice | None
    near: torch.Tensor | None


@dataclass(frozen=True)
class BlockRecall:
    """What one block of rows recalled of a layer: `choice` over the clusters of all documents, None without any."""

    choice: Choice | None
    shares: tuple[PartShare, ...]

    @property
    def unrecalled_mass(self) -> torch.Tensor:
        """Share of the attention that went to prototypes: (n_kv_heads, n_rows)."""
        estimated = [share.held[..., : share.part.n_clusters].sum(-1) for share in self.shares]
        return torch.stack(estimated).sum(0).mean(2)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of keys and values that were fetched."""
        return sum(
            int(share.choice.tokens.sum()) * share.part.layer.clusters.row_bytes
            for share in self.shares
            if share.choice is not None and share.part.layer.clusters is not None
        )


class Observer(Protocol):
    """Receives what one block of rows recalled in one layer; None in its place costs nothing.

    `begins` is true for the first block of a call.
    """

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None: ...


def recall_attention(
    call: AttentionCall, layer: PlacedLayer, limit: Limit, observer: Observer | None = None
) -> torch.Tensor:
    """Attend to documents and local keys: (batch, n_query_heads, n_rows, value_dim) in the query's dtype.

    `limit` says what each row recalls per KV head, of all documents together; the last cluster is recalled whole.
    """
    batch, n_query_heads, n_rows, head_dim = call.query.shape
    per_row = batch * n_query_heads * (layer.n_held + call.key.shape[2])
    if layer.n_clusters:
        width = min(limit.tokens, limit.candidates(layer.n_clusters) * layer.largest)
        width = min(width + layer.largest, layer.n_archived)
        per_row = max(per_row, batch * layer.n_kv_heads * width * 2 * head_dim)
    block = max(1, _BLOCK_FLOATS // max(1, per_row))
    if block >= n_rows:
        return _attend_rows(call, layer, limit, slice(0, n_rows), observer)
    starts = range(0, n_rows, block)
    parts = [_attend_rows(call, layer, limit, slice(at, min(at + block, n_rows)), observer) for at in starts]
    return torch.cat(parts, dim=2)


def choose_clusters(
    worth: torch.Tensor, sizes: torch.Tensor, limit: Limit, *, mass: torch.Tensor | None = None, padded: bool = True
) -> Choice:
    """Take whole clusters in descending order of `worth` until the limit is reached.

    `worth` and `mass` (n_kv_heads, n_rows, n_clusters): what a cluster is worth, and its estimated share of the
    attention, which is `worth` by default and only looked at if the limit is one of mass; `sizes` (n_kv_heads,
    n_clusters); `padded` says that some sizes are 0.
    """
    mass = worth if mass is None else mass
    if padded:  # behind real clusters whose mass underflowed to 0
        worth = worth.masked_fill(sizes.unsqueeze(1) == 0, -1)
    most = limit.candidates(worth.shape[-1])
    few = most if limit.clusters is not None else min(most, max(_FEWEST, limit.tokens // _TOKENS_OF_A_CLUSTER))
    clusters, held = _best(worth, sizes, few)
    ends = held.cumsum(-1)
    if few < most and bool((ends[..., -1] < limit.tokens).any()):  # clusters are small here: look at all
        clusters, held = _best(worth, sizes, most)
        ends = held.cumsum(-1)
    begins = ends - held
    kept = begins < limit.tokens
    if limit.mass is not None:
        taken = mass.gather(2, clusters)
        left = mass.sum(-1, keepdim=True) - (taken.cumsum(-1) - taken)  # estimated before each is taken
        kept &= (begins < limit.floor) | (left > 1 - limit.mass)
    tokens = (held * kept).sum(-1)
    return Choice(clusters, kept, begins, ends, tokens, width=int(tokens.max()))


def _best(worth: torch.Tensor, sizes: torch.Tensor, n_best: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n_best` clusters of each row in descending order, and their sizes."""
    clusters = worth.topk(n_best, dim=-1).indices
    return clusters, sizes.unsqueeze(1).expand(-1, worth.shape[1], -1).gather(2, clusters)


def places(choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidate each recalled token is of, and its place among its row's: (n_kv_heads, n_rows, width) int64.

    Filled up with the last token of the row, so that what is read there are real numbers.
    """
    slots = torch.arange(choice.width, device=choice.ends.device)
    wanted = torch.minimum(slots, (choice.tokens - 1).clamp_min_(0).unsqueeze(-1))
    return torch.searchsorted(choice.ends, wanted, right=True), wanted


def gather_rows(table: ClusterTable, choice: Choice) -> Recalled:
    """Fetch the rows of the chosen clusters."""
    n_kv_heads, n_rows, _ = choice.clusters.shape
    place, wanted = places(choice)
    start = table.address.unsqueeze(1).expand(-1, n_rows, -1).gather(2, choice.clusters).long()
    start += table.first_byte - choice.begins * table.row_bytes
    byte = start.gather(2, place).add_(wanted, alpha=table.row_bytes).view(-1)
    raw = table.fetch(byte).to(wanted.device)
    slots = torch.arange(wanted.shape[2], device=wanted.device)
    return Recalled(
        rows=raw.view(n_kv_heads, n_rows, slots.shape[0], -1),
        real=slots < choice.tokens.unsqueeze(-1),
        cluster=choice.clusters.gather(2, place),
    )


def split_choice(choice: Choice, first: torch.Tensor) -> list[Choice | None]:
    """Cut a choice over the clusters of several documents up by document, whose clusters begin at `first` (n,) int64.

    Clusters are numbered from 0 in each; None where no row recalls any. Rows that recall nothing of a document get one
    token of its cluster 0 to read, which is not counted.
    """
    owner = torch.bucketize(choice.clusters, first, right=True) - 1
    number = torch.arange(len(first), device=first.device).view(-1, 1, 1, 1)
    inside = (owner == number) & choice.kept  # (n_documents, n_kv_heads, n_rows, n_candidates)
    held = (choice.ends - choice.begins) * inside
    ends = held.cumsum(-1)
    begins, tokens = ends - held, ends[..., -1].clone()
    ends[..., -1].clamp_min_(1)
    clusters = (choice.clusters - first.view(-1, 1, 1, 1)) * inside
    widths = tokens.amax((1, 2)).tolist()
    return [
        Choice(clusters[own], inside[own], begins[own], ends[own], tokens[own], width) if width else None
        for own, width in enumerate(widths)
    ]


def _attend_rows(
    call: AttentionCall, layer: PlacedLayer, limit: Limit, rows: slice, observer: Observer | None
) -> torch.Tensor:
    """Attention of some rows: (batch, n_query_heads, rows, value_dim)."""
    view = RowView(call, layer.n_kv_heads, rows)
    documents = [_PartView(view.query, part) for part in layer.parts]
    columns = [document.held_logits(call.softcap, layer.weighting) for document in documents]
    columns.append(view.local_logits())
    if view.sinks is not None:
        columns.append(view.sinks)
    logits = torch.cat(columns, dim=-1)  # (n_kv_heads, n_rows, group, n_held + n_local (+ 1))
    choice = None
    if layer.sizes is not None:
        choice = _choose(documents, logits.softmax(-1), layer, limit)
        near = _recall(documents, logits, choice, layer, call.softcap)
        logits = torch.cat([logits, *(each / layer.weighting.temperature for each in near)], dim=-1)
    if layer.weighting.scale != 1:
        logits = _rescaled(logits, layer, n_others=call.key.shape[2] + (view.sinks is not None))
    weights = logits.softmax(-1)
    attended = view.local_sum(weights[..., layer.n_held : layer.n_held + call.key.shape[2]])
    shares = _shares(documents, weights)
    for document, share in zip(documents, shares, strict=True):
        attended += document.summed(share)
    if observer is not None:
        observer.on_recall(layer, BlockRecall(choice, shares), begins=rows.start == 0)
    return view.unpack(attended)


class _PartView:
    """One document as a block of rows sees it: `query` turned to where it stands, and what is recalled of it."""

    def __init__(self, query: torch.Tensor, part: Part) -> None:
        self.part, self.table = part, part.layer.clusters
        self.scales = query.new_empty(0) if self.table is None else self.table.spread_scales()
        self.query = query if part.turn is None else query @ part.turn
        self.flat = self.query.flatten(1, 2)
        products = torch.bmm(self.flat, part.layer.keys.float().transpose(1, 2))
        if self.table is not None:
            products = torch.cat([self.table.key_products(self.flat), products], dim=-1)
        self.products = products.view(*query.shape[:3], -1)  # (n_kv_heads, n_rows, group, n_held)
        self.choice: Choice | None = None
        self.recalled: Recalled | None = None

    def held_logits(self, softcap: float | None, weighting: Weighting) -> torch.Tensor:
        """Logits of prototypes and exact tokens: (n_kv_heads, n_rows, group, n_held)."""
        held, part = cap(self.products, softcap), self.part
        if weighting.temperature != 1:
            held = torch.where(part.in_document(), held / weighting.temperature, held)
        if self.table is None and part.exact_bias is None:
            return held
        held = held.clone() if held is self.products else held  # the products are needed as they are
        if self.table is not None:
            held[..., : part.n_clusters] += self.table.bias(self.scales)[:, None, None]
        if part.exact_bias is not None:
            held[..., part.n_clusters :] += part.exact_bias
        return held

    def recall(self, table: ClusterTable, choice: Choice, softcap: float | None) -> torch.Tensor:
        """Fetch what was chosen; its logits (n_kv_heads, n_rows, group, width), -inf at filling."""
        self.choice, self.recalled = choice, gather_rows(table, choice)
        near = cap(_near_products(self.query, table.payload, self.recalled, self.products), softcap)
        return near.masked_fill(~self.recalled.real.unsqueeze(2), -torch.inf)

    def summed(self, share: PartShare) -> torch.Tensor:
        """Values summed with the weights of a share: (n_kv_heads, n_rows, group, value_dim)."""
        held, near = share.held, share.near
        exact = held[..., self.part.n_clusters :].flatten(1, 2)
        total = torch.bmm(exact, self.part.layer.values.float())
        if self.table is not None:
            on_clusters = held[..., : self.part.n_clusters]
            if near is not None and self.recalled is not None and self.table.payload.value_basis is not None:
                # Coded values are residuals: a recalled token weighs on the mean value of its cluster, too.
                own = self.recalled.cluster.unsqueeze(2).expand(near.shape)
                on_clusters = on_clusters.scatter_add(3, own, near)
            total += self.table.value_sums(on_clusters.flatten(1, 2))
        summed = total.view(*held.shape[:3], -1)
        if near is not None and self.recalled is not None and self.table is not None:
            summed += _near_sum(near, self.table.payload, self.recalled)
        return summed


def _choose(documents: list[_PartView], mass: torch.Tensor, layer: PlacedLayer, limit: Limit) -> Choice:
    """Choose among the clusters of all documents, by the attention `mass` that falls on each column."""
    worths, masses, column = [], [], 0
    for document in documents:
        table = document.table
        if table is not None:
            masses.append(mass[..., column : column + table.n_clusters])
            worths.append(_worth(document, table, masses[-1]))
        column += document.part.n_held
    share = None if limit.mass is None else torch.cat(masses, dim=-1).mean(2)
    sizes = layer.sizes if layer.sizes is not None else mass.new_zeros(0)
    return choose_clusters(torch.cat(worths, dim=-1), sizes, limit, mass=share, padded=layer.padded)


def _recall(
    documents: list[_PartView], logits: torch.Tensor, choice: Choice, layer: PlacedLayer, softcap: float | None
) -> list[torch.Tensor]:
    """Fetch the chosen clusters of every document and take their prototypes out of `logits`; logits of the tokens."""
    hit = torch.zeros(*choice.clusters.shape[:2], layer.n_clusters, dtype=torch.bool, device=logits.device)
    hit.scatter_(2, choice.clusters, choice.kept)
    choices = iter([choice] if len(layer.first_clusters) == 1 else split_choice(choice, layer.first_clusters))
    near, column, first = [], 0, 0
    for document in documents:
        table = document.table
        own = None if table is None else next(choices)
        if table is not None and own is not None:
            near.append(document.recall(table, own, softcap))
            gone = hit[..., first : first + table.n_clusters].unsqueeze(2)
            logits[..., column : column + table.n_clusters].masked_fill_(gone, -torch.inf)
        column, first = column + document.part.n_held, first + document.part.n_clusters
    return near


def _shares(documents: list[_PartView], weights: torch.Tensor) -> tuple[PartShare, ...]:
    """Cut weights over [held of each document, local keys, sinks, recalled of each document] up by document."""
    shares, column = [], 0
    widths = [0 if document.recalled is None else document.recalled.real.shape[2] for document in documents]
    recalled = weights.shape[-1] - sum(widths)
    for document, width in zip(documents, widths, strict=True):
        held = weights[..., column : column + document.part.n_held]
        near = weights[..., recalled : recalled + width] if width else None
        shares.append(PartShare(document.part, held, document.choice, near))
        column, recalled = column + document.part.n_held, recalled + width
    return tuple(shares)


def _rescaled(logits: torch.Tensor, layer: PlacedLayer, *, n_others: int) -> torch.Tensor:
    """Logits with the mass of document tokens raised to the power of the layer's scale.

    Columns are those held, `n_others` local keys and sinks, and the tokens recalled.
    """
    of_document = layer.in_document.new_ones(logits.shape[-1])
    of_document[: layer.n_held] = layer.in_document
    of_document[layer.n_held : layer.n_held + n_others] = False
    total = logits.masked_fill(~of_document, -torch.inf).logsumexp(-1, keepdim=True)
    shift = torch.where(total.isfinite(), total * (layer.weighting.scale - 1), 0)
    return torch.where(of_document, logits + shift, logits)


def _worth(document: _PartView, table: ClusterTable, mass: torch.Tensor) -> torch.Tensor:
    """What recalling each cluster is worth to each row: (n_kv_heads, n_rows, n_clusters).

    The `mass` (n_kv_heads, n_rows, group, n_clusters) that the cluster would have if all its keys were one standard
    deviation of the logit nearer to the query than their centroid, times its priority. A cluster that may hide a sharp
    match comes before a flat one of the same mass.
    """
    deviation = table.logit_deviation(document.flat, document.scales)
    reached = deviation.clamp_max_(_MAX_DEVIATION).exp_().view_as(mass).mul_(mass)
    return reached.sum(2).mul_(table.priority(document.scales).unsqueeze(1))


def _near_products(query: torch.Tensor, payload: Payload, recalled: Recalled, products: torch.Tensor) -> torch.Tensor:
    """Products of queries (n_kv_heads, n_rows, group, head_dim) with recalled keys: (n_kv_heads, n_rows, group, width).

    `products` are those with the centroids, which the products of residuals add to.
    """
    raw, basis = payload.key_part(recalled.rows), payload.key_basis
    if basis is None:
        return query @ from_bits(raw, payload.dtype).float().transpose(-1, -2)
    numbers, scale = read_scaled(raw, basis)
    along = basis.along(query.flatten(1, 2)).view(*query.shape[:3], -1)
    own = (along @ numbers.transpose(-1, -2)).mul_(scale.unsqueeze(2))
    return own.add_(products.gather(3, recalled.cluster.unsqueeze(2).expand(-1, -1, query.shape[2], -1)))


def _near_sum(weights: torch.Tensor, payload: Payload, recalled: Recalled) -> torch.Tensor:
    """Recalled values, or residuals, summed with `weights` (n_kv_heads, n_rows, group, width): (..., value_dim)."""
    raw, basis = payload.value_part(recalled.rows), payload.value_basis
    if basis is None:
        return weights @ from_bits(raw, payload.dtype).float()
    numbers, scale = read_scaled(raw, basis)
    summed = (weights * scale.unsqueeze(2)) @ numbers
    return basis.restored(summed.flatten(1, 2)).view(*weights.shape[:3], -1)
