"""The comparison with plain LlamaIndex runs, and says what is wrong with what it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.query_engine import cut, main
from tests.archives import loaded
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.timeout(60)
def test_both_engines_are_timed_on_the_same_questions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(model), "--tokens", "1500", "--documents", "3", "--questions", "2", "--json"]
    assert main(words) == 0
    (row,) = json.loads(capsys.readouterr().out)["lengths"]
    assert (row["tokens"], row["documents"], row["questions"]) == (1500, 3, 2)
    assert row["ratio"] == pytest.approx(row["plain_ttft_s"] / row["ragkv_ttft_s"])
    assert row["build_s"] > 0


def test_documents_are_the_text_cut_at_tokens() -> None:
    text = "The keeper of the lighthouse wrote the time of every ship in a green book. " * 8
    documents = cut(loaded("llama"), text, n_tokens=90, n_documents=3)
    assert len(documents) == 3
    assert text.startswith("".join(documents))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "0"], "--documents is 0"),
        (["--tokens", "9"], "--tokens is 9 for 8 documents"),
        (["--text", "nowhere.txt"], "cannot be read"),
    ],
)
def test_wrong_numbers_are_one_sentence_before_a_model_is_loaded(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "no/such-model", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_text_that_is_too_short_is_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("A ship.", encoding="utf-8")
    assert main(["--model", str(model), "--tokens", "100", "--text", str(tmp_path / "short.txt")]) == 2
    assert "give a longer --text" in " ".join(capsys.readouterr().err.split())
