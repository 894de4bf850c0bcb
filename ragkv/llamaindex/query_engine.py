"""A query engine over archives: retrieve, compose, recall."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from ragkv.answer.ask import check_options
from ragkv.catalog.catalog import Catalog
from ragkv.llamaindex.llm import PlainHoldsModel
from ragkv.llamaindex.options import shows_options_of
from ragkv.llamaindex.streaming import in_thread
from ragkv.llamaindex.synthesizer import RagKVSynthesizer


class RagKVQueryEngine(PlainHoldsModel, RetrieverQueryEngine):
    """Retrieves nodes and answers from their archives.

    ``aquery`` retrieves in a thread as well, because embeddings that are computed on this machine would block the event
    loop even where a retriever is asked asynchronously. For a retriever that works only asynchronously, use the
    ``RetrieverQueryEngine`` of LlamaIndex with a `RagKVSynthesizer`.

    Parameters
    ----------
    retriever
        Any of LlamaIndex.
    synthesizer
        What answers.
    node_postprocessors
        Applied to retrieved nodes in order.
    callback_manager
        ``Settings.callback_manager`` by default.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        synthesizer: RagKVSynthesizer,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        manager = callback_manager or Settings.callback_manager
        super().__init__(retriever, synthesizer, list(node_postprocessors or ()), manager)

    @classmethod
    @shows_options_of(RagKVSynthesizer)
    def from_args(
        cls,
        retriever: BaseRetriever,
        catalog: Catalog,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> RagKVQueryEngine:
        """An engine with a `RagKVSynthesizer` of its own; see there for the options."""
        manager = callback_manager or Settings.callback_manager
        synthesizer = RagKVSynthesizer(catalog, callback_manager=manager, **options)
        return cls(retriever, synthesizer, node_postprocessors=node_postprocessors, callback_manager=manager)

    def with_retriever(self, retriever: BaseRetriever) -> Self:
        """The same engine over another retriever."""
        other = copy.copy(self)
        other._retriever = retriever
        return other

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """As ``retrieve``, in a thread."""
        return await in_thread(lambda _should_stop: self.retrieve(query_bundle))

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        check_options(question=query_bundle.query_str)  # before a retriever embeds nothing
        return super()._query(query_bundle)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        check_options(question=query_bundle.query_str)
        return await super()._aquery(query_bundle)
