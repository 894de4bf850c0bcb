"""``ragkv fit``: whether an archive suits a workload, and what to use when it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import JsonOption, local
from ragkv.cli.ledger import Subject, find_subject, print_notes
from ragkv.cli.output import out, print_json
from ragkv.errors import ConfigError
from ragkv.recipe import Recipe

if TYPE_CHECKING:
    from ragkv.ledger.fit import Fit, Workload
    from ragkv.ledger.ledger import LedgerRow

STYLES = {"yes": "green", "no": "red", "unknown": "yellow"}
VERDICT_STYLES = {"fits": "bold green", "pilot first": "bold yellow", "does not fit": "bold red"}


LogOption = Annotated[
    Path | None,
    typer.Option(
        callback=local,
        help="Requests as JSON Lines, in order: context_tokens, and where known document, looked_back or "
        "cited_position, ttft_s. What it says is not to be said again by an option.",
    ),
]
ReuseOption = Annotated[float | None, typer.Option(help="How often a document is asked, mean.")]
LookBackOption = Annotated[
    float | None, typer.Option(help="Share of answers, 0 to 1, that draw on more than the last few hundred tokens.")
]
FreshOption = Annotated[
    float | None, typer.Option(help="Seconds in which the first token is due on documents never seen before.")
]
EvaluationOption = Annotated[
    bool | None, typer.Option("--has-evaluation/--no-evaluation", help="Is there an offline evaluation?")
]
ModelOption = Annotated[
    str | None, typer.Option(help="Hub id, local folder, .gguf file, or 'demo'; only its config is read.")
]


@dataclass(frozen=True, kw_only=True)
class _Account:
    """The options of `ragkv ledger` that say what is accounted for."""

    model: str | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    batch: int
    gpu_memory: str | None
    recipe: Path | None


def fit(
    *,
    log: LogOption = None,
    context_tokens: Annotated[int | None, typer.Option(help="Median context in tokens, instead of --log.")] = None,
    context_p90: Annotated[int | None, typer.Option(help="One context in ten is longer than this.")] = None,
    questions_per_document: ReuseOption = None,
    look_back: LookBackOption = None,
    bottleneck: Annotated[str, typer.Option(help="What limits you: memory, latency or unknown.")] = "unknown",
    fresh_ttft_limit: FreshOption = None,
    tuning_days: Annotated[float | None, typer.Option(help="Days there are to tune.")] = None,
    has_evaluation: EvaluationOption = None,
    model: ModelOption = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers, instead of --model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer, instead of --model.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Dimension of a head, instead of --model.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of cache and weights: bf16, fp16 or fp32.")] = "bf16",
    batch: Annotated[int, typer.Option(help="Sequences held at once.")] = 1,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of the card: 24GiB, 24GB, or 24 for GiB.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(callback=local, help="TOML file that says how the archive is built.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether ragkv suits a workload, and when not to use it.

    Five questions are answered yes, no or unknown, each with its figure and rule: long contexts, look-back, memory,
    room to tune, reuse. One firm no and it does not fit; with a doubt left, pilot it first. Nothing is loaded or run.

    \b
    Examples:
      ragkv fit --model Qwen/Qwen3-8B --gpu-memory 24GiB --batch 4 --log requests.jsonl
      ragkv fit --context-tokens 40000 --look-back 0.5 --questions-per-document 6 --bottleneck memory
    """
    workload = _workload(
        log,
        context_tokens=context_tokens,
        context_p90=context_p90,
        questions_per_document=questions_per_document,
        look_back=look_back,
    )
    workload = replace(
        workload,
        bottleneck=bottleneck,
        fresh_ttft_limit_s=fresh_ttft_limit,
        tuning_days=tuning_days,
        has_evaluation=has_evaluation,
    )
    account = _Account(
        model=model,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch=batch,
        gpu_memory=gpu_memory,
        recipe=recipe,
    )
    _answer(workload, account, as_json=as_json)


def _answer(workload: Workload, account: _Account, *, as_json: bool) -> None:
    from ragkv.ledger.fit import judge

    subject = _account_subject(account)
    rows = () if subject is None else _rows(subject, workload.lengths, account)
    result = judge(workload, rows)
    if as_json:
        head = {"model": account.model, "dtype": account.dtype, "batch": account.batch}
        ledger = None if subject is None else {**head, "rows": [_to_json(row) for row in rows]}
        print_json({**result.to_dict(), "workload": asdict(workload), "ledger": ledger})
    else:
        _show(result)
    if subject is not None:
        print_notes(subject, rows)


