"""The model as a LlamaIndex LLM: over archived documents, or plain, as the same model without ragkv."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NoReturn, Self

import torch
from llama_index.core.base.llms.generic_utils import (
    astream_completion_response_to_chat_response,
    completion_response_to_chat_response,
)
from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_prompt
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.settings import Settings
from transformers import DynamicCache

from ragkv.answer.ask import Answer, ask, check_options, generate_greedy
from ragkv.answer.stream import AnswerStreamer
from ragkv.errors import ConfigError
from ragkv.llamaindex.streaming import Finished, OnText, ShouldStop, async_pieces, in_thread, pieces
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import prefix_ids
from ragkv.model.shape import check_length, model_shape
from ragkv.recall.composition import Composition, Document
from ragkv.recall.prefilled import PrefilledDocument
from ragkv.recipe import RecallPolicy


class HoldsModel:
    """Mixin of pydantic components: deep copies share the model, and pickling is refused.

    A deep copy would hold the weights twice, and match no archive, which is opened for one model object. Half of a
    component in another process, which is what LlamaIndex makes of parts that cannot be pickled, would answer nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return copy.copy(self)

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} holds an open model and cannot be pickled or sent to another process; make one "
            "there (an IngestionPipeline: run it without num_workers)"
        )


class PlainHoldsModel(HoldsModel):
    """The same for classes that pydantic does not copy."""

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


class RagKVLLM(HoldsModel, CustomLLM):
    """Greedy completion with a loaded model.

    With a `source` the prompt is a question about it, answered by recall, under the layout that the source was built
    with. Without one the prompt is all there is, and goes through the model's own attention: what LlamaIndex does with
    the same model and no archives.

    The last response of every call has token counts in ``raw["usage"]`` (``prompt_tokens`` are all that the answer
    attends to, of which ``prompt_tokens_from_archives`` were computed before; ``prompt_tokens_prefilled`` went through
    the model now) and what `ragkv.answer.ask.Answer` measures in ``raw["ragkv"]``.

    Parameters
    ----------
    source
        An open archive, a document that was prefilled, or a composition of them; opened for `model`.
    policy, budget, evidence
        As for `ragkv.answer.ask.ask`; they need a source.
    stop
        Strings that end a completion without a source; with one, those of its layout do.
    computed
        Places of documents of the source that were archived for this very request, and so count as prefilled.
    messages_to_prompt, completion_to_prompt
        As for every LLM of LlamaIndex: how chat messages and prompts become the text that the model reads.
    """

    max_new_tokens: int
    stop: tuple[str, ...]
    budget: int | None
    evidence: bool
    _model: LoadedModel = PrivateAttr()
    _source: Composition | None = PrivateAttr()
    _policy: RecallPolicy | None = PrivateAttr()
    _computed: frozenset[int] = PrivateAttr()

    def __init__(
        self,
        model: LoadedModel,
        *,
        source: Document | Composition | None = None,
        policy: RecallPolicy | None = None,
        budget: int | None = None,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        evidence: bool = False,
        computed: frozenset[int] = frozenset(),
        callback_manager: CallbackManager | None = None,
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
    ) -> None:
        check_options(budget=budget, max_new_tokens=max_new_tokens)
        composition = None if source is None else Composition.of(source)
        if composition is None and (policy is not None or budget is not None or evidence):
            raise ConfigError("policy, budget and evidence are about recall; give a source, or leave them out")
        if composition is not None and stop:
            raise ConfigError("stop is for completions without a source; with one its layout says what ends an answer")
        if composition is not None and composition.model.model is not model.model:
            raise ConfigError("the source is opened for another model object; open it for the one given")
        super().__init__(
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            budget=budget,
            evidence=evidence,
            callback_manager=callback_manager or Settings.callback_manager,
            messages_to_prompt=messages_to_prompt,
            completion_to_prompt=completion_to_prompt,
        )
        self._model, self._source, self._policy, self._computed = model, composition, policy, computed

    @classmethod
    def class_name(cls) -> str:
        """The name that LlamaIndex's events carry."""
        return "RagKVLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """``context_window`` is what a prompt may take up: with a source, what it leaves of the model's context."""
        longest = model_shape(self._model.model.config).max_positions or DEFAULT_CONTEXT_WINDOW
        taken = 0 if self._source is None else self._source.n_tokens
        return LLMMetadata(
            context_window=max(longest - taken, 0), num_output=self.max_new_tokens, model_name=self._model.name
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt, or answer a question about the source."""
        return self._complete(self._text(prompt, formatted, kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """As `complete`, piece by piece; the last response has the token counts and an empty delta."""
        return self._stream(self._text(prompt, formatted, kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """As `complete`, in a thread, which ends early when the task is cancelled."""
        text = self._text(prompt, formatted, kwargs)
        return await in_thread(lambda should_stop: self._complete(text, should_stop=should_stop))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """As `stream_complete`, for the running event loop."""
        return self._astream(self._text(prompt, formatted, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As ``chat``, in a thread."""
        return completion_response_to_chat_response(
            await self.acomplete(self._prompt_of(messages), formatted=True, **kwargs)
        )

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """As ``stream_chat``, for the running event loop."""
        return astream_completion_response_to_chat_response(
            await self.astream_complete(self._prompt_of(messages), formatted=True, **kwargs)
        )

    def _prompt_of(self, messages: Sequence[ChatMessage]) -> str:
        return str((self.messages_to_prompt or generic_prompt)(messages))

    def _text(self, prompt: str, formatted: bool, unknown: dict[str, Any]) -> str:
        if unknown:
            raise ConfigError(f"{', '.join(sorted(unknown))}: not an option of a call; give options to RagKVLLM itself")
        if formatted or self.completion_to_prompt is None:
            return prompt
        return str(self.completion_to_prompt(prompt))

    def _stream(self, text: str) -> CompletionResponseGen:
        so_far = ""
        with closing(pieces(lambda on_text, stop: self._complete(text, on_text=on_text, should_stop=stop))) as items:
            for item in items:
                if isinstance(item, Finished):
                    yield item.result.model_copy(update={"delta": ""})
                else:
                    so_far += item
                    yield CompletionResponse(text=so_far, delta=item)

    async def _astream(self, text: str) -> CompletionResponseAsyncGen:
        so_far = ""
        work = async_pieces(lambda on_text, stop: self._complete(text, on_text=on_text, should_stop=stop))
        async with aclosing(work) as items:
            async for item in items:
                if isinstance(item, Finished):
                    yield item.result.model_copy(update={"delta": ""})
                else:
                    so_far += item
                    yield CompletionResponse(text=so_far, delta=item)

    def _complete(
        self, text: str, *, on_text: OnText | None = None, should_stop: ShouldStop | None = None
    ) -> CompletionResponse:
        if self._source is None:
            return self._plain(text, on_text, should_stop)
        answer = ask(
            self._source,
            text,
            policy=self._policy,
            budget=self.budget,
            max_new_tokens=self.max_new_tokens,
            on_text=on_text,
            evidence=self.evidence,
            should_stop=should_stop,
        )
        return _response(answer.text, usage_of(answer, self._source, self._computed), report_of(answer))

    def _plain(self, text: str, on_text: OnText | None, should_stop: ShouldStop | None) -> CompletionResponse:
        """Stock generation behind the whole prompt."""
        model, tokenizer = self._model.model, self._model.tokenizer
        ids = torch.tensor([self._prompt_ids(text)], device=model.device)  # (1, n_tokens)
        cache = DynamicCache(config=model.config)
        streamer = AnswerStreamer(tokenizer, cache, stop=self.stop, on_text=on_text)
        started = time.perf_counter()
        generate_greedy(
            model,
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            cache,
            streamer=streamer,
            max_new_tokens=self.max_new_tokens,
            should_stop=should_stop,
        )
        gaps = [later - earlier for earlier, later in pairwise(streamer.times)]
        timed = {"ttft_s": streamer.times[0] - started, "tpot_s": statistics.median(gaps) if gaps else None}
        usage = _usage(
            prompt=ids.shape[1], prefilled=streamer.prefilled_tokens, archived=0, completion=len(streamer.token_ids)
        )
        return _response(streamer.text, usage, timed)

    def _prompt_ids(self, text: str) -> list[int]:
        """Tokens of a prompt, as those of a layout's prefix: one BOS, and special tokens are what they say."""
        if not text:
            raise ConfigError("the prompt is empty; ask something")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the prompt is not valid text: character {error.start} is half a surrogate pair; decode it as UTF-8"
            ) from error
        ids = prefix_ids(self._model.tokenizer, text)
        shape = model_shape(self._model.model.config)
        if shape.max_positions is not None and len(ids) >= shape.max_positions:
            raise ConfigError(
                f"the prompt is {len(ids):,} tokens and the model's context holds {shape.max_positions:,}; shorten it"
            )
        check_length(shape, len(ids) + self.max_new_tokens)
        return ids


