"""The tables of an evaluation's report: a row for each subject, dense first, the main archive marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragkv.evaluation.report.figures import Axis, Series, draw_curves
from ragkv.evaluation.report.page import Cell, Picture, Table
from ragkv.evaluation.summary import Answers, GroupSummary, Speed, SubjectSummary

_MIB = 2**20
_SUM = "sum of the steps"


def score_table(group: GroupSummary, main: str) -> Table:
    names = list(_answers(group.subjects[0]).scores)
    columns = ["subject"]
    for name in names:
        columns += [name, f"{name} s.e.", f"{name} minus dense", "s.e. of that", f"fails by {name}"]
    rows: list[list[Cell]] = []
    for subject in group.subjects:
        answers = _answers(subject)
        row: list[Cell] = [subject.subject]
        for name in names:
            score = answers.scores[name]
            row += [score.mean.value, score.mean.standard_error, score.difference.value]
            row += [score.difference.standard_error, score.fails]
        rows.append([*row, answers.same_answer.value])
    return _table(f"{group.group}: scores", [*columns, "same text as dense"], rows, main)


def fidelity_table(group: GroupSummary, main: str) -> Table:
    columns = ["subject", "KL, nats", "s.e.", "median", "p90", "p99", "top-1", "top-1 s.e.", "positions"]
    rows: list[list[Cell]] = []
    for subject in group.subjects:
        kl = _answers(subject).kl
        row: list[Cell] = [subject.subject, kl.mean, kl.standard_error, kl.median, kl.p90, kl.p99]
        rows.append([*row, kl.top1, kl.top1_standard_error, kl.n_positions])
    return _table(f"{group.group}: fidelity to dense", columns, rows, main)


def look_back_table(group: GroupSummary, main: str) -> Table | None:
    """Questions that look back beside the others; None where the suite does not say."""
    columns = ["subject"]
    for which in ("back", "near"):
        columns += [f"questions, {which}", f"score, {which}", f"minus dense, {which}", f"s.e., {which}", f"KL, {which}"]
    rows: list[list[Cell]] = []
    for subject in group.subjects:
        if subject.looking_back is None and subject.near is None:
            return None
        rows.append([subject.subject, *_slice(subject.looking_back), *_slice(subject.near)])
    return _table(f"{group.group}: questions that look back, and the others", columns, rows, main)


def byte_table(group: GroupSummary, main: str) -> Table:
    columns = ["subject", "read per token, MiB", "x dense", "resident, MiB", "x dense", "disk, MiB", "x dense"]
    rows: list[list[Cell]] = []
    for subject in group.subjects:
        sizes = subject.bytes
        read = None if sizes.read is None else sizes.read / _MIB
        row: list[Cell] = [subject.subject, read, sizes.read_over_dense, sizes.resident / _MIB]
        rows.append([*row, sizes.resident_over_dense, sizes.disk / _MIB, sizes.disk_over_dense])
    return _table(f"{group.group}: bytes", columns, rows, main)


def time_table(group: GroupSummary, main: str) -> Table:
    columns = ["subject"]
    for name in ("TTFT", "TPOT"):
        columns += [f"{name} median, s", "p90, s", "p99, s", "median x dense", "p90 x dense", "p99 x dense"]
    rows: list[list[Cell]] = [
        [subject.subject, *_speed(subject.ttft), *_speed(subject.tpot), subject.tokens_per_second]
        for subject in group.subjects
        if subject.ttft is not None
    ]
    return _table(f"{group.group}: times", [*columns, "tokens per second"], rows, main)


def step_table(group: GroupSummary, both: str, steps: Sequence[str]) -> Table:
    """Each step alone, their sum, and both together."""
    chosen = {subject.subject: subject for subject in group.subjects if subject.subject in (both, *steps)}
    alone = [_step_row(name, _answers(chosen[name])) for name in steps]
    total: list[Cell] = [_SUM, *(sum(_number(row[index]) for row in alone) for index in (1, 3)), None]
    total.insert(2, None)
    rows = [*alone, total, _step_row(f"{both}, both", _answers(chosen[both]))]
    name = list(_answers(chosen[both]).scores)[-1]
    columns = ["step", "KL, nats", "s.e.", f"{name} minus dense", "s.e. of that"]
    return _table(f"{group.group}: error of each step", columns, rows, f"{both}, both")


def perplexity_table(group: GroupSummary, main: str) -> Table:
    columns = ["subject", "perplexity", "x dense", "nats over dense", "s.e.", "tail", "tail x dense"]
    columns += ["tail nats over dense", "tail s.e."]
    rows: list[list[Cell]] = []
    for subject in group.subjects:
        found = subject.perplexity
        if found is None:
            continue
        row: list[Cell] = [subject.subject, found.value, found.ratio]
        row += [found.difference.value, found.difference.standard_error, found.tail, found.tail_ratio]
        rows.append([*row, found.tail_difference.value, found.tail_difference.standard_error])
    caption = f"Perplexity, {group.group} documents of up to {group.most_tokens:,} tokens"
    return _table(caption, columns, rows, main)


def layer_blocks(layers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str | Table | Picture]:
    """What each recipe does in each layer, of answer tokens, as a table and a figure."""
    blocks: list[str | Table | Picture] = [
        "Each layer's own error, for the very queries that reach it: no layer is charged with what earlier ones got "
        "wrong. Attention recall is the share of the true attention that is attended exactly. Errors are squared and "
        "relative to the dense output; codes and clusters are measured alone, then as they come together."
    ]
    fields = ("attention_recall", "archived_recall", "output_error", "codes_error", "clusters_error")
    columns = ["layer", *(name.replace("_", " ") for name in fields)]
    for name, rows in layers.items():
        cells = [[str(row["layer"]), *(row[one] for one in fields)] for row in rows]
        blocks.append(Table(f"{name}: layer by layer", columns, cells))
        picture = _layer_figure(name, rows)
        if picture is not None:
            blocks.append(picture)
    return blocks


def _layer_figure(name: str, rows: Sequence[Mapping[str, Any]]) -> Picture | None:
    known = [row for row in rows if row["output_error"] is not None]
    if not known:
        return None
    x = [float(row["layer"]) for row in known]
    series = [
        Series(name=label, x=x, y=[float(row[one]) for row in known])
        for one, label in (("output_error", "both"), ("codes_error", "codes"), ("clusters_error", "clusters"))
    ]
    caption = f"{name}: relative squared error of the attention output in each layer"
    worst = max(known, key=lambda row: float(row["output_error"]))
    words = f"{caption}. The largest is {worst['output_error']:.3g} in layer {worst['layer']}."
    svg = draw_curves(series, x=Axis("layer"), y=Axis("relative squared error", log=True))
    return Picture(svg=svg, caption=caption, description=words)


def _slice(answers: Answers | None) -> list[Cell]:
    if answers is None:
        return [0, None, None, None, None]
    score = list(answers.scores.values())[-1]
    values: list[Cell] = [score.mean.n_items, score.mean.value, score.difference.value]
    return [*values, score.difference.standard_error, answers.kl.mean]


def _speed(speed: Speed | None) -> list[Cell]:
    if speed is None:
        return [None] * 6
    seconds = speed.seconds
    ratios = [speed.median_over_dense, speed.p90_over_dense, speed.p99_over_dense]
    return [seconds.median, seconds.p90, seconds.p99, *ratios]


def _step_row(name: str, answers: Answers) -> list[Cell]:
    off = list(answers.scores.values())[-1].difference
    return [name, answers.kl.mean, answers.kl.standard_error, off.value, off.standard_error]


def _number(value: Cell) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _answers(subject: SubjectSummary) -> Answers:
    if subject.answers is None:
        raise ValueError(f"subject {subject.subject!r} answered nothing")
    return subject.answers


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], main: str) -> Table:
    marked = next((index for index, row in enumerate(rows) if row[0] == main), None)
    return Table(caption, columns, rows, highlight=marked, highlight_label="archive")
