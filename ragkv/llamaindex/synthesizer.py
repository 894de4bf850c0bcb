"""A response synthesizer that answers from the archives of the nodes it is given."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import RESPONSE_TYPE, Response
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation.events.synthesis import SynthesizeEndEvent, SynthesizeStartEvent
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE, TokenAsyncGen, TokenGen

from ragkv.answer.ask import check_options
from ragkv.catalog.catalog import Catalog
from ragkv.errors import ConfigError
from ragkv.llamaindex.documents import Resolution, loaded_model, resolve
from ragkv.llamaindex.llm import PlainHoldsModel, RagKVLLM
from ragkv.llamaindex.options import AnswerOptions, shows_options_of
from ragkv.llamaindex.streaming import ShouldStop, in_thread, stop_check
from ragkv.model.prompt import data_ids
from ragkv.recall.composition import Composition
from ragkv.recall.recompute import recompute

METADATA_KEY = "ragkv"
dispatcher = instrument.get_dispatcher(__name__)


@dataclass(frozen=True)
class _Request:
    """The documents of one question, the LLM over them, and the report that its response will have."""

    resolution: Resolution
    llm: RagKVLLM
    report: dict[str, Any]

    def fill(self, completion: CompletionResponse) -> None:
        """Add what was measured to the report, in place: a streaming response holds it already."""
        if completion.raw is None:
            return
        measured = dict(completion.raw["ragkv"])
        documents = self.resolution.documents
        if measured["evidence"]:
            measured["evidence"] = [
                {"id": document.id, **found} for document, found in zip(documents, measured["evidence"], strict=True)
            ]
        self.report.update(usage=completion.raw["usage"], **measured)


@dataclass
class _Turn:
    """One question between the events of its beginning and its end; the response is put in meanwhile."""

    question: str = ""
    sources: list[NodeWithScore] = field(default_factory=list)
    response: RESPONSE_TYPE = field(default_factory=lambda: Response(None))


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
    streaming, empty_response, callback_manager
        As for every synthesizer of LlamaIndex.
    **options
        See `ragkv.llamaindex.options.AnswerOptions`, whose fields they are.
    """

    @shows_options_of(AnswerOptions)
    def __init__(
        self,
        catalog: Catalog,
        *,
        streaming: bool = False,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        self._catalog, self._model = catalog, loaded_model(catalog)
        self._options = AnswerOptions(**options)
        llm = RagKVLLM(self._model, max_new_tokens=self._options.max_new_tokens)
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
        with self._turn(query, nodes, additional_source_nodes) as turn:
            request = self._request(nodes)
            turn.response = self._respond(self._text(request, turn.question), turn.sources, request)
        return turn.response

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As `synthesize`, without blocking the event loop."""
        _refuse(response_kwargs)
        with self._turn(query, nodes, additional_source_nodes) as turn:
            request = await in_thread(lambda should_stop: self._request(nodes, should_stop))
            turn.response = self._respond(await self._atext(request, turn.question), turn.sources, request)
        return turn.response

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from texts without nodes: each by the archive of its text, if there is one."""
        _refuse(response_kwargs)
        question = _question(query_str)
        return self._text(self._request(_as_nodes(text_chunks)), question)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`, without blocking the event loop."""
        _refuse(response_kwargs)
        question, nodes = _question(query_str), _as_nodes(text_chunks)
        return await self._atext(await in_thread(lambda should_stop: self._request(nodes, should_stop)), question)

    def _get_prompts(self) -> dict[str, Any]:
        """None: the catalog's layout is the prompt, and its beginning is in every archive."""
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ConfigError("the prompt of archived documents is the catalog's layout; make a catalog with another")

    @contextmanager
    def _turn(
        self, query: QueryType, nodes: Sequence[NodeWithScore], more: Sequence[NodeWithScore] | None
    ) -> Iterator[_Turn]:
        """Tell LlamaIndex of the beginning and the end of an answer; without nodes its callbacks hear nothing."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        turn = _Turn()
        if nodes:
            turn.question, turn.sources = _question(query), [*nodes, *(more or ())]
            with self._callback_manager.event(
                CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: turn.question}
            ) as event:
                yield turn
                event.on_end(payload={EventPayload.RESPONSE: turn.response})
        else:
            yield turn
        dispatcher.event(SynthesizeEndEvent(query=query, response=turn.response))

    def _request(self, nodes: Sequence[NodeWithScore], should_stop: ShouldStop | None = None) -> _Request | None:
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
        report = {
            "documents": [document.to_dict() for document in resolution.documents],
            "on_missing": {"policy": options.on_missing, **resolution.to_dict()},
            "resolve_s": time.perf_counter() - started,
        }
        return _Request(resolution, llm, report)

    def _text(self, request: _Request | None, question: str) -> RESPONSE_TEXT_TYPE:
        """The answer, or its pieces where it streams; LlamaIndex's empty response where there is nothing to ask."""
        if request is None:
            return self._empty_response_generator() if self._streaming else self._empty_response
        if self._streaming:
            return _tokens(request, question)
        completion = request.llm.complete(question)
        request.fill(completion)
        return str(completion.text)

    async def _atext(self, request: _Request | None, question: str) -> RESPONSE_TEXT_TYPE:
        """As `_text`, for the running event loop."""
        if request is None:
            return self._empty_response_agenerator() if self._streaming else self._empty_response
        if self._streaming:
            return _atokens(request, question)
        completion = await request.llm.acomplete(question)
        request.fill(completion)
        return str(completion.text)

    def _respond(
        self, text: RESPONSE_TEXT_TYPE, sources: list[NodeWithScore], request: _Request | None
    ) -> RESPONSE_TYPE:
        """The response of the kind that `text` asks for; its metadata are those of the sources, and the report."""
        response = self._prepare_response_output(text, sources)
        if request is not None:
            response.metadata = {**(response.metadata or {}), METADATA_KEY: request.report}
        return response

    def _count(self, text: str) -> list[int]:
        return data_ids(self._model.tokenizer, text)


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
