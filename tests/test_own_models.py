"""Models by what they are: one that is in memory already, a local folder that is never a hub id, a template's date."""

from __future__ import annotations

import logging
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import ragkv.model.load
from ragkv import Archive, LoadedModel, ask, build_archive
from ragkv.archive.manifest import read_manifest
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.attention import is_attached
from ragkv.model.load import load_config, load_model, local_name
from ragkv.model.prompt import CHAT_PROMPT, TEMPLATE_DATE, PromptLayout, _rendered
from tests.archives import SMALL
from tests.test_cli import run
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

# --- a model that is in memory already


def test_a_model_of_ones_own_is_attached_and_answers(tmp_path: Path) -> None:
    own = tiny_model("llama").train()
    model = LoadedModel.of(own, tiny_tokenizer(), name="someone/their-llama")
    assert model.model is own
    assert is_attached(own)
    assert not own.training
    build = build_archive(model, TEXT, tmp_path / "archive", recipe=SMALL)
    assert build.manifest.model_name == "someone/their-llama"
    assert ask(Archive.open(tmp_path / "archive", model), "Who kept the book?", max_new_tokens=2).token_ids


def test_an_architecture_that_cannot_be_archived_is_refused_untouched() -> None:
    own = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported"):
        LoadedModel.of(own, tiny_tokenizer(), name="own")
    assert not is_attached(own)


@pytest.mark.parametrize(
    ("model", "tokenizer", "name", "said"),
    [
        ("Qwen/Qwen3-8B", None, "own", "model is a str; give a transformers model, or use load_model"),
        (torch.nn.Linear(2, 2), None, "own", "model is a Linear; give a transformers model"),
        (None, "Qwen/Qwen3-8B", "own", "tokenizer is a str, which gives no character offsets"),
        (None, None, "", "name is ''; give demo, a hub id"),
        (None, None, 3, "name is 3; give demo, a hub id"),
    ],
)
def test_what_is_no_model_no_tokenizer_or_no_name_is_one_sentence(
    model: object, tokenizer: object, name: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        LoadedModel.of(model or tiny_model("llama"), tokenizer or tiny_tokenizer(), name=name)
    assert "\n" not in str(raised.value)


def test_a_model_that_does_not_generate_is_refused() -> None:
    bert = BertModel(BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(UnsupportedModelError, match="'bert' is not supported"):
        LoadedModel.of(bert, tiny_tokenizer(), name="own")


# --- a local folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a model as ``models/tiny``: a relative path that reads like a hub id."""
    folder = tmp_path_factory.mktemp("home")
    tiny_model("llama").save_pretrained(folder / "models" / "tiny")
    tiny_tokenizer().save_pretrained(folder / "models" / "tiny")
    return folder


@pytest.fixture
def home(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(saved, tmp_path / "home"))
    monkeypatch.chdir(folder)
    return folder


def test_a_relative_folder_is_recorded_as_a_folder(home: Path) -> None:
    model = load_model("models/tiny", device="cpu")
    assert model.name == "./models/tiny"
    assert load_model(model.name, device="cpu").name == "./models/tiny"
    own = LoadedModel.of(tiny_model("llama"), tiny_tokenizer(), name="models/tiny")
    assert own.name == "./models/tiny"


@pytest.mark.parametrize("name", ["./models/tiny", "../home/models/tiny", "models/../models/tiny", "models"])
def test_names_of_folders(name: str, home: Path) -> None:
    assert local_name(name) == (name if name.startswith(".") else f"./{name}")
    assert local_name(str(home / "models")) == str(home / "models")
    for other in ("demo", "Qwen/Qwen3-8B", "models/other", "tiny.gguf"):
        assert local_name(other) == other


def test_an_archive_of_a_local_folder_asked_elsewhere_never_asks_the_hub(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "report.txt").write_text(TEXT, encoding="utf-8")
    code, _, fault = run("build", "report.txt", "--model", "models/tiny", "--out", "archives", "--layout", "plain")
    assert code == 0, fault
    archive = home / "archives" / "report" if (home / "archives" / "report").is_dir() else home / "archives"
    assert read_manifest(archive).model_name == "./models/tiny"
    assert run("ask", "Who?", "--archive", archive, "--max-new-tokens", 2)[0] == 0

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    asked: list[str] = []
    monkeypatch.setattr(ragkv.model.load.AutoConfig, "from_pretrained", lambda name, **_: asked.append(name))
    code, _, fault = run("ask", "Who?", "--archive", archive, "--max-new-tokens", 2)
    assert code != 0
    assert asked == []
    assert "model './models/tiny' is a local folder, and there is no such folder here" in fault.replace("\n", " ")
    assert str(home) not in fault
    with pytest.raises(ConfigError, match="is a local folder"):
        load_config("./models/tiny")


def test_a_folder_that_goes_away_while_it_loads_is_not_looked_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers is given cannot be a hub id either."""
    given: list[str] = []
    real = ragkv.model.load._read_config

    def counted(location: str, name: str) -> object:
        given.append(location)
        return real(location, name)

    monkeypatch.setattr(ragkv.model.load, "_read_config", counted)
    load_model("models/tiny", device="cpu")
    load_config("models/tiny")
    assert given == ["./models/tiny"] * 2


# --- the date of a chat template

TODAY = "{{ '<|bos|>' }}Today is {{ strftime_now('%d %B %Y') }}. {{ messages[0]['content'] }}<|eos|>"
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}Today Date: {{ date_string }}\n{{ messages[0]['content'] }}"
)
GIVEN = "{%- if date_string is not defined %}{%- set date_string = '1 May 2020' %}{%- endif %}{{ date_string }} " + (
    "{{ messages[0]['content'] }}"
)
UNUSED = "{%- set now = strftime_now('%Y') %}{{ messages[0]['content'] }}"


def dated(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "written", "warned"),
    [
        (TODAY, "26 July 2024", 1),
        (LLAMA, "Today Date: 26 Jul 2024\nRead the", 1),
        ("\n  {% if true %}" + TODAY + "{% endif %}", "26 July 2024", 1),
        (GIVEN, "1 May 2020 Read the", 0),
        (UNUSED, "Read the", 0),
    ],
    ids=["called", "llama", "in a block", "given", "unused"],
)
def test_a_date_in_a_template_is_fixed_and_said_once(
    template: str, written: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        one, other = PromptLayout.chat(dated(template)), PromptLayout.default(dated(template))
    assert one == other
    assert written in one.prefix
    assert str(datetime.now().year) not in one.prefix
    assert len(caplog.records) == warned
    for record in caplog.records:
        assert TEMPLATE_DATE.strftime("%d %b %Y") in record.message
        assert "\n" not in record.message
        assert "--layout" in record.message


def test_a_template_with_a_date_is_rendered_as_transformers_does_but_for_the_date() -> None:
    for template in (
        TODAY,
        LLAMA,
        UNUSED,
        "\n" + TODAY,
        "{# a comment #}\n" + LLAMA,
        "{{ strftime_now('%-d.%m.%y') }}x",
    ):
        tokenizer, turn = dated(template + "{{ messages[0]['content'] }}"), [{"role": "user", "content": "{q}"}]
        rendered = str(tokenizer.apply_chat_template(turn, tokenize=False))
        layout = _rendered(tokenizer, datetime.now())
        assert layout.replace(CHAT_PROMPT, "{q}") == rendered


def test_archives_of_two_days_have_one_layout(tmp_path: Path) -> None:
    """The clock of the machine is not read at all: see `TEMPLATE_DATE`."""
    model = LoadedModel.of(tiny_model("llama"), dated(TODAY), name="own")
    build = build_archive(model, TEXT, tmp_path / "archive", recipe=SMALL)
    assert "26 July 2024" in build.manifest.layout.prefix
