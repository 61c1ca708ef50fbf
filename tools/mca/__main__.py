"""`python -m tools.mca [PAGE]`: prints the table, or puts it into a page between its marks."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tools.mca.model import NotAvailable
from tools.mca.table import regenerate, with_table

NOT_RUN = 77


def main(words: list[str]) -> int:
    """Exit status 0, or 77 when llvm-mca is not here."""
    with tempfile.TemporaryDirectory(prefix="kt-mca-") as folder:
        try:
            text = regenerate(Path(folder))
        except NotAvailable as error:
            print(f"the table was not made: {error}", file=sys.stderr)
            return NOT_RUN
    if not words:
        print(text)
    for word in words:
        page = Path(word)
        page.write_text(with_table(page.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
