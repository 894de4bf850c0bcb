"""An answer ends where the model's context does: what would come after that is noise."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from ragkv import Archive, Composition, LoadedModel, PromptLayout, ask, attach, build_archive
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.prompt import question_ids
from tests.archives import SMALL
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

QUESTION = "Who kept the book of ships?"
ROOM = 5


def archive_with_room(folder: Path, model: PreTrainedModel, *, rope: bool) -> Archive:
    """An archive whose model has `ROOM` positions left behind `QUESTION`: of its context, or of its RoPE."""
    model.generation_config.eos_token_id = None
    tokenizer, layout = tiny_tokenizer(), PromptLayout.plain()
    n_question = len(question_ids(tokenizer, layout, QUESTION))
    n_context = len(tokenizer(layout.prefix).input_ids) + len(tokenizer(TEXT).input_ids)
    limit = n_context + n_question + ROOM
    if rope:
        parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
        model.config.rope_parameters = {**parameters, "original_max_position_embeddings": limit}
    else:
        model.config.max_position_embeddings = limit
    loaded = LoadedModel(model=attach(model), tokenizer=tokenizer, name="tiny")
    build_archive(loaded, TEXT, folder, recipe=SMALL, layout=layout)
    archive = Archive.open(folder, loaded)
    assert archive.n_tokens == n_context
    return archive


@pytest.mark.parametrize("mode", ["recall", "dense"])
@pytest.mark.parametrize("rope", [False, True], ids=["context", "rope"])
def test_an_answer_takes_no_more_than_the_room_there_is(mode: str, rope: bool, tmp_path: Path) -> None:
    archive = archive_with_room(tmp_path / "a", tiny_model("llama"), rope=rope)
    long = ask(archive, QUESTION, mode=mode, max_new_tokens=64)
    short = ask(archive, QUESTION, mode=mode, max_new_tokens=ROOM)
    assert long.token_ids == short.token_ids
    assert len(long.token_ids) <= ROOM
    assert len(ask(archive, QUESTION, mode=mode, max_new_tokens=2).token_ids) <= 2


def test_a_question_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    archive = archive_with_room(tmp_path / "a", tiny_model("llama"), rope=False)
    with pytest.raises(ConfigError, match=r"leave .* of the model's context"):
        ask(archive, QUESTION + " " + "really " * ROOM)


def test_a_question_that_leaves_no_room_in_the_rope_is_refused(tmp_path: Path) -> None:
    archive = archive_with_room(tmp_path / "a", tiny_model("llama"), rope=True)
    with pytest.raises(UnsupportedModelError, match="keep prefix, document, question and answer within"):
        ask(archive, QUESTION + " " + "really " * ROOM)


def test_dense_reads_documents_one_after_another_whatever_their_positions(tmp_path: Path) -> None:
    archive = archive_with_room(tmp_path / "a", tiny_model("llama"), rope=False)
    both = Composition([archive, archive], positions="reused")
    assert len(ask(both, QUESTION, max_new_tokens=64).token_ids) <= ROOM
    with pytest.raises(ConfigError, match="leave 0 of the model's context"):
        ask(both, QUESTION, mode="dense")
