"""The tables of an evaluation's report: a row for each subject, dense first, the main archive marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.evaluation.report.figures import Axis, Series, draw_curves
from ragkv.evaluation.report.page import Cell, Picture, Table
from ragkv.evaluation.summary import GroupSummary, SubjectSummary

MIB = 2**20


@dataclass(frozen=True)
class Column:
    """A heading and where its numbers are in a `SubjectSummary`, in units of `unit`; `missing` where there are none."""

    heading: str
    path: str
    unit: float = 1
    missing: Cell = None

    def cell(self, subject: SubjectSummary) -> Cell:
        value: Any = subject
        for name in self.path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        return self.missing if value is None else value if self.unit == 1 else value / self.unit


def _score(name: str, scores: str = "answers.scores") -> list[Column]:
    return [
        Column(name, f"{scores}.{name}.mean.value"),
        Column(f"{name} s.e.", f"{scores}.{name}.mean.standard_error"),
        Column(f"{name} minus dense", f"{scores}.{name}.difference.value"),
        Column("s.e. of that", f"{scores}.{name}.difference.standard_error"),
        Column(f"fails by {name}", f"{scores}.{name}.fails"),
    ]


def _part(which: str, answers: str) -> list[Column]:
    return [
        Column(f"questions, {which}", f"{answers}.main_score.mean.n_items", missing=0),
        Column(f"score, {which}", f"{answers}.main_score.mean.value"),
        Column(f"minus dense, {which}", f"{answers}.main_score.difference.value"),
        Column(f"s.e., {which}", f"{answers}.main_score.difference.standard_error"),
        Column(f"KL, {which}", f"{answers}.kl.mean"),
    ]


def _times(name: str, speed: str) -> list[Column]:
    quantiles = ("median", "p90", "p99")
    seconds = [Column(f"{each}, s", f"{speed}.seconds.{each}") for each in quantiles]
    seconds[0] = Column(f"{name} median, s", f"{speed}.seconds.median")
    return [*seconds, *(Column(f"{each} x dense", f"{speed}.{each}_over_dense") for each in quantiles)]


_FIDELITY = [
    Column("KL, nats", "answers.kl.mean"),
    Column("s.e.", "answers.kl.standard_error"),
    *(Column(name, f"answers.kl.{name}") for name in ("median", "p90", "p99")),
    Column("top-1", "answers.kl.top1"),
    Column("top-1 s.e.", "answers.kl.top1_standard_error"),
    Column("positions", "answers.kl.n_positions"),
]
_BYTES = [
    Column("read per token, MiB", "bytes.read", MIB),
    Column("x dense", "bytes.read_over_dense"),
    Column("resident, MiB", "bytes.resident", MIB),
    Column("x dense", "bytes.resident_over_dense"),
    Column("disk, MiB", "bytes.disk", MIB),
    Column("x dense", "bytes.disk_over_dense"),
]
_PERPLEXITY = [
    Column("perplexity", "perplexity.value"),
    Column("x dense", "perplexity.ratio"),
    Column("nats over dense", "perplexity.difference.value"),
    Column("s.e.", "perplexity.difference.standard_error"),
    Column("tail", "perplexity.tail"),
    Column("tail x dense", "perplexity.tail_ratio"),
    Column("tail nats over dense", "perplexity.tail_difference.value"),
    Column("tail s.e.", "perplexity.tail_difference.standard_error"),
]


def score_table(group: GroupSummary, main: str) -> Table:
    answers = group.subjects[0].answers
    columns = [column for name in (answers.scores if answers else ()) for column in _score(name)]
    same = Column("same text as dense", "answers.same_answer.value")
    return _table(f"{group.group}: scores", [*columns, same], group.subjects, main)


def fidelity_table(group: GroupSummary, main: str) -> Table:
    return _table(f"{group.group}: fidelity to dense", _FIDELITY, group.subjects, main)


def look_back_table(group: GroupSummary, main: str) -> Table | None:
    """Questions that look back beside the others; None where the suite does not say."""
    if any(subject.looking_back is None and subject.near is None for subject in group.subjects):
        return None
    columns = [*_part("back", "looking_back"), *_part("near", "near")]
    return _table(f"{group.group}: questions that look back, and the others", columns, group.subjects, main)


def byte_table(group: GroupSummary, main: str) -> Table:
    return _table(f"{group.group}: bytes", _BYTES, group.subjects, main)


def time_table(group: GroupSummary, main: str) -> Table:
    columns = [*_times("TTFT", "ttft"), *_times("TPOT", "tpot"), Column("tokens per second", "tokens_per_second")]
    return _table(f"{group.group}: times", columns, [each for each in group.subjects if each.ttft], main)


def perplexity_table(group: GroupSummary, main: str) -> Table:
    caption = f"Perplexity, {group.group} documents of up to {group.most_tokens:,} tokens"
    return _table(caption, _PERPLEXITY, [each for each in group.subjects if each.perplexity], main)


def step_table(group: GroupSummary, both: str, steps: Sequence[str]) -> Table:
    """Each step alone, their sum, and both together."""
    chosen = {subject.subject: subject for subject in group.subjects}
    name = next(iter(reversed(answers.scores)), "") if (answers := chosen[both].answers) else ""
    columns = [
        Column("KL, nats", "answers.kl.mean"),
        Column("s.e.", "answers.kl.standard_error"),
        Column(f"{name} minus dense", "answers.main_score.difference.value"),
        Column("s.e. of that", "answers.main_score.difference.standard_error"),
    ]
    rows = [[each, *(column.cell(chosen[each]) for column in columns)] for each in (*steps, both)]
    total = [sum(value for row in rows[:-1] if isinstance(value := row[index], int | float)) for index in (1, 3)]
    rows.insert(-1, ["sum of the steps", total[0], None, total[1], None])
    rows[-1][0] = f"{both}, both"
    headings = ["step", *(column.heading for column in columns)]
    return Table(f"{group.group}: error of each step", headings, rows, len(rows) - 1, "archive")


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
        known = [row for row in rows if row["output_error"] is not None]
        if known:
            blocks.append(_layer_figure(name, known))
    return blocks


def _layer_figure(name: str, rows: Sequence[Mapping[str, Any]]) -> Picture:
    x = [float(row["layer"]) for row in rows]
    series = [
        Series(name=label, x=x, y=[float(row[one]) for row in rows])
        for one, label in (("output_error", "both"), ("codes_error", "codes"), ("clusters_error", "clusters"))
    ]
    caption = f"{name}: relative squared error of the attention output in each layer"
    worst = max(rows, key=lambda row: float(row["output_error"]))
    words = f"{caption}. The largest is {worst['output_error']:.3g} in layer {worst['layer']}."
    svg = draw_curves(series, x=Axis("layer"), y=Axis("relative squared error", log=True))
    return Picture(svg=svg, caption=caption, description=words)


def _table(caption: str, columns: Sequence[Column], subjects: Sequence[SubjectSummary], main: str) -> Table:
    rows = [[subject.subject, *(column.cell(subject) for column in columns)] for subject in subjects]
    marked = next((index for index, row in enumerate(rows) if row[0] == main), None)
    return Table(caption, ["subject", *(column.heading for column in columns)], rows, marked, "archive")
