"""Faults made on purpose: archives replaced while they are opened, processes killed, files tampered with.

Each command prints one line of counts, and ends with 1 if anything went wrong. Nothing is downloaded: the models are
the tiny random ones of the tests.

Examples:

  python -m pipelines.faults replace --opens 1000
  python -m pipelines.faults kill --steps 500
  python -m pipelines.faults tamper --archives 2000 --seed 1
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence

from pipelines.fault.kill import run_kill
from pipelines.fault.replace import run_replace
from pipelines.fault.tamper import run_tamper

_WRONG = (
    "mixed",
    "false_alarms",
    "absent_or_mixed",
    "other_bytes",
    "leftovers",
    "errors",
    "untyped",
    "not_finite",
    "endless",
    "died",
    "no_memory",
    "disturbed",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = _parser().parse_args(arguments)
    log = logging.getLogger("ragkv")
    before = log.level
    log.setLevel(logging.ERROR)  # what is left out of a catalog, and how codes fit
    try:
        if given.command == "replace":
            counts = run_replace(given.opens)
        elif given.command == "kill":
            counts = run_kill(given.steps, seed=given.seed)
        else:
            counts = run_tamper(given.archives, seed=given.seed)
    finally:
        log.setLevel(before)
    print(f"{given.command}: {summary(counts)}")
    return 1 if failures(counts) else 0


def summary(counts: Counter[str]) -> str:
    """Counts on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


def failures(counts: Counter[str]) -> int:
    """How often something went wrong."""
    return sum(counts[name] for name in _WRONG)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    replace = commands.add_parser("replace", help="open an archive while another process replaces it in a tight loop")
    replace.add_argument("--opens", type=int, default=1000, metavar="N", help="times that it is opened (1000)")
    kill = commands.add_parser("kill", help="kill builds and changes of catalogs at steps in the file system")
    kill.add_argument("--steps", type=int, default=500, metavar="N", help="kills (500)")
    kill.add_argument("--seed", type=int, default=0, help="chooses the steps (0)")
    tamper = commands.add_parser("tamper", help="read archives that were damaged under checksums that hold")
    tamper.add_argument("--archives", type=int, default=2000, metavar="N", help="damaged archives (2000)")
    tamper.add_argument("--seed", type=int, default=0, help="chooses the damage (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
