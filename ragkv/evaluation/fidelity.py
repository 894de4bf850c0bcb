"""How far recall is from dense attention: KL divergence and agreement, teacher-forced on the dense answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean

import torch
from transformers import Cache, DynamicCache

from ragkv.answer.stream import AnswerStreamer
from ragkv.evaluation.stats import clustered_error
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import fork_cache
from ragkv.model.prompt import question_ids
from ragkv.recall.archive import Archive
from ragkv.recall.cache import ArchiveCache
from ragkv.recipe import RecallPolicy


@dataclass(frozen=True)
class Fidelity:
    """``kl`` is the mean KL(dense || recall) in nats over all answer positions, ``top1`` the share of positions with
    the same most likely token; ``standard_error`` of both over questions. Every question and answer token went through
    recall in every layer, and the next token was always the dense one.
    """

    kl: float
    top1: float
    kl_standard_error: float
    top1_standard_error: float
    n_positions: int
    n_questions: int


@torch.no_grad()
def measure_fidelity(
    archive: Archive,
    dense: DynamicCache,
    questions: Sequence[str],
    *,
    policy: RecallPolicy | None = None,
    budget: int | None = None,
    max_new_tokens: int = 24,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Compare recall with `dense`, the model's own cache of the same prefix and document.

    `dense` is not changed. Answers end at the layout's stop strings, at the end token, or
    after `max_new_tokens`.
    """
    answers = dense_answers(archive, dense, questions, max_new_tokens=max_new_tokens)
    return fidelity_to(answers, archive, policy=policy, budget=budget, on_progress=on_progress)


@dataclass(frozen=True)
class DenseAnswer:
    """The dense model's own answer to one question, and the inputs that led to it."""

    inputs: dict[str, torch.Tensor]
    decoded: Decoded


@torch.no_grad()
def dense_answers(
    archive: Archive, dense: DynamicCache, questions: Sequence[str], *, max_new_tokens: int = 24
) -> list[DenseAnswer]:
    """What `dense` answers to each question behind the document of `archive`, whatever else the archive holds."""
    model, layout, found = archive.model, archive.manifest.layout, []
    for question in questions:
        inputs = archive.pad([question_ids(model.tokenizer, layout, question)])
        decoded = decode_answer(model, inputs, fork_cache(dense), stop=layout.stop, max_new_tokens=max_new_tokens)
        found.append(DenseAnswer(inputs, decoded))
    return found


@torch.no_grad()
def fidelity_to(
    answers: Sequence[DenseAnswer],
    archive: Archive,
    *,
    policy: RecallPolicy | None = None,
    budget: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Fidelity:
    """Compare recall with dense answers; options as for `measure_fidelity`."""
    model, layout = archive.model, archive.manifest.layout
    kl_by_question: list[list[float]] = []
    hit_by_question: list[list[float]] = []
    for done, answer in enumerate(answers):
        reference = answer.decoded
        recalled = decode_answer(
            model,
            answer.inputs,
            ArchiveCache(archive, policy=policy, budget=budget),
            stop=layout.stop,
            max_new_tokens=len(reference.token_ids),
            forced=reference.token_ids,
        )
        kl_by_question.append(kl_divergence(reference.logits, recalled.logits).tolist())
        hit_by_question.append(agreement(reference.logits, recalled.logits).tolist())
        if on_progress is not None:
            on_progress(done + 1, len(answers))
    kl, hits = [*chain.from_iterable(kl_by_question)], [*chain.from_iterable(hit_by_question)]
    return Fidelity(
        kl=fmean(kl),
        top1=fmean(hits),
        kl_standard_error=clustered_error(kl_by_question),
        top1_standard_error=clustered_error(hit_by_question),
        n_positions=len(kl),
        n_questions=len(answers),
    )


def kl_divergence(dense_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(dense || other) in nats per position; logits (n_positions, vocab) of any dtype."""
    log_p, log_q = dense_logits.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def agreement(dense_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """1 where the other's most likely token is a most likely one of dense, else 0; float32 (n_positions,).

    In bfloat16 the two best logits of dense are often the very same number: either token agrees then.
    """
    chosen = dense_logits.gather(-1, logits.argmax(-1, keepdim=True))
    return (chosen == dense_logits.amax(-1, keepdim=True))[..., 0].float()


@dataclass(frozen=True)
class Decoded:
    """One answer, greedy or forced: ``logits`` (n_positions, vocab) that chose or would have chosen ``token_ids``.

    ``text`` is cut at the layout's stop strings; ``ttft_s`` and ``step_s`` are seconds of the question and of every
    further token.
    """

    token_ids: tuple[int, ...]
    text: str
    logits: torch.Tensor
    ttft_s: float
    step_s: tuple[float, ...]


@torch.no_grad()
def decode_answer(
    model: LoadedModel,
    inputs: dict[str, torch.Tensor],
    cache: Cache,
    *,
    stop: tuple[str, ...],
    max_new_tokens: int,
    forced: Sequence[int] | None = None,
) -> Decoded:
    """Answer one question step by step through any cache, from `inputs` as `Archive.pad` makes them.

    Ends at a stop string, the end token, or after `max_new_tokens`; with `forced`, those tokens are fed whatever the
    logits say, and as many positions are read.
    """
    ends = model.model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    streamer = AnswerStreamer(model.tokenizer, cache, stop=stop)
    streamer.put(inputs["input_ids"])
    token, position, logits = inputs["input_ids"], inputs["position_ids"], []
    started = time.perf_counter()
    while True:
        step = model.model(token, position_ids=position, cache=cache, use_cache=True, logits_to_keep=1)
        logits.append(step.logits[0, -1])
        token = logits[-1].argmax().reshape(1, 1)
        if forced is not None:
            token = torch.full_like(token, forced[len(logits) - 1])
        streamer.put(token)
        n_wanted = max_new_tokens if forced is None else len(forced)
        ended = forced is None and (streamer.stopped or streamer.token_ids[-1] in end_ids)
        if ended or len(logits) == n_wanted:
            break
        position = position[:, -1:] + 1
    return Decoded(
        token_ids=tuple(streamer.token_ids),
        text=streamer.text,
        logits=torch.stack(logits),
        ttft_s=streamer.times[0] - started,
        step_s=tuple(later - earlier for earlier, later in pairwise(streamer.times)),
    )
