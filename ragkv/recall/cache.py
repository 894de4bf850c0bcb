"""The cache that ``model.generate`` takes: local tokens in memory, the document through its archive."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ragkv.errors import ConfigError, ModelMismatchError
from ragkv.model.attention import AttentionCall, dense_attention, tag
from ragkv.model.prefill import kv_nbytes
from ragkv.model.shape import check_length
from ragkv.recall.attention import Observer, recall_attention
from ragkv.recall.composition import Composition, Document
from ragkv.recipe import RecallPolicy

_NO_POSITIONS = "the model passes no position_ids to its attention, so the question's place cannot be checked"


class ArchiveCache(Cache):
    """A cache for stock ``model.generate(**archive.questions([...]), cache=ArchiveCache(archive))``.

    Holds only question and answer tokens and reports their number as its length. One cache serves one call of
    ``generate``; any number of caches may share an archive, in any number of threads.

    Parameters
    ----------
    source
        From `Archive.open`, or a `Composition` of several archives.
    policy
        What each answer token recalls per KV head; a question token recalls `QUESTION_SHARE` times as much. Defaults
        to the policy of the archive's recipe. Whole clusters, so slightly more may come.
    budget
        A number of tokens for every layer, in place of what the policy says.
    observer
        Receives what every layer recalled, see `RecallTrace`; None costs nothing.

    Raises
    ------
    ConfigError
        If the budget is not a whole number of at least 1, the policy names a layer that is not there, or the model is
        not attached.
    """

    def __init__(
        self,
        source: Document | Composition,
        *,
        policy: RecallPolicy | None = None,
        budget: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        composition = Composition.of(source)
        policy = policy or composition.policy
        policy = policy if budget is None else policy.with_budget(budget)
        n_layers = len(composition.shape.layers)
        policy.check_layers(n_layers)
        composition.require_usable()
        composition.require_model()
        self.composition = composition
        layers: list[ArchiveCacheLayer] = []
        for index in range(n_layers):
            before = layers[-1] if layers else None
            layers.append(ArchiveCacheLayer(composition, index, policy, observer, before=before))
        super().__init__(layers=list(layers))

    @property
    def local_bytes(self) -> int:
        """Bytes of question and answer keys and values."""
        return kv_nbytes(self)


class ArchiveCacheLayer(DynamicLayer):
    """Local keys and values of one layer, tied to its archived layer for the attention that follows each update."""

    def __init__(
        self,
        composition: Composition,
        index: int,
        policy: RecallPolicy,
        observer: Observer | None,
        *,
        before: ArchiveCacheLayer | None,
    ) -> None:
        super().__init__()
        self._composition, self._policy, self._observer = composition, policy, observer
        self._layer = composition.layer(index, whole=index in policy.dense_layers)
        self._before = before
        self._checks_positions = index == composition.first_full_layer  # its mask shows every local token
        self._attended = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append local keys and values; the returned keys carry the archive to the attention function."""
        if not self._attended or (self._before is not None and not self._before._attended):
            raise ConfigError(
                "the model's attention ignored the archive; load the model with ragkv.load_model, or call "
                "ragkv.attach(model), and do not compile it"
            )
        self._attended = False
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        check_length(self._composition.shape, self._composition.n_tokens + keys.shape[-2])
        return tag(keys.view_as(keys), self), values

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of one call over archive and local keys; invoked by the registered attention function."""
        self._attended = True
        if self._checks_positions:
            self._check_model(call)
            self._check_positions(call)
        if self._layer.window is None:
            n_rows = call.query.shape[2]
            reads_question = n_rows > 1 or n_rows == call.key.shape[2]
            limit = self._policy.limit(self._layer.index, question=reads_question)
            return recall_attention(call, self._layer, limit, self._observer)
        return dense_attention(self._with_window(call, self._layer.window))

    def _check_model(self, call: AttentionCall) -> None:
        """An archive is checked against the model it is opened for; another one, even of the same shape, is not it."""
        if call.config is not self._composition.model.model.config.get_text_config(decoder=True):
            raise ModelMismatchError(
                "the cache belongs to an archive that was opened for another model object; open the archive for the "
                "model that generates"
            )

    def _check_positions(self, call: AttentionCall) -> None:
        """Local tokens must stand right behind the archive: elsewhere the answer would be fluent and wrong."""
        if call.positions is None:
            raise ConfigError(_NO_POSITIONS)
        n_local, window = call.key.shape[2], self._layer.window
        n_seen = call.positions.new_full((1, 1), n_local) if call.mask is None else call.mask[:, 0].sum(-1)
        expected = self._composition.n_tokens + n_seen - 1  # (batch or 1, n_rows)
        right = (call.positions == expected) | (n_seen == 0)  # padding sees nothing
        if window is not None:
            right |= (n_seen == window) & (call.positions > expected)
        if not bool(right.all()):
            row, token = (~right).nonzero()[0].tolist()
            found, wanted = (each.expand_as(right)[row, token].item() for each in (call.positions, expected))
            raise ConfigError(
                f"question token {token} has position {found}, with this archive it must be {wanted}; "
                "pass position_ids from Archive.questions to generate"
            )

    def _with_window(self, call: AttentionCall, window: int) -> AttentionCall:
        """Put the archived window in front of the local keys; a query token sees `window` tokens, itself included."""
        layer, (batch, n_rows) = self._layer.parts[0].layer, (call.query.shape[0], call.query.shape[2])
        if call.positions is None:
            raise ConfigError(_NO_POSITIONS)
        positions = call.positions.expand(batch, -1).unsqueeze(-1)
        seen = (layer.exact_positions > positions - window).unsqueeze(1)  # (batch, 1, n_rows, n_exact)
        local = call.mask if call.mask is not None else seen.new_ones(1)
        return AttentionCall(
            call.query,
            torch.cat([layer.keys.expand(batch, -1, -1, -1), call.key], dim=2),
            torch.cat([layer.values.expand(batch, -1, -1, -1), call.value], dim=2),
            mask=torch.cat([seen, local.expand(batch, 1, n_rows, call.key.shape[2])], dim=-1),
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )
