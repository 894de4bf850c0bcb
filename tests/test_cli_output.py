"""What the command line takes for a path, and what it writes where the terminal cannot show it."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragkv import Archive, Catalog, build_archive
from ragkv.archive.files import local_path
from ragkv.archive.inspect import describe_archive
from ragkv.archive.verify import verify_archive
from ragkv.cli.app import app
from ragkv.cli.catalog import catalog
from ragkv.cli.common import local
from ragkv.errors import ConfigError
from tests.archives import loaded

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
    assert next(word for word in words if "://" in word) in str(result.exception)
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