def usage_of(answer: Answer, source: Composition, computed: frozenset[int]) -> dict[str, int]:
    """Token counts of an answer.

    A document that was prefilled, now or for its archive, counts with the prefix in front of it, which went through the
    model as well, and so do tokens that were computed again; so prefilled and archived tokens may add up to more than
    the prompt.
    """
    now = [place in computed or isinstance(each, PrefilledDocument) for place, each in enumerate(source.documents)]
    prefix = source.prefix_tokens
    again = source.recomputed_tokens
    archived = sum(each.n_tokens - prefix for each, is_now in zip(source.documents, now, strict=True) if not is_now)
    archived -= sum(n for n, is_now in zip(again, now, strict=True) if not is_now)
    return _usage(
        prompt=answer.prefilled_tokens + source.n_context,
        prefilled=answer.prefilled_tokens
        + sum(again)
        + sum(each.n_tokens for each, is_now in zip(source.documents, now, strict=True) if is_now),
        archived=archived + (0 if now[0] else prefix),
        completion=len(answer.token_ids),
    )


def report_of(answer: Answer) -> dict[str, Any]:
    """What was measured of an answer, as plain values."""
    return {
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "recalled_tokens": answer.recalled_tokens,
        "unrecalled_mass": answer.unrecalled_mass,
        "kv_bytes": asdict(answer.kv_bytes),
        "evidence": [document.to_dict() for document in answer.evidence],
    }


def _usage(*, prompt: int, prefilled: int, archived: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_prefilled": prefilled,
        "prompt_tokens_from_archives": archived,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _response(text: str, usage: dict[str, int], report: dict[str, Any]) -> CompletionResponse:
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return CompletionResponse(text=text, additional_kwargs=counts, raw={"usage": usage, "ragkv": report})