def _workload(
    log: Path | None,
    *,
    context_tokens: int | None,
    context_p90: int | None,
    questions_per_document: float | None,
    look_back: float | None,
) -> Workload:
    """The log, with options only for what it does not say; or the options alone."""
    from ragkv.ledger.fit import Workload
    from ragkv.ledger.request_log import read_log

    if log is None:
        if context_tokens is None:
            raise ConfigError("neither --log nor --context-tokens was given; give one of them")
        return Workload(
            context_median=context_tokens,
            context_p90=context_p90,
            questions_per_document=questions_per_document,
            look_back_share=look_back,
        )
    known = read_log(log)
    for name, value, logged in (
        ("--context-tokens", context_tokens, known.context_median),
        ("--context-p90", context_p90, known.context_p90),
        ("--questions-per-document", questions_per_document, known.questions_per_document),
        ("--look-back", look_back, known.look_back_share),
    ):
        if value is not None and logged is not None:
            raise ConfigError(f"{name} is {value:g}, but the log says {logged:g} itself; leave {name} out")
    if questions_per_document is not None:
        known = replace(known, questions_per_document=questions_per_document)
    return known if look_back is None else replace(known, look_back_share=look_back)


def _account_subject(account: _Account) -> Subject | None:
    """What the ledger is about; None when no model is named, which then no option may qualify."""
    from ragkv.model.shape import dtype_bytes

    if all(value is None for value in (account.model, account.layers, account.kv_heads, account.head_dim)):
        idle = {"--gpu-memory": account.gpu_memory is not None, "--recipe": account.recipe is not None}
        idle |= {"--batch": account.batch != 1, "--dtype": account.dtype != "bf16"}
        for name in (name for name, is_given in idle.items() if is_given):
            raise ConfigError(f"{name} was given without a model; give --model, or --layers, --kv-heads and --head-dim")
        return None
    return find_subject(
        account.model,
        dtype_bytes(account.dtype),
        layers=account.layers,
        kv_heads=account.kv_heads,
        head_dim=account.head_dim,
    )


def _rows(subject: Subject, lengths: Sequence[int], account: _Account) -> tuple[LedgerRow, ...]:
    from ragkv.ledger.ledger import build_ledger, parse_size
    from ragkv.model.shape import dtype_bytes

    return build_ledger(
        subject.layers,
        lengths,
        value_bytes=dtype_bytes(account.dtype),
        batch=account.batch,
        weights=subject.weights,
        gpu_memory=parse_size(account.gpu_memory) if account.gpu_memory is not None else None,
        recipe=Recipe.from_toml(account.recipe) if account.recipe else Recipe(),
    )


def _to_json(row: LedgerRow) -> dict[str, int | float | bool | None]:
    return {
        "n_tokens": row.n_tokens,
        "kv_bytes": row.kv.logical,
        "weights_bytes": row.weights,
        "gpu_memory_bytes": row.gpu_memory,
        "kv_share": row.kv_share,
        "gpu_share": row.gpu_share,
        "fits": row.fits,
        "archive_resident_bytes": row.archive.resident,
        "archive_fits": row.archive_fits,
        "worth_it": row.worth_it,
    }


def _show(result: Fit) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("question", ratio=3)
    table.add_column("answer", no_wrap=True)
    table.add_column("evidence and rule", ratio=5)
    for answer in result.answers:
        detail = Text(answer.evidence)
        detail.append(f"\n{answer.rule}", style="dim")
        if answer.find_out:
            detail.append(f"\nto find out: {answer.find_out}", style="italic")
        shown = answer.answer + ("\n(borderline)" if answer.borderline else "")
        table.add_row(answer.question, Text(shown, style=STYLES[answer.answer]), detail)
    out.print(table)
    verdict = Text(result.verdict, style=VERDICT_STYLES[result.verdict])
    out.print(verdict.append(f": {result.why}", style="not bold default"), soft_wrap=True)
    if result.instead:
        out.print(Text(f"Instead: {'; '.join(result.instead)}."), soft_wrap=True)
