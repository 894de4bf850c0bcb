"""Ask one question: through the archive by recall, or densely by prefilling the document again for comparison."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList

from ragkv.answer.evidence import AttentionMass
from ragkv.answer.passages import DocumentEvidence
from ragkv.answer.stream import AnswerStreamer, StopAnswer
from ragkv.errors import ConfigError
from ragkv.model.prefill import kv_nbytes, prefill_cache
from ragkv.model.prompt import check_question, question_ids
from ragkv.model.shape import check_length
from ragkv.recall.cache import ArchiveCache
from ragkv.recall.composition import Composition, Document
from ragkv.recall.trace import LayerMeans, Observers, RecallTrace
from ragkv.recipe import RecallPolicy, check_whole

MODES = ("recall", "dense")


@dataclass(frozen=True)
class KVBytes:
    """Bytes of keys and values of one request.

    ``dense`` is the model's own cache of document, question and answer; ``resident`` what was held in memory instead
    (prototypes, exact and local tokens, and the largest recall of one layer); ``archive`` the files on disk.
    """

    dense: int
    resident: int
    archive: int


@dataclass(frozen=True)
class Answer:
    """An answer and what it cost.

    ``prefilled_tokens`` are the tokens that went through the model before the first answer token, read off the
    cache; ``ttft_s`` and ``tpot_s`` are seconds to the first token and per further token (median; None when there was
    only one); ``recalled_tokens`` is the mean per KV head and step, ``unrecalled_mass`` the mean share of attention
    that was estimated from prototypes, and ``layers`` has both by layer; ``clusters`` counts those of the KV head that
    has most. ``evidence`` has an entry for each document in order, if it was asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    mode: str
    archive_tokens: int
    prefilled_tokens: int
    ttft_s: float
    tpot_s: float | None
    recalled_tokens: float
    unrecalled_mass: float
    kv_bytes: KVBytes
    clusters: int
    layers: tuple[LayerMeans, ...] = ()
    evidence: tuple[DocumentEvidence, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names that ``ragkv ask --json`` prints."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            "answer": values.pop("text"),
            **values,
            "token_ids": list(self.token_ids),
            "kv_bytes": asdict(self.kv_bytes),
            "layers": [asdict(layer) for layer in self.layers],
            "evidence": [document.to_dict() for document in self.evidence],
        }


