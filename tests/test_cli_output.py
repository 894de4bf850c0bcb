"""What the command line takes for a path, and what it writes where the terminal cannot show it."""

from __future__ import annotations

import inspect
import io
import json
import sys
import typing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragkv import Archive, Catalog, build_archive
from ragkv.archive.files import local_path
from ragkv.archive.inspect import describe_archive
from ragkv.archive.verify import verify_archive
from ragkv.cli.app import app, main
from ragkv.cli.catalog import catalog
from ragkv.cli.common import local
from ragkv.errors import ConfigError
from tests.archives import archive_of, loaded
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

URL = "s3://bucket/x"
COMMANDS = (
    ("build", "report.txt", "--model", "demo", "--out", URL),
    ("build", "gs://bucket/report.txt", "--model", "demo"),
    ("ask", "Who?", "--archive", URL),
    ("ask", "Who?", "--catalog", URL),
    ("inspect", URL),
    ("verify", URL),
    ("bench", "--model", "demo", "--text", "https://example.org/report.txt"),
    ("bench", "--model", "demo", "--layout", "https://example.org/layout.toml"),
    ("calibrate", "--archive", "indexes/report", "--out", URL),
    ("eval", "--model", "demo", "--data", "d", "--suite", "kv75", "--out", "o", "--recipe", "s3://bucket/r.toml"),
    ("ledger", "--model", "demo", "--plot", "hdfs://bucket/plot.png"),
    ("fit", "--log", "file:///requests.jsonl"),
    ("catalog", "add", URL, "report.txt", "--model", "demo"),
    ("catalog", "list", URL),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_url_is_refused_in_one_sentence_and_nothing_is_made(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("A report.", encoding="utf-8")
    result = CliRunner().invoke(app, [*words], prog_name="ragkv")
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("URLs are not supported yet, and '")
    given = next(word for word in words if "://" in word)
    assert f"{given.replace(':///', '://')!r} is one" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_every_path_of_every_command_is_looked_at() -> None:
    functions = [command.callback for command in (*app.registered_commands, *catalog.registered_commands)]
    paths = 0
    for function in functions:
        assert function is not None
        hints = typing.get_type_hints(function, include_extras=True)
        for name in inspect.signature(function).parameters:
            kind, *extras = typing.get_args(hints[name]) or (hints[name],)
            if Path in (kind, *typing.get_args(kind), *(a for k in typing.get_args(kind) for a in typing.get_args(k))):
                (info,) = [each for each in extras if isinstance(each, typer.models.ParameterInfo)]
                assert info.callback is local, f"{function.__name__}: {name}"
                paths += 1
    assert paths > 20


def test_the_library_refuses_urls_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = loaded("llama")
    for call in (
        lambda: build_archive(model, "A report.", URL),
        lambda: Archive.open(Path(URL), model),
        lambda: Catalog.create(URL, model),
        lambda: Catalog.open(URL),
        lambda: verify_archive(URL),
        lambda: describe_archive(URL),
    ):
        with pytest.raises(ConfigError, match="URLs are not supported yet, and 's3://bucket/x' is one"):
            call()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", ["a", "./s3", "/tmp/s3:/x", "C:/x", "~", "a:b/c", "s3:", Path("a/http:/b")])
def test_what_is_no_url_is_a_path_as_it_was(path: str | Path) -> None:
    assert local_path(path) == Path(path)


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> bytes:
    """What the console entry point writes to a stdout that knows ASCII only, as with PYTHONIOENCODING=ascii."""
    shown = io.BytesIO()
    with io.TextIOWrapper(shown, encoding="ascii", write_through=True) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "argv", ["ragkv", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 0
        return shown.getvalue()


def shown(raw: bytes) -> bytes:
    """Without spaces and control characters, of which a random model writes many and a terminal shows few."""
    return bytes(code for code in raw if 32 < code < 127)


def test_an_answer_that_stdout_has_no_codes_for_is_shown_with_replaced_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "sea.txt").write_text(TEXT, encoding="utf-8")
    run(monkeypatch, "build", tmp_path / "sea.txt", "--model", tmp_path / "model", "--out", tmp_path)
    ask = ("ask", "Who?", "--archive", tmp_path / "sea")
    answer = json.loads(run(monkeypatch, *ask, "--json"))["answer"]
    assert not answer.isascii()
    for options in ((), ("--stream",)):
        assert shown(answer.encode("ascii", "replace")) in shown(run(monkeypatch, *ask, *options))


def test_names_in_any_script_are_shown_and_json_stays_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "\u6d77\U0001f6a2.txt"
    build_archive(loaded("llama"), TEXT, tmp_path / "a", document_name=name)
    assert b"??.txt" in run(monkeypatch, "inspect", tmp_path / "a")
    assert json.loads(run(monkeypatch, "inspect", tmp_path / "a", "--json"))["document"]["name"] == name


def inspected(folder: Path, **archive: str) -> str:
    built = archive_of(folder / "a", **archive)
    return CliRunner().invoke(app, ["inspect", str(built.path)], env={"COLUMNS": "200"}).stdout


def test_inspect_says_what_the_manifest_and_the_files_hold(tmp_path: Path) -> None:
    shown, held = inspected(tmp_path, model="gemma3", document=TEXT), describe_archive(tmp_path / "a")
    counts, sizes = held["counts"], held["bytes"]
    attended = counts["n_tokens"] - counts["archived_tokens"]
    assert f"in global layers {counts['archived_tokens']} in clusters and {attended} always attended" in shown
    assert f"clusters    {counts['clusters_asked']} asked of each KV head, " in shown
    assert "recall      budget 256, floor 64, cap 1024" in shown
    assert f"transforms  its own, SHA-256 {held['transforms'][:12]}..." in shown
    assert all(f"{name} " in shown.split("on disk (")[1] for name in sizes if name != "total")


def test_inspect_of_an_archive_without_clusters_says_so(tmp_path: Path) -> None:
    shown = inspected(tmp_path, document="Short.")
    assert "clusters    none: every token is always attended" in shown
    assert "transforms  none" in shown


@pytest.mark.parametrize("words", [(), ("catalog",), ("build",), ("catalog", "add")], ids=" ".join)
def test_help_teaches_by_examples_of_its_own_commands(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "--help"], prog_name="ragkv").stdout
    examples = [line for line in shown.split("Example", 1)[1].splitlines() if line.strip().startswith("ragkv ")]
    assert len(examples) >= 2
    assert all(line.strip().startswith(" ".join(("ragkv", *words))) for line in examples)
