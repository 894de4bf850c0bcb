"""`ragkv fit`: every answer, every verdict, the request log and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from transformers import Qwen3Config
from typer.testing import CliRunner

from ragkv.cli.fit import fit
from ragkv.errors import ConfigError
from ragkv.ledger.fit import Fit, FitAnswer, Workload, judge
from ragkv.ledger.ledger import ArchiveBytes, KVBytes, LedgerRow
from ragkv.ledger.request_log import percentile, read_log

GOOD = Workload(
    context_median=40_000,
    context_p90=90_000,
    questions_per_document=6,
    look_back_share=0.5,
    tuning_days=10,
    has_evaluation=True,
)
NUMBERS = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128"]
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("fit")(fit)


def row(n_tokens: int, *, kv: int, weights: int | None = 100, card: int | None = None, resident: int = 1) -> LedgerRow:
    """A row of the ledger with round numbers."""
    archive = ArchiveBytes(n_clusters=1, resident=resident, on_disk=1)
    return LedgerRow(n_tokens=n_tokens, kv=KVBytes(kv, kv), archive=archive, weights=weights, gpu_memory=card)


TIGHT = (row(40_000, kv=60), row(90_000, kv=120))  # 60/160 and 120/220 of total memory
SLACK = (row(40_000, kv=10), row(90_000, kv=20))  # 10/110 and 20/120


def the(key: str, result: Fit) -> FitAnswer:
    return next(answer for answer in result.answers if answer.key == key)


def graded(key: str, workload: Workload, rows: tuple[LedgerRow, ...] = TIGHT) -> tuple[str, bool]:
    answer = the(key, judge(workload, rows))
    return answer.answer, answer.borderline


def write_log(folder: Path, *entries: object) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    return path


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout, and the error or stderr, of `ragkv fit WORDS`."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr if result.exception is None else str(result.exception)


def test_five_firm_yeses_fit() -> None:
    result = judge(GOOD, TIGHT)
    assert result.verdict == "fits"
    assert [(answer.answer, answer.is_firm, answer.find_out) for answer in result.answers] == [("yes", True, None)] * 5
    assert result.instead == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"context_median": 2_000, "context_p90": 3_000}, "Contexts are too short."),
        ({"look_back_share": 0.05}, "Answers seldom refer back to earlier text."),
        ({"has_evaluation": False}, "A loss of quality could be neither tuned away nor caught."),
        ({"questions_per_document": 1}, "A document is not asked often enough to repay its build."),
    ],
)
def test_one_firm_no_does_not_fit_and_names_what_to_use_instead(change: dict[str, float], why: str) -> None:
    workload = replace(GOOD, **change)
    rows = tuple(row(length, kv=60) for length in workload.lengths)
    result = judge(workload, rows)
    assert (result.verdict, result.why) == ("does not fit", why)
    assert result.instead


def test_memory_that_is_not_short_does_not_fit_and_prefix_caching_is_named() -> None:
    result = judge(GOOD, SLACK)
    assert result.verdict == "does not fit"
    assert result.instead == ("the plain KV cache", "prefix caching for documents that come again, exact and as quick")


def test_prefix_caching_is_not_advised_for_documents_asked_once() -> None:
    assert not any("prefix" in other for other in judge(replace(GOOD, questions_per_document=1), SLACK).instead)


@pytest.mark.parametrize(
    ("field", "key"), [("look_back_share", "look_back"), ("tuning_days", "tuning"), ("questions_per_document", "reuse")]
)
def test_an_unknown_is_to_be_piloted_and_says_how_to_find_out(field: str, key: str) -> None:
    result = judge(replace(GOOD, **{field: None}), TIGHT)
    assert result.verdict == "pilot first"
    assert the(key, result).answer == "unknown"
    assert the(key, result).find_out
    assert key.replace("_", "-") in result.why


def test_a_firm_no_weighs_more_than_any_doubt() -> None:
    assert judge(Workload(context_median=2_000), ()).verdict == "does not fit"


@pytest.mark.parametrize(
    ("median", "p90", "expected"),
    [
        (16_385, 16_385, ("yes", False)),
        (16_384, 16_384, ("no", False)),
        (16_384, 32_768, ("yes", True)),
        (1_000, 32_769, ("yes", False)),
        (8_192, None, ("no", False)),
        (8_193, None, ("yes", True)),
        (16_385, None, ("yes", False)),
    ],
)
def test_contexts_at_their_thresholds(median: int, p90: int | None, expected: tuple[str, bool]) -> None:
    assert graded("contexts", replace(GOOD, context_median=median, context_p90=p90), ()) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, ("no", False)), (0.1, ("no", False)), (0.11, ("yes", True)), (0.25, ("yes", False)), (1.0, ("yes", False))],
)
def test_look_back_at_its_thresholds(share: float, expected: tuple[str, bool]) -> None:
    assert graded("look_back", replace(GOOD, look_back_share=share)) == expected


@pytest.mark.parametrize(
    ("mean", "expected"), [(1.25, ("no", False)), (1.26, ("yes", True)), (1.99, ("yes", True)), (2.0, ("yes", False))]
)
def test_reuse_repays_a_build_from_the_second_question(mean: float, expected: tuple[str, bool]) -> None:
    assert graded("reuse", replace(GOOD, questions_per_document=mean)) == expected


@pytest.mark.parametrize(
    ("days", "evaluation", "expected"),
    [
        (5, True, ("yes", False)),
        (1, True, ("yes", True)),
        (0, None, ("no", False)),
        (None, False, ("no", False)),
        (None, True, ("unknown", False)),
        (5, None, ("unknown", False)),
    ],
)
def test_room_to_tune(days: float | None, evaluation: bool | None, expected: tuple[str, bool]) -> None:
    assert graded("tuning", replace(GOOD, tuning_days=days, has_evaluation=evaluation)) == expected


@pytest.mark.parametrize(
    ("median", "p90", "expected"),
    [
        ({"kv": 51}, {"kv": 51}, ("yes", False)),  # 51/151 is over a third
        ({"kv": 50}, {"kv": 50}, ("no", False)),  # 50/150 is a third, not over it
        ({"kv": 10}, {"kv": 60}, ("yes", True)),  # at p90 only
        ({"kv": 20, "card": 110}, {"kv": 20, "card": 110}, ("yes", False)),  # 120 of 110: only the archive fits
        ({"kv": 20, "card": 130}, {"kv": 20, "card": 130}, ("no", False)),
        ({"kv": 60, "card": 1000}, {"kv": 60, "card": 1000}, ("yes", True)),  # 160 of 1000: there is room
        ({"kv": 60, "card": 105, "resident": 6}, {"kv": 60, "card": 105, "resident": 6}, ("yes", True)),
        ({"kv": 40, "weights": None, "card": 100}, {"kv": 90, "weights": None, "card": 100}, ("yes", False)),
        ({"kv": 20, "weights": None, "card": 100}, {"kv": 30, "weights": None, "card": 100}, ("unknown", False)),
        ({"kv": 20, "weights": None}, {"kv": 90, "weights": None}, ("unknown", False)),
    ],
)
def test_memory_by_the_ledger(median: dict[str, int], p90: dict[str, int], expected: tuple[str, bool]) -> None:
    assert graded("memory", GOOD, (row(40_000, **median), row(90_000, **p90))) == expected


@pytest.mark.parametrize(
    ("rows", "word", "expected"),
    [
        ((), "unknown", ("unknown", False)),
        ((), "memory", ("yes", False)),
        ((), "latency", ("no", False)),
        (TIGHT, "memory", ("yes", False)),
        (TIGHT, "latency", ("yes", True)),
        (SLACK, "memory", ("no", True)),
        (SLACK, "latency", ("no", False)),
    ],
)
def test_a_word_settles_what_is_open_and_puts_contrary_figures_in_doubt(
    rows: tuple[LedgerRow, ...], word: str, expected: tuple[str, bool]
) -> None:
    assert graded("memory", replace(GOOD, bottleneck=word), rows) == expected


@pytest.mark.parametrize(
    ("questions", "measured", "expected"),
    [
        (1, None, ("no", False)),
        (None, None, ("no", False)),
        (6, None, ("yes", True)),
        (6, 0.81, ("yes", True)),  # 1.25 x 0.81 s is over a second
        (1, 0.8, ("yes", False)),  # 1.25 x 0.8 s is not
    ],
)
def test_an_answer_due_at_once_on_fresh_documents(
    questions: float | None, measured: float | None, expected: tuple[str, bool]
) -> None:
    workload = replace(GOOD, fresh_ttft_limit_s=1, fresh_ttft_p90_s=measured, questions_per_document=questions)
    assert graded("memory", workload) == expected


def test_strict_real_time_on_documents_seen_once_does_not_fit_whatever_else_holds() -> None:
    result = judge(replace(GOOD, fresh_ttft_limit_s=0.5, questions_per_document=1), TIGHT)
    assert result.verdict == "does not fit"
    assert the("memory", result).answer == the("reuse", result).answer == "no"


def test_a_ledger_at_other_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match="no row for 90000 tokens"):
        judge(GOOD, TIGHT[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_median": 0}, "context tokens is 0; give a number of at least 1"),
        ({"context_p90": 39_999}, "context p90 is 39999; give a number of at least 40000, the median"),
        ({"look_back_share": 1.5}, "look-back share is 1.5; give a number from 0 to 1"),
        ({"questions_per_document": 0.5}, "questions per document is 0.5"),
        ({"fresh_ttft_limit_s": float("nan")}, "limit of the first token in seconds is nan"),
        ({"tuning_days": -1}, "tuning days is -1"),
        ({"bottleneck": "disk"}, "bottleneck is 'disk'; give one of memory, latency, unknown"),
    ],
)
def test_a_workload_out_of_range_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(GOOD, **change)
    assert str(caught.value).startswith(message)


def test_percentiles_are_nearest_rank() -> None:
    ten = list(range(1, 11))
    assert [percentile(ten, percent) for percent in (50, 90, 91, 99)] == [5, 9, 10, 10]
    assert percentile([7], 50) == 7


def test_a_log_becomes_percentiles_and_shares(tmp_path: Path) -> None:
    entries = [
        {"context_tokens": 1_000, "document": "a", "ttft_s": 2.0, "cited_position": 488},  # 512 back: not earlier text
        {"context_tokens": 16_384, "document": "a", "ttft_s": 0.1, "cited_position": 15_871},  # 513 back
        {"context_tokens": 16_385, "document": "b", "ttft_s": 4, "looked_back": True, "user": 7},
        {"context_tokens": 32_769, "document": "a", "looked_back": False},
        {"context_tokens": 40_000, "document": None, "cited_position": None},
    ]
    assert read_log(write_log(tmp_path, *entries)) == Workload(
        context_median=16_385,
        context_p90=40_000,
        context_p99=40_000,
        n_requests=5,
        share_beyond_16k=3 / 5,
        share_beyond_32k=2 / 5,
        questions_per_document=2,
        share_asked_once=1 / 2,
        look_back_share=2 / 4,
        n_look_back=4,
        fresh_ttft_p90_s=4,
    )


def test_a_log_of_lengths_alone_leaves_the_rest_unknown_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('\n{"context_tokens": 5}\r\n\n')
    workload = read_log(path)
    assert (workload.n_requests, workload.questions_per_document, workload.look_back_share) == (1, None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON in UTF-8"),
        (b'{"context_tokens": "caf\xe9"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b"[3]", "[3] is not a JSON object"),
        (b"{}", "context_tokens is missing; give a whole number of at least 1"),
        (b'{"context_tokens": 0}', "context_tokens is 0"),
        (b'{"context_tokens": true}', "context_tokens is true"),
        (b'{"context_tokens": 1.5}', "context_tokens is 1.5"),
        (b'{"context_tokens": 9, "document": 3}', "document is 3; give a text"),
        (b'{"context_tokens": 9, "looked_back": 1}', "looked_back is 1; give true or false"),
        (b'{"context_tokens": 9, "cited_position": 9}', "cited_position is 9; give a whole number from 0 to 8"),
        (b'{"context_tokens": 9, "cited_position": -1}', "cited_position is -1"),
        (b'{"context_tokens": 9, "cited_position": 1, "looked_back": true}', "both looked_back and cited_position"),
        (b'{"context_tokens": 9, "ttft_s": NaN}', "ttft_s is NaN"),
        (b'{"context_tokens": 9, "ttft_s": "1"}', 'ttft_s is "1"'),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"context_tokens": 9}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as caught:
        read_log(path)
    assert f"line 3: {message}" in str(caught.value)


def test_an_empty_log_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_log(write_log(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "none.jsonl")


def test_a_log_of_few_requests_cannot_say_that_it_fits(tmp_path: Path) -> None:
    entry = {"context_tokens": 40_000, "document": "a", "looked_back": True}
    rows = (row(40_000, kv=60),)
    verdicts = []
    for n_requests in (29, 30):
        workload = read_log(write_log(tmp_path, *[entry] * n_requests))
        verdicts.append(judge(replace(workload, tuning_days=9, has_evaluation=True), rows).verdict)
    assert verdicts == ["pilot first", "fits"]


def test_json_is_alone_on_stdout_and_its_shape_is_stable(tmp_path: Path) -> None:
    log = write_log(tmp_path, *[{"context_tokens": 20_000, "document": "a", "looked_back": True}] * 30)
    code, shown, fault = run("--log", log, *NUMBERS, "--batch", 2, "--gpu-memory", "24GiB", "--json")
    assert (code, fault) == (0, "")
    result = json.loads(shown)
    assert list(result) == ["verdict", "why", "instead", "answers", "workload", "ledger"]
    assert [answer["key"] for answer in result["answers"]] == ["contexts", "look_back", "memory", "tuning", "reuse"]
    assert {frozenset(answer) for answer in result["answers"]} == {
        frozenset({"question", "key", "answer", "evidence", "rule", "borderline", "find_out"})
    }
    assert result["workload"]["questions_per_document"] == 30
    [account] = result["ledger"]["rows"]
    # 2 x 32 layers x 32 heads x 128 dims x 2 bytes x batch 2 a token
    assert account["kv_bytes"] == 20_000 * 2 * 524_288
    assert result["verdict"] == "pilot first"


def test_a_model_is_accounted_for_and_its_limit_noted_on_stderr(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=2048
    )
    config.save_pretrained(tmp_path / "qwen")
    code, shown, noted = run("--model", tmp_path / "qwen", "--context-tokens", 20_000, "--json")
    assert code == 0
    assert json.loads(shown)["answers"][2]["answer"] == "yes"
    assert noted == "note: 20000 tokens are beyond the 2048 positions of this model\n"


def test_short_chats_get_a_plain_no_with_the_figures() -> None:
    code, shown, _ = run("--context-tokens", 2000, "--context-p90", 5000)
    assert code == 0
    assert "median 2,000, p90 5,000 tokens" in shown
    assert "does not fit: Contexts are too short." in shown
    assert "Instead: the plain KV cache." in shown


def test_an_option_adds_what_the_log_does_not_say(tmp_path: Path) -> None:
    log = write_log(tmp_path, {"context_tokens": 20_000, "document": "a"})
    code, shown, _ = run("--log", log, "--look-back", 0.4, "--json")
    assert code == 0
    assert json.loads(shown)["workload"]["look_back_share"] == 0.4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "neither --log nor --context-tokens was given"),
        (["--context-p90", 9], "neither --log nor --context-tokens was given"),
        (["--log", "LOG", "--context-tokens", 9], "--context-tokens is 9, but the log says 20000 itself"),
        (["--log", "LOG", "--questions-per-document", 2], "--questions-per-document is 2, but the log says 1 itself"),
        (["--context-tokens", 9, "--layers", 2], "--kv-heads, --head-dim not given"),
        (["--context-tokens", 9, "--gpu-memory", 24], "--gpu-memory was given without a model"),
        (["--context-tokens", 9, "--batch", 4], "--batch was given without a model"),
        (["--context-tokens", 9, *NUMBERS, "--dtype", "int3"], "dtype is 'int3'"),
        (["--context-tokens", 9, "--bottleneck", "cpu"], "bottleneck is 'cpu'"),
        (["--log", "none.jsonl"], "request log 'none.jsonl' cannot be read"),
    ],
)
def test_a_user_error_is_one_sentence(tmp_path: Path, words: list[object], message: str) -> None:
    log = write_log(tmp_path, {"context_tokens": 20_000, "document": "a"})
    code, shown, fault = run(*(log if word == "LOG" else word for word in words), "--json")
    assert (code != 0, shown) == (True, "")
    assert fault.startswith(message)
    assert "\n" not in fault


def test_help_teaches_with_two_examples() -> None:
    code, shown, _ = run("--help")
    assert code == 0
    assert shown.count("  ragkv fit --") == 2
