"""Ask one question: through the archive by recall, or densely by prefilling the document again for comparison."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList

from ragkv.archive import Archive
from ragkv.cache import ArchiveCache
from ragkv.errors import ConfigError
from ragkv.kv import kv_nbytes
from ragkv.layout import question_ids
from ragkv.policy import RecallPolicy
from ragkv.prefill import prefill_cache
from ragkv.streamer import AnswerStreamer, StopAtText
from ragkv.trace import RecallTrace

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
    that was estimated from prototypes; ``clusters`` counts those of the KV head that has most.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names that ``ragkv ask --json`` prints."""
        values = asdict(self)
        return {"answer": values.pop("text"), **values}


def ask(
    archive: Archive,
    question: str,
    *,
    policy: RecallPolicy | None = None,
    budget: int | None = None,
    mode: str = "recall",
    max_new_tokens: int = 64,
    on_text: Callable[[str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Answer:
    """Answer `question` about the archived document, greedily.

    What is recalled follows `policy`, by default that of the archive's recipe, with `budget` tokens where it is given.

    ``mode="recall"`` prefills the question only. ``mode="dense"`` prefills the whole document again with the model's
    own attention, for comparison; `on_progress` then receives (tokens done, tokens in all). `on_text` receives the
    answer piece by piece.

    Raises
    ------
    ConfigError
        If the question is empty, or an option is out of range.
    """
    check_options(budget=budget, mode=mode, max_new_tokens=max_new_tokens, question=question)
    model, tokenizer, layout = archive.model.model, archive.model.tokenizer, archive.manifest.layout
    inputs = archive.pad([question_ids(tokenizer, layout, question)])
    trace = RecallTrace(keep_steps=False)
    started = time.perf_counter()
    cache: Cache
    if mode == "recall":
        cache = ArchiveCache(archive, policy=policy, budget=budget, observer=trace)
    else:
        context = archive.tokens.ids
        cache = prefill_cache(model, context.tolist(), on_progress=on_progress)
        inputs = after_context(context, inputs)
    streamer = AnswerStreamer(tokenizer, cache, stop=layout.stop, on_text=on_text)
    generate_greedy(model, inputs, cache, streamer=streamer, max_new_tokens=max_new_tokens)
    gaps = [later - earlier for earlier, later in pairwise(streamer.times)]
    return Answer(
        text=streamer.text,
        token_ids=tuple(streamer.token_ids),
        mode=mode,
        archive_tokens=archive.n_tokens,
        prefilled_tokens=streamer.prefilled_tokens,
        ttft_s=streamer.times[0] - started,
        tpot_s=statistics.median(gaps) if gaps else None,
        recalled_tokens=trace.recalled_tokens,
        unrecalled_mass=trace.unrecalled_mass,
        kv_bytes=_kv_bytes(archive, cache, trace),
        clusters=max((count for layer in archive.manifest.layers for count in layer.clusters), default=0),
    )


def check_options(
    *, budget: int | None = None, mode: str = "recall", max_new_tokens: int = 1, question: str = "?"
) -> None:
    """Refuse options of `ask` that are out of range, before anything is loaded."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; give one of {', '.join(MODES)}")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; give at least 1")
    if budget is not None and budget < 1:
        raise ConfigError(f"budget is {budget!r}; give a whole number of tokens of at least 1")
    if not question.strip():
        raise ConfigError("the question is empty; ask something")


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
        stopping_criteria=StoppingCriteriaList([StopAtText(streamer)]),
    )


def _kv_bytes(archive: Archive, cache: Cache, trace: RecallTrace) -> KVBytes:
    if not isinstance(cache, ArchiveCache):
        held = kv_nbytes(cache)
        return KVBytes(dense=held, resident=held, archive=archive.disk_bytes)
    return KVBytes(
        dense=archive.dense_bytes + cache.local_bytes,
        resident=archive.resident_bytes + cache.local_bytes + trace.largest_fetch,
        archive=archive.disk_bytes,
    )
