"""A query engine over archives: retrieve, compose, recall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from ragkv.answer.ask import check_options
from ragkv.catalog.catalog import Catalog
from ragkv.llamaindex.copies import PlainHoldsModel
from ragkv.llamaindex.documents import PREFILL
from ragkv.llamaindex.streaming import in_thread
from ragkv.llamaindex.synthesizer import RagKVSynthesizer
from ragkv.recall.composition import CONSECUTIVE
from ragkv.recall.placed import Weighting
from ragkv.recipe import RecallPolicy

dispatcher = instrument.get_dispatcher(__name__)


class RagKVQueryEngine(PlainHoldsModel, BaseQueryEngine):
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
        super().__init__(callback_manager=callback_manager or Settings.callback_manager)
        self._retriever, self._synthesizer = retriever, synthesizer
        self._node_postprocessors = list(node_postprocessors or ())
        for postprocessor in self._node_postprocessors:
            postprocessor.callback_manager = self.callback_manager

    @classmethod
    def from_args(
        cls,
        retriever: BaseRetriever,
        catalog: Catalog,
        *,
        on_missing: str = PREFILL,
        positions: str = CONSECUTIVE,
        weighting: Weighting | None = None,
        recompute_tokens: int = 0,
        policy: RecallPolicy | None = None,
        budget: int | None = None,
        max_new_tokens: int = 64,
        evidence: bool = True,
        best_last: bool = False,
        metadata_mode: MetadataMode = MetadataMode.NONE,
        streaming: bool = False,
        empty_response: str | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> RagKVQueryEngine:
        """An engine with a `RagKVSynthesizer` of its own; see there for the options."""
        manager = callback_manager or Settings.callback_manager
        synthesizer = RagKVSynthesizer(
            catalog,
            on_missing=on_missing,
            positions=positions,
            weighting=weighting,
            recompute_tokens=recompute_tokens,
            policy=policy,
            budget=budget,
            max_new_tokens=max_new_tokens,
            evidence=evidence,
            best_last=best_last,
            metadata_mode=metadata_mode,
            streaming=streaming,
            empty_response=empty_response,
            callback_manager=manager,
        )
        return cls(retriever, synthesizer, node_postprocessors=node_postprocessors, callback_manager=manager)

    @property
    def retriever(self) -> BaseRetriever:
        """The retriever that was given."""
        return self._retriever

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The nodes that a query is answered from, after postprocessing."""
        nodes = self._retriever.retrieve(query_bundle)
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """As `retrieve`, in a thread."""
        return await in_thread(lambda _should_stop: self.retrieve(query_bundle))

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from nodes that were retrieved elsewhere."""
        return self._synthesizer.synthesize(query_bundle, nodes, additional_source_nodes)

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """As `synthesize`, without blocking the event loop."""
        return await self._synthesizer.asynthesize(query_bundle, nodes, additional_source_nodes)

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {"response_synthesizer": self._synthesizer}

    @dispatcher.span
    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        check_options(question=query_bundle.query_str)  # before a retriever embeds nothing
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            response = self.synthesize(query_bundle, self.retrieve(query_bundle))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    @dispatcher.span
    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        check_options(question=query_bundle.query_str)  # before a retriever embeds nothing
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            response = await self.asynthesize(query_bundle, await self.aretrieve(query_bundle))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response
