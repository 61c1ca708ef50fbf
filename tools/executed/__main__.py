"""Keeps what runs of the C++ tests printed, and makes one table of it.

python -m tools.executed record FOLDER native STATUS < OUTPUT   an output of kt_tests, and its exit status
python -m tools.executed not-run FOLDER thread REASON           there is none, and why
python -m tools.executed table FOLDER                           tier × format × how executed
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.executed.records import Record, keep, load, record_of
from tools.executed.table import table

WRONG_WORDS = 2


def main(words: Sequence[str]) -> int:
    """Exit status 0, or 2 for words that it does not know."""
    match list(words):
        case ["record", folder, how, status] if status.isdigit():
            keep(Path(folder), record_of(how, sys.stdin.read(), int(status)))
        case ["not-run", folder, how, reason]:
            keep(Path(folder), Record(how, not_run=reason))
        case ["table", folder]:
            print(table(load(Path(folder))))
        case _:
            print(__doc__, file=sys.stderr)
            return WRONG_WORDS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
