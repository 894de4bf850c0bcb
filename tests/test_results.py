"""A folder of results knows what is its own; what follows a document is text, whatever it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragkv.errors import ConfigError
from ragkv.evaluation.results import ResultsFolder
from ragkv.evaluation.run import Measured, Task, run
from ragkv.model.prompt import PromptLayout, data_ids
from tests.archives import loaded


@pytest.mark.parametrize("line", ["{}", "[1]", "null", "torn", '{"outcomes": [], "nll": []}', "\udcff"])
def test_results_that_were_not_written_here_are_refused(tmp_path: Path, line: str) -> None:
    results = ResultsFolder(tmp_path, {}, Measured)
    (tmp_path / "results.jsonl").write_bytes(f"{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"results\.jsonl' is damaged; delete it to measure again"):
        results.read()


def test_damaged_settings_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"settings\.json' is damaged; choose another --out$"):
        ResultsFolder(tmp_path, {}, Measured)


def test_a_folder_whose_settings_were_being_written_is_taken(tmp_path: Path) -> None:
    """A crash leaves the part that was written under another name."""
    (tmp_path / "settings.part").write_text("{", encoding="utf-8")
    ResultsFolder(tmp_path, {"seed": 1}, Measured)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_special_tokens_in_a_continuation_are_text_and_nothing_else(tmp_path: Path) -> None:
    """A literal end of text in a story was fed as the token that ends one."""
    model, layout, text = loaded("llama"), PromptLayout.plain(), "The tide rose <|eos|> in the north. " * 4
    forced: list[list[int]] = []

    def keep(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        forced.append(given[0][0].tolist() if given else [])

    hook = model.model.register_forward_pre_hook(keep)
    try:
        results = ResultsFolder(tmp_path / "results", {}, Measured)
        (found,) = run(model, [Task("story", text, continuation=text)], (), results, layout=layout)
    finally:
        hook.remove()
    assert len(found.nll) == len(data_ids(model.tokenizer, text)) - 1
    assert forced[-1] == data_ids(model.tokenizer, text)
    assert model.tokenizer.eos_token_id not in forced[-1]
