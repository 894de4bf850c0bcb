"""Text: files say in one sentence what is wrong with them, and sentences end where they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv.text import ends_sentence, read_questions, read_text, sentences


def split(text: str, *, certain: bool = False) -> list[str]:
    return [text[start:end] for start, end in sentences(text, certain=certain)]


def test_a_file_that_is_no_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 3\)"):
        read_text(tmp_path / "latin")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path / "missing")


def test_questions_are_the_lines_with_text(tmp_path: Path) -> None:
    (tmp_path / "asked").write_text("Who?\n\n  When? \n", encoding="utf-8")
    assert read_questions(tmp_path / "asked") == ("Who?", "When?")
    (tmp_path / "asked").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no questions"):
        read_questions(tmp_path / "asked")


def test_lines_are_sentences_to_read_by_and_none_for_sure() -> None:
    text = "A list:\nsalt\nwool\nIt was sold. all of it! He left."
    assert split(text) == ["A list:", "salt", "wool", "It was sold.", "all of it!", "He left."]
    assert split(text, certain=True) == ["A list:\nsalt\nwool\nIt was sold. all of it!", "He left."]


@pytest.mark.parametrize("text", ["Then Lt. Hale met Dr. J. Ito.", "See p. 5 of Vol. 2 there.", "2. It rose."])
@pytest.mark.parametrize("certain", [False, True])
def test_a_full_stop_after_an_abbreviation_or_a_number_ends_nothing(text: str, certain: bool) -> None:
    assert split(f"It fell. {text} It fell.", certain=certain) == ["It fell.", text, "It fell."]


def test_a_part_of_a_text_is_split_alone() -> None:
    assert [*sentences("One. Two. Three.", 5, 9)] == [(5, 9)]


def test_the_end_of_a_sentence_may_stand_in_quotes() -> None:
    assert ends_sentence('He said "no."')
    assert ends_sentence("\u4ed6\u8bf4\u300c\u597d\u3002\u300d")
    assert not ends_sentence("A heading")
