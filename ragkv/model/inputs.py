"""What ``model.generate`` is given for questions that follow archived documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragkv.errors import ConfigError
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import PromptLayout, question_ids


def question_inputs(
    model: LoadedModel, layout: PromptLayout, questions: Sequence[str], *, first_position: int
) -> dict[str, torch.Tensor]:
    """Inputs for a left-padded batch of questions whose first token stands at `first_position`.

    Returns ``input_ids``, ``attention_mask`` and ``position_ids``, each (n_questions, n_longest) int64.
    """
    if not questions or isinstance(questions, str):
        raise ConfigError("give a list with at least one question")
    ids = [question_ids(model.tokenizer, layout, question) for question in questions]
    return padded_inputs(model, ids, first_position=first_position)


def padded_inputs(
    model: LoadedModel, token_ids: Sequence[Sequence[int]], *, first_position: int
) -> dict[str, torch.Tensor]:
    """As `question_inputs`, from token ids."""
    empty = next((row for row, ids in enumerate(token_ids) if len(ids) == 0), None)
    if len(token_ids) == 0 or empty is not None:
        found = "there are no questions" if empty is None else f"question {empty} has no tokens"
        raise ConfigError(f"{found}; give at least one question, and each at least one token")
    longest = max(len(ids) for ids in token_ids)
    device, tokenizer = model.model.device, model.tokenizer
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    input_ids = torch.full((len(token_ids), longest), 0 if fill is None else fill, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(token_ids):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        mask[row, longest - len(ids) :] = 1
    positions = first_position + (mask.cumsum(1) - 1).clamp_min(0)
    return {
        "input_ids": input_ids.to(device),
        "attention_mask": mask.to(device),
        "position_ids": positions.to(device),
    }
