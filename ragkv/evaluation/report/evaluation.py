"""The report of an evaluation: a verdict in words, tables of each suite, and the frontiers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.evaluate import Evaluation
from ragkv.evaluation.frontier import COSTS, KL, Frontier
from ragkv.evaluation.plan import LONG, SHORT, Contender
from ragkv.evaluation.report.figures import Axis, Series, draw_curves
from ragkv.evaluation.report.page import Cell, Picture, Report, Section, Table, write_report
from ragkv.evaluation.report.tables import (
    MIB,
    byte_table,
    fidelity_table,
    layer_blocks,
    look_back_table,
    perplexity_table,
    score_table,
    step_table,
    time_table,
)
from ragkv.evaluation.stats import MeanScore
from ragkv.evaluation.subjects import DENSE
from ragkv.evaluation.summary import GroupSummary, SubjectSummary
from ragkv.ledger.fit import LOOK_BACK_TOKENS

RESULT_FILE, REPORT_FILE = "result.json", "report.html"

Block = str | Table | Picture

_FIDELITY_NOTE = (
    "KL and agreement are teacher-forced: each subject reads the dense model's own greedy answer, so every position is "
    "compared after the same tokens. Standard errors take the positions of one question as one cluster."
)
_TIMES_NOTE = (
    "Times are of the forced pass, one subject after another in one process on one machine; quote the ratios, each "
    "quantile over the same quantile of dense. The first token of dense includes the prefill of the document; that of "
    "an archive does not include opening it. The comparison policies are imitated over the dense cache: their bytes "
    "are worked out, their times would say nothing and are left out. Tokens per second are of tokens after the first."
)
_BYTES_NOTE = (
    "Bytes are over all layers, mean over documents. Read: prototypes, exact tokens and recalled rows for one answer "
    "token. Resident: what must stay in memory. Disk: what a restart without a prefill would read. Peak memory is "
    "measured by ragkv bench."
)
_STEPS_NOTE = (
    "Each step alone and both together. Codes only: the archive's own codes, every token attended to. Clusters only: "
    "the same clusters over lossless payload. Where both together exceed the sum of the two, the errors reinforce "
    "each other."
)


def build_report(evaluation: Evaluation) -> Report:
    """The report as text, tables and figures."""
    asked = [group for group in evaluation.groups if group.subjects[0].answers is not None]
    continued = [group for group in evaluation.groups if group.subjects[0].perplexity is not None]
    sections = [_suite_section(group, evaluation) for group in asked]
    sections += [_frontier_section(group, evaluation) for group in asked]
    if continued:
        sections.append(_perplexity_section(continued, evaluation))
    if evaluation.layers:
        sections.append(Section("Layer by layer", layer_blocks(evaluation.layers)))
    return Report(
        title=f"Evaluation of {evaluation.model}",
        lead=verdict(evaluation),
        sections=sections,
        settings=_settings(evaluation),
    )


def write_result(evaluation: Evaluation, out: Path) -> None:
    """Write ``result.json`` and ``report.html``.

    Raises
    ------
    ConfigError
        If one of them cannot be written.
    """
    text = json.dumps(evaluation.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        (out / RESULT_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(out / RESULT_FILE)!r} cannot be written: {error.strerror}") from error
    write_report(build_report(evaluation), out / REPORT_FILE)


def verdict(evaluation: Evaluation) -> str:
    """Archive against dense, in words, for each suite; then whether it is on the frontier."""
    texts = []
    for group in evaluation.groups:
        mine = subject_of(group, evaluation.main)
        texts.append(_answers_words(group.group, mine) if mine.answers else _perplexity_words(group, mine))
    measured = [frontier for frontier in evaluation.frontiers if frontier.rivals]
    if measured:
        on = sum(_main_is_on(frontier, evaluation.main) for frontier in measured)
        texts.append(
            f"{evaluation.main} is on the frontier in {on} of {len(measured)} comparisons with other policies."
        )
    return " ".join(texts)


def subject_of(group: GroupSummary, name: str) -> SubjectSummary:
    return next(each for each in group.subjects if each.subject == name)


def _main_is_on(frontier: Frontier, main: str) -> bool:
    return any(place.on_frontier for place in frontier.places if place.subject == main)


def _answers_words(suite: str, mine: SubjectSummary) -> str:
    if mine.answers is None:
        return ""
    name, score = list(mine.answers.scores.items())[-1]
    dense = score.mean.value - score.difference.value
    kl, sizes = mine.answers.kl, mine.bytes
    read = "" if sizes.read_over_dense is None else f"reads {sizes.read_over_dense:.3f}x of the bytes per token, "
    return (
        f"{suite}: {mine.subject} scores {name} {score.mean.value:.3f} where dense scores {dense:.3f} (difference "
        f"{with_error(score.difference)}), with KL {kl.mean:.4f}{_error(kl.standard_error)} nats over "
        f"{kl.n_positions} positions and the same text as dense in {mine.answers.same_answer.value:.0%} of answers; "
        f"against dense it {read}holds {sizes.resident_over_dense:.3f}x in memory and {sizes.disk_over_dense:.3f}x "
        "on disk."
    )


def _perplexity_words(group: GroupSummary, mine: SubjectSummary) -> str:
    if mine.perplexity is None:
        return ""
    return (
        f"Perplexity, {group.group} documents: {mine.subject} has {mine.perplexity.ratio:.4f}x that of dense, "
        f"{mine.perplexity.tail_ratio:.4f}x over the tail."
    )


def with_error(mean: MeanScore) -> str:
    return f"{mean.value:+.3f}{_error(mean.standard_error)}"


def _error(value: float | None) -> str:
    return ", no standard error from so few" if value is None else f", s.e. {value:.2g}"


def _suite_section(group: GroupSummary, evaluation: Evaluation) -> Section:
    main = evaluation.main
    dense = group.subjects[0]
    n_items = 0 if dense.answers is None else dense.answers.same_answer.n_items
    fails = {} if dense.answers is None else {name: score.fails for name, score in dense.answers.scores.items()}
    failed = ", ".join(f"{share:.0%} by {name}" for name, share in fails.items())
    blocks: list[Block] = [
        f"Documents: {group.n_documents}, of {group.fewest_tokens:,} to {group.most_tokens:,} tokens. Questions: "
        f"{n_items}. Dense attention itself fails on {failed}: a score of 0 by F1 or a share, below 1 otherwise.",
        score_table(group, main),
        _FIDELITY_NOTE,
        fidelity_table(group, main),
    ]
    looking_back = look_back_table(group, main)
    if looking_back is None:
        blocks.append("This suite does not say where answers stand, so questions that look back are not told apart.")
    else:
        blocks += [
            f"Questions that look back have their answer more than {LOOK_BACK_TOKENS:,} tokens before the end of the "
            "document.",
            looking_back,
        ]
    blocks += [_BYTES_NOTE, byte_table(group, main), _TIMES_NOTE, time_table(group, main)]
    for family in dict.fromkeys(each.family for each in evaluation.contenders if each.kind == "step"):
        both = next(each.name for each in evaluation.contenders if each.family == family and each.usual)
        steps = [each.name for each in evaluation.contenders if each.family == family and each.kind == "step"]
        blocks += [_STEPS_NOTE, step_table(group, both, steps)]
    return Section(group.group, blocks)


def _frontier_section(group: GroupSummary, evaluation: Evaluation) -> Section:
    frontiers = [frontier for frontier in evaluation.frontiers if frontier.group == group.group]
    blocks: list[Block] = [
        "A point is on the frontier if no other policy is both as cheap and better by more than one standard error of "
        "the paired difference. The oracle, a bound that no system can be, is shown and beats nobody."
    ]
    for frontier in frontiers:
        blocks.append(frontier.words)
        picture = _frontier_figure(frontier, group, evaluation)
        if picture is not None:
            blocks.append(picture)
    return Section(f"{group.group}: frontiers", blocks)


def _frontier_figure(frontier: Frontier, group: GroupSummary, evaluation: Evaluation) -> Picture | None:
    """One curve for each policy over its budgets; ragkv's points are ringed and labelled."""
    families: dict[str, list[Contender]] = {}
    for each in evaluation.contenders:
        if each.kind != "step":
            families.setdefault(each.family, []).append(each)
    series = [_series(name, members, frontier, group) for name, members in families.items()]
    shown = [each for each in series if each.x]
    if not shown:
        return None
    is_kl = frontier.quality == KL
    y = "KL to dense, nats" if is_kl else f"{frontier.quality}, mean"
    if not is_kl:
        shown.append(_series(DENSE, [], frontier, group))
    words = "; ".join(
        f"{one.name}: {', '.join(f'{x:.1f} MiB {value:.3g}' for x, value in zip(one.x, one.y, strict=True))}"
        for one in shown
    )
    svg = draw_curves(shown, x=Axis(f"{COSTS[frontier.cost]}, MiB", log=True), y=Axis(y, log=is_kl))
    caption = f"{group.group}: {y} against {COSTS[frontier.cost]}; bars are one standard error"
    return Picture(svg=svg, caption=caption, description=f"{caption}. {words}.")


