"""How far recall is from dense attention: KL divergence and agreement, teacher-forced on the dense answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ragkv.archive import Archive
from ragkv.cache import ArchiveCache
from ragkv.layout import question_ids
from ragkv.policy import RecallPolicy


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

    `dense` is copied for each question and not changed. Answers end at the layout's stop strings, at the end token, or
    after `max_new_tokens`.
    """
    model, tokenizer, layout = archive.model.model, archive.model.tokenizer, archive.manifest.layout
    kl_by_question, hit_by_question = [], []
    for done, question in enumerate(questions):
        inputs = archive.pad([question_ids(tokenizer, layout, question)])
        answer, dense_logits = _dense_answer(archive, inputs, copy.deepcopy(dense), max_new_tokens)
        logits = _forced(model, inputs, ArchiveCache(archive, policy=policy, budget=budget), answer)
        kl_by_question.append(kl_divergence(dense_logits, logits))
        hit_by_question.append(agreement(dense_logits, logits))
        if on_progress is not None:
            on_progress(done + 1, len(questions))
    kl, hits = torch.cat(kl_by_question), torch.cat(hit_by_question)
    return Fidelity(
        kl=float(kl.mean()),
        top1=float(hits.mean()),
        kl_standard_error=_clustered_error(kl_by_question),
        top1_standard_error=_clustered_error(hit_by_question),
        n_positions=len(kl),
        n_questions=len(questions),
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


def _dense_answer(
    archive: Archive, inputs: dict[str, torch.Tensor], cache: DynamicCache, max_new_tokens: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Greedy dense answer: its tokens but the last one, and the logits (n_positions, vocab) that chose each."""
    model, tokenizer, stop = archive.model.model, archive.model.tokenizer, archive.manifest.layout.stop
    ends = model.generation_config.eos_token_id
    end_ids = set(ends if isinstance(ends, list) else [ends])
    position = inputs["position_ids"]
    step = model(inputs["input_ids"], position_ids=position, cache=cache, use_cache=True, logits_to_keep=1)
    logits, tokens, ids = [step.logits[0, -1]], [], []
    while len(logits) < max_new_tokens:
        token = logits[-1].argmax().reshape(1, 1)
        ids.append(int(token))
        text = str(tokenizer.decode(ids)).lstrip()
        if ids[-1] in end_ids or any(mark in text for mark in stop):
            break
        tokens.append(token)
        position = position[:, -1:] + 1
        step = model(token, position_ids=position, cache=cache, use_cache=True)
        logits.append(step.logits[0, -1])
    return tokens, torch.stack(logits)


def _forced(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Cache, tokens: list[torch.Tensor]
) -> torch.Tensor:
    """Logits (n_positions, vocab) of the same tokens through another cache, one step at a time."""
    position = inputs["position_ids"]
    logits = [model(inputs["input_ids"], position_ids=position, cache=cache, logits_to_keep=1).logits[0, -1]]
    for token in tokens:
        position = position[:, -1:] + 1
        logits.append(model(token, position_ids=position, cache=cache).logits[0, -1])
    return torch.stack(logits)


def _clustered_error(by_question: list[torch.Tensor]) -> float:
    """Standard error of the mean over positions, positions of one question taken as one cluster."""
    counts = torch.tensor([float(len(values)) for values in by_question])
    sums = torch.stack([values.sum() for values in by_question])
    mean = sums.sum() / counts.sum()
    return float((sums - mean * counts).square().sum().sqrt() / counts.sum())
