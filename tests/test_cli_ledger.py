"""``ragkv ledger`` as a user sees it: stdout, stderr and the exit code."""

import json
import subprocess
import sys

import pytest
from transformers import Gemma3TextConfig, Qwen3Config

from ragkv.cli.app import main
from ragkv.cli.output import format_bytes

NUMBERS = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128", "--dtype", "fp16"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``ragkv`` in this process; gives exit code, stdout and stderr."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["ragkv", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def qwen_folder(tmp_path):
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "qwen")
    return tmp_path / "qwen"


def test_json_is_the_only_thing_on_stdout_and_in_bytes(run):
    code, out, err = run("ledger", *NUMBERS, "--tokens", 32768, "--gpu-memory", "24GiB", "--json")
    assert (code, err) == (0, "")
    account = json.loads(out)
    assert account["model"] is None
    assert account["weights_bytes"] is None
    assert account["kv_bytes_per_token"] == 524288
    assert account["gpu_memory_bytes"] == 24 * 2**30
    [row] = account["rows"]
    assert row["kv_bytes"] == row["kv_allocated_bytes"] == 16 * 2**30
    # 1024 heads; 80 exact tokens, 32688 archived in 8172 clusters; 512 bytes a token and head
    # transforms: 15 of 16 coefficients of centroids, keys, values, and half as many mean values; 8 axes, two means
    prototype, transforms = 64 + 32 + 15, 2 * 128 * (120 + 60 + 120 + 120 + 8 + 4)
    assert row["archive_resident_bytes"] == 1024 * (8172 * prototype + 80 * 512 + transforms) + 32 * 80 * 8
    # on disk 3 bits a number of a key and 2.5 of a value, a scale each, and the position; exact tokens a byte a number
    token, exact = 1 + 48 + 1 + 40 + 2, 2 * (128 + 4)
    on_disk = 1024 * (32688 * token + 8172 * prototype + 80 * exact + transforms)
    assert row["archive_disk_bytes"] == on_disk + 32768 * 12 + 8192
    assert row["gpu_share"] == pytest.approx(2 / 3)
    assert row["kv_share"] is row["worth_it"] is row["fits"] is None


def test_json_keys_are_stable(run):
    account = json.loads(run("ledger", *NUMBERS, "--json")[1])
    assert list(account) == [
        "model",
        "n_layers",
        "n_global_layers",
        "max_positions",
        "weights_bytes",
        "gpu_memory_bytes",
        "dtype",
        "batch",
        "kv_bytes_per_token",
        "recipe",
        "rows",
    ]
    assert list(account["rows"][0]) == [
        "n_tokens",
        "kv_bytes",
        "kv_allocated_bytes",
        "kv_share",
        "gpu_share",
        "fits",
        "archive_resident_bytes",
        "archive_disk_bytes",
        "archive_clusters",
        "archive_fits",
        "worth_it",
        "verdict",
    ]
    assert [row["n_tokens"] for row in account["rows"]] == [4096, 16384, 32768, 131072]


def test_a_model_folder_needs_only_its_configuration(run, qwen_folder):
    code, out, _ = run("ledger", "--model", qwen_folder, "--tokens", 1000, "--dtype", "fp32", "--batch", 3, "--json")
    assert code == 0
    account = json.loads(out)
    assert account["max_positions"] == 2048
    assert account["weights_bytes"] == 4 * 105152
    # 2 x 2 layers x 2 heads x 32 dims x 4 bytes x batch 3
    assert account["kv_bytes_per_token"] == 3072
    [row] = account["rows"]
    assert row["kv_bytes"] == 3072 * 1000
    assert row["kv_share"] == pytest.approx(3072000 / (3072000 + 420608))
    assert row["worth_it"] is True


def test_table_shows_verdict_and_the_column_of_windows_only_for_hybrid_models(run, qwen_folder, tmp_path):
    code, dense, _ = run("ledger", "--model", qwen_folder, "--tokens", 1024)
    assert code == 0
    assert "windows" not in dense
    assert "of total memory at 1024 tokens" in dense
    config = Gemma3TextConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2, head_dim=32
    )
    config.save_pretrained(tmp_path / "gemma")
    code, hybrid, _ = run("ledger", "--model", tmp_path / "gemma", "--tokens", 8192)
    assert code == 0
    assert "windows" in hybrid


def test_a_length_beyond_the_model_is_noted_on_stderr(run, qwen_folder):
    code, out, err = run("ledger", "--model", qwen_folder, "--tokens", 4096, "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["n_tokens"] == 4096
    assert err == "note: 4096 tokens are beyond the 2048 positions of this model\n"


def test_recipe_file_changes_the_archive(run, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("tokens_per_cluster = 16\n")
    account = json.loads(run("ledger", *NUMBERS, "--tokens", 32768, "--recipe", recipe, "--json")[1])
    assert account["recipe"]["tokens_per_cluster"] == 16
    assert account["rows"][0]["archive_clusters"] == 2043


def test_plot_is_written_and_json_stays_alone_on_stdout(run, tmp_path):
    code, out, _ = run("ledger", *NUMBERS, "--plot", tmp_path / "kv.svg", "--json")
    assert code == 0
    json.loads(out)
    assert "131,072" in (tmp_path / "kv.svg").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--layers, --kv-heads, --head-dim not given"),
        (["--layers", "2", "--head-dim", "8"], "--kv-heads not given"),
        (["--model", "demo", "--layers", "2"], "--layers was given together with --model 'demo'"),
        ([*NUMBERS, "--dtype", "int3"], "dtype is 'int3'"),
        ([*NUMBERS, "--gpu-memory", "big"], "size is 'big'"),
        ([*NUMBERS, "--gpu-memory", ""], "size is ''"),
        ([*NUMBERS, "--tokens", "0"], "tokens is 0"),
        ([*NUMBERS, "--batch", "0"], "batch is 0"),
        ([*NUMBERS, "--recipe", "no-such-file.toml"], "recipe file 'no-such-file.toml' cannot be read"),
        ([*NUMBERS, "--plot", "kv.gif"], "plot file 'kv.gif'"),
    ],
)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(run, args, message):
    code, out, err = run("ledger", *args, "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_an_interrupt_exits_with_130(run, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ragkv.ledger.ledger.build_ledger", interrupt)
    code, out, _ = run("ledger", *NUMBERS)
    assert (code, out) == (130, "")


def test_help_names_the_command_and_version_is_one_line(run):
    code, out, _ = run("--help")
    assert code == 0
    assert "ledger" in out
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("ragkv ")
    assert out.count("\n") == 1


def test_importing_the_app_does_not_import_torch():
    code = "import sys, ragkv.cli.app; sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (524288, "512.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (16 * 2**30, "16.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_format_bytes(n_bytes, text):
    assert format_bytes(n_bytes) == text