def ask(
    source: Document | Composition,
    question: str,
    *,
    policy: RecallPolicy | None = None,
    budget: int | None = None,
    mode: str = "recall",
    max_new_tokens: int = 64,
    on_text: Callable[[str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    evidence: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> Answer:
    """Answer `question` about one archived document, or several composed, greedily.

    What is recalled follows `policy`, by default that of the archive's recipe, with `budget` tokens where it is given.

    ``mode="recall"`` prefills the question only. ``mode="dense"`` prefills the whole text again, of several documents
    joined, with the model's own attention, for comparison; `on_progress` then receives (tokens done, tokens in all).
    `on_text` receives the answer piece by piece. With `evidence` the answer says which passages it looked at, which
    needs recall. `should_stop` is asked after every token: once it says yes, the answer ends there. It also ends where
    the model's context does, or where a length-dependent RoPE would change, whatever `max_new_tokens` says.

    Raises
    ------
    ConfigError
        If the question is empty or leaves no room for an answer in the model's context, or an option is out of range.
    UnsupportedModelError
        If it leaves none within the length up to which the model's RoPE stays as it is.
    """
    check_options(budget=budget, mode=mode, max_new_tokens=max_new_tokens, question=question)
    if evidence and mode != "recall":
        raise ConfigError(f"evidence is what recall looked at, and mode is {mode!r}; leave mode at 'recall'")
    composition = Composition.of(source)
    model, tokenizer, layout = composition.model.model, composition.model.tokenizer, composition.layout
    ids = question_ids(tokenizer, layout, question)
    max_new_tokens = min(max_new_tokens, _room(composition, len(ids), mode=mode))
    inputs = composition.pad([ids])
    trace = RecallTrace(keep_steps=False)
    mass = AttentionMass(composition) if evidence else None
    started = time.perf_counter()
    cache: Cache
    if mode == "recall":
        cache = ArchiveCache(composition, policy=policy, budget=budget, observer=Observers(trace, mass))
    else:
        context = composition.token_ids
        cache = prefill_cache(model, context.tolist(), on_progress=on_progress)
        inputs = after_context(context, inputs)
    streamer = AnswerStreamer(tokenizer, cache, stop=layout.stop, on_text=on_text)
    generate_greedy(model, inputs, cache, streamer=streamer, max_new_tokens=max_new_tokens, should_stop=should_stop)
    gaps = [later - earlier for earlier, later in pairwise(streamer.times)]
    return Answer(
        text=streamer.text,
        token_ids=tuple(streamer.token_ids),
        mode=mode,
        archive_tokens=composition.n_context,
        prefilled_tokens=streamer.prefilled_tokens,
        ttft_s=streamer.times[0] - started,
        tpot_s=statistics.median(gaps) if gaps else None,
        recalled_tokens=trace.recalled_tokens,
        unrecalled_mass=trace.unrecalled_mass,
        kv_bytes=_kv_bytes(composition, cache, trace),
        layers=trace.layers,
        evidence=() if mass is None else mass.evidence(),
        clusters=max((composition.layer(layer.index).n_clusters for layer in composition.shape.layers), default=0),
    )


def check_options(
    *, budget: int | None = None, mode: str = "recall", max_new_tokens: int = 1, question: str = "?"
) -> None:
    """Refuse options of `ask` that are out of range, before anything is loaded."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    check_whole("max_new_tokens", max_new_tokens, 1)
    if budget is not None:
        check_whole("budget", budget, 1)
    check_question(question)


def _room(composition: Composition, n_question: int, *, mode: str) -> int:
    """Tokens that an answer may have at most: beyond the model's context, or where its RoPE changes, it is noise.

    Raises
    ------
    ConfigError, UnsupportedModelError
        If the question leaves room for none.
    """
    shape = composition.shape
    begin = composition.n_tokens if mode == "recall" else composition.n_context
    check_length(shape, begin + n_question + 1)
    longest = shape.max_positions
    if longest is not None and begin + n_question >= longest:
        raise ConfigError(
            f"the question is {n_question:,} tokens and the documents leave {max(longest - begin, 0):,} of the "
            "model's context; shorten it, or give fewer documents"
        )
    limits = [limit for limit in (longest, shape.static_positions) if limit is not None]
    return min(limits) - begin - n_question if limits else sys.maxsize


def after_context(context: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs of ``generate`` for a dense cache that already holds the tokens `context` (n_tokens,)."""
    ids = torch.cat([context.to(inputs["input_ids"]).unsqueeze(0), inputs["input_ids"]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate_greedy(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    cache: Cache,
    *,
    streamer: AnswerStreamer,
    max_new_tokens: int,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Stock ``generate`` for one question, greedy, whatever sampling defaults the checkpoint carries."""
    own = model.generation_config
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        use_cache=True,
    )
    cast(Any, model).generate(
        **inputs,
        cache=cache,
        generation_config=config,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([StopAnswer(streamer, should_stop)]),
    )


def _kv_bytes(composition: Composition, cache: Cache, trace: RecallTrace) -> KVBytes:
    if not isinstance(cache, ArchiveCache):
        held = kv_nbytes(cache)
        return KVBytes(dense=held, resident=held, archive=composition.disk_bytes)
    return KVBytes(
        dense=composition.dense_bytes + cache.local_bytes,
        resident=composition.resident_bytes + cache.local_bytes + trace.largest_fetch,
        archive=composition.disk_bytes,
    )
