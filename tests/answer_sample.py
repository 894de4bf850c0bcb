"""A page of `ragkv.answer.page` with the kind of content a reader would meet: three documents, one question."""

from __future__ import annotations

import random
import re

from ragkv.answer.page import AnswerPage
from ragkv.answer.passages import DocumentEvidence, merge_passages
from ragkv.recall.trace import LayerMeans

QUESTION = "Why did the harbour pump fail in March, and what was changed afterwards?"
ANSWER = (
    "Grit from the dredging at the north quay wore out the seal of the intake pump, and the alarm that should have "
    "stopped it had been set too high. Afterwards the seal was replaced by a ceramic one, a strainer with a mesh of "
    "3.5 mm was put before the intake, and the alarm limit was lowered from 95 to 80 °C."
)

INSPECTION = """Inspection report, Harbour Works
Intake pump 2, after the stop of 14 March

The pump was opened on 16 March by Dr. J. Halpern and two fitters of the yard. The casing shows no cracks. The \
impeller has lost about 2 % of its weight and can be used again.

The mechanical seal is worn through on the side of the intake. The groove is filled with quartz grit of the kind that \
the dredger lifted at the north quay between 3 and 12 March. We conclude that the grit passed the coarse screen, which \
has a mesh of 12 mm, and ground the seal down in less than ten days.

The bearing was found blue from heat. By the log of the control room it passed 90 °C at 02:10 and ran for another \
forty minutes. The alarm was set to 95 °C, a limit that belongs to the older pump 1. Nobody could say who had copied \
it.

Recommendations: a ceramic seal; a finer strainer before the intake; an alarm limit that fits this pump.
"""

MINUTES = """Minutes of the works committee, 2 April

Present: M. Okafor (chair), L. Brandt, S. Iyer, T. Lindqvist. Apologies: none.

1. The minutes of 5 March were approved.

2. Pump 2. Ms. Brandt reported on the inspection. The committee decided to fit the ceramic seal at once and to put a \
strainer with a mesh of 3.5 mm before the intake. The alarm limit of pump 2 is lowered from 95 to 80 °C. Mr. Lindqvist \
will check the limits of all other pumps by the end of the month.

3. Lighting of the east mole. Two of nine lamps are out. An offer for LED lamps is awaited.

4. Any other business. The gulls have returned to the roof of the ice house. Nothing was decided.
"""

BROCHURE = """Welcome to the harbour

The old harbour was built in 1871 and has been enlarged four times. Today it is home to 42 fishing boats, a ferry and \
the sailing school. The fish market opens at six in the morning, every day but Sunday.

From the lighthouse you can see the whole bay. The climb has 138 steps; children under six go free. In summer the \
north quay is closed to cars between ten and six.
"""

HOT = {
    "inspection-2024-03.txt": (("quartz grit", 9.0), ("ground the seal", 7.0), ("alarm was set", 6.0), ("worn", 5.0)),
    "works-committee-minutes.md": (("mesh of 3.5", 7.0), ("ceramic seal", 5.0), ("from 95 to 80", 8.0)),
    "visitors' brochure.txt": (("north quay", 1.2),),
}
TEXTS = dict(zip(HOT, (INSPECTION, MINUTES, BROCHURE), strict=True))


def token_spans(text: str) -> list[tuple[int, int]]:
    """Spans as a tokenizer of sub-words gives them: a word with its space, in parts of at most six letters."""
    return [match.span() for match in re.finditer(r" ?[^\W_]{1,6}|\s|[^\w\s]|_", text)]


def weigh(text: str, hot: tuple[tuple[str, float], ...], generator: random.Random) -> list[float]:
    """Little everywhere, much within some 25 characters of a hot phrase, and a sink in every fourth line break."""
    centres = [(text.index(phrase) + len(phrase) / 2, weight) for phrase, weight in hot]
    weights = []
    for start, end in token_spans(text):
        heat = sum(weight * 2.0 ** (-(((start - centre) / 25) ** 2)) for centre, weight in centres)
        sink = 3.0 if text[start:end] == "\n" and generator.random() < 0.25 else 0.0
        weights.append((0.02 + heat) * generator.random() ** 2 + sink)
    return weights


def sample_documents() -> tuple[DocumentEvidence, ...]:
    generator = random.Random(7)
    weights = {name: weigh(text, HOT[name], generator) for name, text in TEXTS.items()}
    total = sum(map(sum, weights.values()))
    documents = []
    for name, text in TEXTS.items():
        pairs = zip(token_spans(text), weights[name], strict=True)
        spans = tuple((start, end, weight / total) for (start, end), weight in pairs)
        share = sum(weight for _, _, weight in spans)
        documents.append(DocumentEvidence(name, text, share, spans, merge_passages(text, spans)))
    return tuple(documents)


def sample_page() -> AnswerPage:
    generator = random.Random(3)
    layers = tuple(
        LayerMeans(layer, 180 + 120 * generator.random(), 0.02 + 0.16 * generator.random() * (1 - layer / 28))
        for layer in range(28)
    )
    figures = (
        ("KV cache, dense", "61.4 MiB"),
        ("KV resident", "5.9 MiB"),
        ("KV on disk", "17.2 MiB"),
        ("Tokens in the archives", "2,194"),
        ("Tokens prefilled", "21 (question only)"),
        ("First token after", "0.42 s"),
        ("Each further token", "38 ms"),
        ("Attention estimated", "8%"),
    )
    return AnswerPage(
        QUESTION, ANSWER, "Qwen2.5-Coder-0.5B-Instruct", sample_documents(), figures, layers, "ragkv 0.4.0"
    )
