"""Replace an archive while it is opened, kill builds at each of their steps, or alter archives at random.

Each prints one line of counts, and the first faults, if there are any; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipelines.faults import kill, replace, tamper

EPILOG = """\
examples:
  python -m pipelines.faults replace --opens 1000
  python -m pipelines.faults kill --steps 500
  python -m pipelines.faults tamper --archives 2000
"""
_SHOWN = 10


def main(words: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.faults",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    add = kinds.add_parser("replace", help="open an archive that another process replaces all the time").add_argument
    add("--opens", type=int, default=1000, metavar="N", help="how often it is opened (1000)")
    add = kinds.add_parser("kill", help="kill builds and changes of a catalog at their steps").add_argument
    add("--steps", type=int, default=500, metavar="N", help="kills, spread over all steps of all changes (500)")
    add("--processes", type=int, default=5, metavar="N", help="of further kills, by the system, of whole processes (5)")
    add = kinds.add_parser("tamper", help="alter archives under checksums that hold, and read them").add_argument
    add("--archives", type=int, default=2000, metavar="N", help="how many (2000)")
    add("--seed", type=int, default=0, help="chooses what is altered (0)")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="ragkv-faults-") as name:
        result: replace.Replaced | kill.Kills | tamper.Tampered
        if given.kind == "replace":
            result = replace.run(Path(name), given.opens)
        elif given.kind == "kill":
            result = kill.run(Path(name), given.steps, processes=given.processes)
        else:
            result = tamper.run(Path(name), given.archives, seed=given.seed)
    print(result)
    for line in result.errors[:_SHOWN]:
        print(f"  {line}")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
