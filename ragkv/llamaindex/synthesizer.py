"""A response synthesizer that answers from the archives of the nodes it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE, TokenAsyncGen, TokenGen

from ragkv.answer.ask import check_options
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.llamaindex.copies import PlainHoldsModel
from ragkv.llamaindex.documents import PREFILL, Resolution, loaded_model, resolve
from ragkv.llamaindex.llm import RagKVLLM
from ragkv.llamaindex.options import AnswerOptions
from ragkv.llamaindex.streaming import ShouldStop, in_thread, stop_check
from ragkv.model.prompt import data_ids
from ragkv.recall.composition import CONSECUTIVE, Composition
from ragkv.recall.placed import Weighting
from ragkv.recall.recompute import recompute
from ragkv.recipe import RecallPolicy

METADATA_KEY = "ragkv"
dispatcher = instrument.get_dispatcher(__name__)


@dataclass(frozen=True)
class _Request:
    """The documents of one question, the LLM over them, and the metadata that its response will have."""

    resolution: Resolution
    llm: RagKVLLM
    metadata: dict[str, Any]

    def fill(self, completion: CompletionResponse) -> None:
        """Add what was measured to the metadata, in place: a streaming response holds it already."""
        if completion.raw is None:
            return
        report = dict(completion.raw["ragkv"])
        documents = self.resolution.documents
        if report["evidence"]:
            report["evidence"] = [
                {"id": document.id, **found} for document, found in zip(documents, report["evidence"], strict=True)
            ]
        self.metadata[METADATA_KEY].update(usage=completion.raw["usage"], **report)


class RagKVSynthesizer(PlainHoldsModel, BaseSynthesizer):
    """Answers a question from the archives of retrieved nodes: of their text nothing is prefilled, unless it must be.

    For ``RetrieverQueryEngine(retriever, response_synthesizer=...)``. ``response.metadata["ragkv"]`` says what the
    answer cost, which documents served and why others did not, and which passages the answer looked at; of a streaming
    response it is complete once the stream has ended. ``resolve_s`` are the seconds in which archives were opened and
    missing ones made up for, ``ttft_s`` those from there to the first token.

    Parameters
    ----------
    catalog
        Opened with its model.
    on_missing
        What to do for a node whose archive cannot be used: ``prefill`` its text, ``build`` it, or ``raise``.
    positions, weighting
        How documents stand to each other and to the question (see `ragkv.recall.composition.Composition`).
    recompute_tokens
        First tokens of each later document that are computed again (see `ragkv.recompute`); 0 for none.
    policy, budget, max_new_tokens, evidence
        As for `ragkv.answer.ask.ask`.
    best_last
        Put the best node's document next to the question, instead of first.
    metadata_mode
        Which metadata belongs to a node's text; as given to `ArchiveTransform`.
    """

    def __init__(
        self,
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
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._catalog, self._model = catalog, loaded_model(catalog)
        self._options = AnswerOptions(
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
        )
        llm = RagKVLLM(self._model, max_new_tokens=max_new_tokens)
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            # LlamaIndex's default tokenizer is another model's, which it loads and makes global.
            prompt_helper=PromptHelper.from_llm_metadata(llm.metadata, tokenizer=self._count),
            chat_prompt_helper=ChatPromptHelper.from_llm_metadata(llm.metadata, tokenizer=self._count),
            streaming=streaming,
            empty_response=empty_response,
        )

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer `query` from the documents of `nodes`; the additional ones are only passed on as sources."""
        _refuse(response_kwargs)
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        if not nodes:
            response = self._nothing([])
        else:
            question = _question(query)
            sources = [*nodes, *(additional_source_nodes or ())]
            with self._callback_manager.event(
                CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}
            ) as event:
                request = self._request(nodes, sources)
                if request is None:
                    response = self._nothing(sources)
                elif self._streaming:
                    response = StreamingResponse(_tokens(request, question), sources, request.metadata)
                else:
                    response = Response(_answer(request, question), sources, request.metadata)
                event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As `synthesize`; archives are opened and the answer is worked out in threads."""
        _refuse(response_kwargs)
        dispatcher.event(SynthesizeStartEvent(query=query))
        response: RESPONSE_TYPE
        if not nodes:
            response = self._anothing([])
        else:
            question = _question(query)
            sources = [*nodes, *(additional_source_nodes or ())]
            with self._callback_manager.event(
                CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}
            ) as event:
                request = await in_thread(lambda should_stop: self._request(nodes, sources, should_stop))
                if request is None:
                    response = self._anothing(sources)
                elif self._streaming:
                    response = AsyncStreamingResponse(_atokens(request, question), sources, request.metadata)
                else:
                    response = Response(await _aanswer(request, question), sources, request.metadata)
                event.on_end(payload={EventPayload.RESPONSE: response})
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from texts without nodes: each by the archive of its text, if there is one."""
        _refuse(response_kwargs)
        question, nodes = _question(query_str), _as_nodes(text_chunks)
        request = self._request(nodes, nodes)
        if request is None:
            return self._empty_response_generator() if self._streaming else self._empty_response
        return _tokens(request, question) if self._streaming else _answer(request, question)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`, without blocking the event loop."""
        _refuse(response_kwargs)
        question, nodes = _question(query_str), _as_nodes(text_chunks)
        request = await in_thread(lambda should_stop: self._request(nodes, nodes, should_stop))
        if request is None:
            return self._empty_response_agenerator() if self._streaming else self._empty_response
        return _atokens(request, question) if self._streaming else await _aanswer(request, question)

    def _get_prompts(self) -> dict[str, Any]:
        """None: the catalog's layout is the prompt, and its beginning is in every archive."""
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ConfigError("the prompt of archived documents is the catalog's layout; make a catalog with another")

    def _request(
        self,
        nodes: Sequence[NodeWithScore],
        sources: Sequence[NodeWithScore],
        should_stop: ShouldStop | None = None,
    ) -> _Request | None:
        """Find the documents and put them together; None where no node has any text."""
        options, started = self._options, time.perf_counter()
        resolution = resolve(
            [node.node for node in nodes],
            self._catalog,
            on_missing=options.on_missing,
            metadata_mode=options.metadata_mode,
            should_stop=should_stop,
        )
        if not resolution.documents:
            return None
        if options.best_last:
            resolution = resolution.reversed()
        composition = Composition(
            [document.document for document in resolution.documents],
            positions=options.positions,
            weighting=options.weighting,
        )
        if options.recompute_tokens and len(composition.documents) > 1:
            composition = recompute(composition, options.recompute_tokens, on_progress=stop_check(should_stop))
        llm = RagKVLLM(
            self._model,
            source=composition,
            policy=options.policy,
            budget=options.budget,
            max_new_tokens=options.max_new_tokens,
            evidence=options.evidence,
            computed=resolution.computed,
            callback_manager=self._callback_manager,
        )
        metadata: dict[str, Any] = self._get_metadata_for_response([node.node for node in sources]) or {}
        metadata[METADATA_KEY] = {
            "documents": [document.to_dict() for document in resolution.documents],
            "on_missing": {"policy": options.on_missing, **resolution.to_dict()},
            "resolve_s": time.perf_counter() - started,
        }
        return _Request(resolution, llm, metadata)

    def _nothing(self, sources: list[NodeWithScore]) -> Response | StreamingResponse:
        if self._streaming:
            return StreamingResponse(self._empty_response_generator(), sources)
        return Response(self._empty_response, sources)

    def _anothing(self, sources: list[NodeWithScore]) -> Response | AsyncStreamingResponse:
        if self._streaming:
            return AsyncStreamingResponse(self._empty_response_agenerator(), sources)
        return Response(self._empty_response, sources)

    def _count(self, text: str) -> list[int]:
        return data_ids(self._model.tokenizer, text)


def _answer(request: _Request, question: str) -> str:
    completion = request.llm.complete(question)
    request.fill(completion)
    return str(completion.text)


async def _aanswer(request: _Request, question: str) -> str:
    completion = await request.llm.acomplete(question)
    request.fill(completion)
    return str(completion.text)


def _tokens(request: _Request, question: str) -> TokenGen:
    with closing(request.llm.stream_complete(question)) as responses:
        for response in responses:
            if response.delta:
                yield response.delta
            request.fill(response)


async def _atokens(request: _Request, question: str) -> TokenAsyncGen:
    async with aclosing(await request.llm.astream_complete(question)) as responses:
        async for response in responses:
            if response.delta:
                yield response.delta
            request.fill(response)


def _question(query: QueryType) -> str:
    """The text of a query, refused before anything is prefilled or built for it if it is empty."""
    question = query.query_str if isinstance(query, QueryBundle) else query
    check_options(question=question)
    return question


def _as_nodes(texts: Sequence[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text)) for text in texts]


def _refuse(unknown: dict[str, Any]) -> None:
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: not an option of a call; give options to RagKVSynthesizer")
