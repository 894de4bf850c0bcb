"""``ragkv ask``: answer one question from an archive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import DeviceOption, DtypeOption, JsonOption, load, progress
from ragkv.cli.output import format_bytes, out, print_json
from ragkv.cli.recall_options import BudgetOption, MassOption, PilotOption, TopMOption, choose_policy
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.answer import Answer


def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    *,
    archive: Annotated[Path, typer.Option(help="Folder of the archive, as 'ragkv build' printed it.")],
    model: Annotated[
        str | None, typer.Option(help="The model it was built with. [default: the name it was built by]")
    ] = (None),
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe file whose [recall] table to follow. [default: the archive's own]")
    ] = None,
    budget: BudgetOption = None,
    top_m: TopMOption = None,
    mass: MassOption = None,
    pilot_layer: PilotOption = None,
    mode: Annotated[
        str, typer.Option(help="recall: answer from the archive. dense: prefill the document again, to compare.")
    ] = "recall",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 64,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a question from an archive: only the question goes through the model.

    \b
    Examples:
      ragkv ask "Who wrote the report?" --archive indexes/report
      ragkv ask "Who wrote the report?" --archive indexes/report --mode dense --json
      ragkv ask "Who wrote the report?" --archive indexes/report --pilot-layer 12
    """
    if as_json and stream:
        raise ConfigError("--json prints one object at the end; leave out --stream")
    from ragkv.answer import ask as answer_question
    from ragkv.answer import check_options
    from ragkv.archive import Archive
    from ragkv.manifest import read_manifest

    check_options(budget=budget, mode=mode, max_new_tokens=max_new_tokens, question=question)
    manifest = read_manifest(archive)
    policy = choose_policy(
        manifest.recipe.recall,
        len(manifest.layers),
        recipe=recipe,
        budget=budget,
        top_m=top_m,
        mass=mass,
        pilot=pilot_layer,
    )
    opened = Archive.open(archive, load(model or manifest.model_name, dtype, device))

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    with progress() as report:
        answer = answer_question(
            opened,
            question,
            policy=policy,
            mode=mode,
            max_new_tokens=max_new_tokens,
            on_text=show if stream else None,
            on_progress=(lambda done, total: report("dense prefill", done, total)) if mode == "dense" else None,
        )
    if as_json:
        print_json(answer.to_dict())
        return
    out.print("" if stream else answer.text, markup=False, soft_wrap=True)
    out.print(summary(answer), markup=False, style="dim", soft_wrap=True)


def summary(answer: Answer) -> str:
    """What an answer cost, in two lines."""
    per_token = f"{answer.tpot_s * 1e3:.0f} ms per further token" if answer.tpot_s is not None else "one token"
    kv = answer.kv_bytes
    lines = [
        f"{answer.mode}: {answer.prefilled_tokens:,} tokens prefilled of {answer.archive_tokens:,} + question; "
        f"first token after {answer.ttft_s:.2f} s, {per_token}",
        f"KV: dense {format_bytes(kv.dense)}, resident {format_bytes(kv.resident)}, on disk {format_bytes(kv.archive)}",
    ]
    if answer.mode == "recall":
        lines[1] += (
            f"; {answer.recalled_tokens:.0f} tokens recalled per KV head and step from {answer.clusters:,} clusters, "
            f"{answer.unrecalled_mass:.0%} of the attention estimated"
        )
    return "\n".join(lines)