def _series(family: str, members: Sequence[Contender], frontier: Frontier, group: GroupSummary) -> Series:
    points: list[tuple[float, float, float, str]] = []
    for name, label in [(each.name, _point_label(each)) for each in members] or [(family, "")]:
        subject = subject_of(group, name)
        cost = getattr(subject.bytes, frontier.cost)
        if cost is None or subject.answers is None:
            continue
        if frontier.quality == KL:
            value, error = subject.answers.kl.mean, subject.answers.kl.standard_error
        else:
            mean = subject.answers.scores[frontier.quality].mean
            value, error = mean.value, mean.standard_error
        points.append((cost / MIB, value, error or 0.0, label))
    points.sort()
    return Series(
        name=family,
        x=[x for x, _, _, _ in points],
        y=[y for _, y, _, _ in points],
        errors=[error for _, _, error, _ in points],
        labels=[label for _, _, _, label in points],
    )


def _point_label(contender: Contender) -> str:
    if contender.kind != "archive":
        return ""
    return contender.family if contender.budget is None else str(contender.budget)


def _perplexity_section(groups: Sequence[GroupSummary], evaluation: Evaluation) -> Section:
    blocks: list[Block] = [
        "What really follows each document is forced in one pass, with the budget of question tokens; a ratio of 1 is "
        "dense. Perplexity can stay the same while answers get worse, most of all in short documents: look at the "
        "tail of the long ones, the last quarter of what is forced, and at the scores of other suites.",
    ]
    for wanted in (SHORT, LONG):
        for group in groups:
            if group.group == wanted:
                blocks += [perplexity_table(group, evaluation.main), byte_table(group, evaluation.main)]
    return Section("Perplexity", blocks)


def _settings(evaluation: Evaluation) -> dict[str, Cell]:
    values = {**evaluation.settings, **evaluation.environment}
    return {
        name: value if isinstance(value, str | int | float | None) else json.dumps(value)
        for name, value in values.items()
    }
