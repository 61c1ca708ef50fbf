"""The text the demo model is trained on: Jane Austen's six novels, from Debian's `r-cran-janeaustenr`.

The package stores each novel as one R character vector (a line of the book per element). Nothing of R is needed to
read it: the database is a sequence of zlib streams, and a character vector is a list of length-prefixed strings.
"""

import re
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"

_HEADING = re.compile(r"\s*(chapter|volume)\s+[ivxlcdm\d]+\.?\s*", re.IGNORECASE)
_CLOSING_LINE = re.compile(r"\s*(the end|finis)\.?\s*", re.IGNORECASE)
_EDITOR_NOTE = "A NOTE ON THE TEXT"
_FOOTNOTE_MARK = "*"

# Tags of R's serialisation format (the low byte of an item's flags).
_R_CHARACTER_VECTOR = 16
_R_STRING = 9

# Text without chapter headings is cut into pieces of about one of Austen's chapters.
_PIECE_CHARACTERS = 16_000
_FEWEST_CHAPTERS = 6


class CorpusError(RuntimeError):
    """The training text could not be fetched or read."""


@dataclass(frozen=True)
class Corpus:
    """Chapters to train on and chapters kept aside; no chapter is in both."""

    training: list[str]
    heldout: list[str]


def load_corpus(files: Sequence[Path] = ()) -> Corpus:
    """The novels from the Debian package, or, when given, the plain text `files` (one book each)."""
    books = [path.read_text(encoding="utf-8").splitlines() for path in files] if files else fetch_novels()
    training: list[str] = []
    heldout: list[str] = []
    for lines in books:
        chapters = split_chapters(lines)
        # Whole chapters, a third and two thirds into the book: no paragraph's continuation is ever trained on.
        kept_aside = {len(chapters) // 3, 2 * len(chapters) // 3}
        for number, chapter in enumerate(chapters):
            (heldout if number in kept_aside else training).append(chapter)
    if not training:
        raise CorpusError("the corpus holds no text to train on")
    return Corpus(training, heldout)


def fetch_novels() -> list[list[str]]:
    """Each novel of the Debian package as its lines, unpacked in a temporary folder that is removed again."""
    with tempfile.TemporaryDirectory(prefix="demo-corpus-") as name:
        folder = Path(name)
        _call(["apt-get", "download", PACKAGE], folder)
        archives = sorted(folder.glob(f"{PACKAGE}_*.deb"))
        if not archives:
            raise CorpusError(f"apt-get download {PACKAGE} left no .deb file")
        _call(["dpkg-deb", "-x", str(archives[0]), str(folder / "unpacked")], folder)
        databases = sorted((folder / "unpacked").rglob("data/Rdata.rdb"))
        if not databases:
            raise CorpusError(f"{archives[0].name} holds no data/Rdata.rdb")
        return read_r_database(databases[0].read_bytes())


def _call(command: list[str], folder: Path) -> None:
    hint = f"'apt-get update' may help; or pass text files of your own with --corpus (wanted: Debian package {PACKAGE})"
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CorpusError(f"{command[0]} is not on this machine; {hint}") from error
    if done.returncode != 0:
        raise CorpusError(f"{' '.join(command)} failed: {done.stderr.strip()}; {hint}")


def read_r_database(raw: bytes) -> list[list[str]]:
    """All character vectors of an R lazy-load database (zlib-compressed entries, one after the other)."""
    vectors: list[list[str]] = []
    position = 0
    while position < len(raw):
        stream = zlib.decompressobj()
        # Four bytes of uncompressed length stand before each stream; zlib finds the end by itself.
        try:
            entry = stream.decompress(raw[position + 4 :])
        except zlib.error as error:
            raise CorpusError(f"the R database has no zlib stream at byte {position}: {error}") from error
        vectors.append(read_r_character_vector(entry))
        position = len(raw) - len(stream.unused_data)
    return vectors


def read_r_character_vector(entry: bytes) -> list[str]:
    """The strings of one serialised R object (format 3, big-endian), which must be a character vector."""

    def number(at: int) -> int:
        return int.from_bytes(entry[at : at + 4], "big")

    if entry[:2] != b"X\n" or number(2) != 3:
        raise CorpusError("an entry of the R database is not in serialisation format 3")
    position = 18 + number(14)  # format, version, two R versions, then the encoding's name and its length
    if number(position) & 0xFF != _R_CHARACTER_VECTOR:
        raise CorpusError("an entry of the R database is not a character vector")
    count = number(position + 4)
    position += 8
    strings: list[str] = []
    for _ in range(count):
        if number(position) & 0xFF != _R_STRING:
            raise CorpusError(f"unexpected item in an R character vector at byte {position}")
        end = position + 8 + number(position + 4)
        strings.append(entry[position + 8 : end].decode("utf-8"))
        position = end
    return strings


def split_chapters(lines: Sequence[str]) -> list[str]:
    """A book's chapters as flowing text: one paragraph a line, paragraphs separated by an empty line."""
    if _EDITOR_NOTE in lines:
        lines = lines[: list(lines).index(_EDITOR_NOTE)]
    starts = [number for number, line in enumerate(lines) if _HEADING.fullmatch(line)]
    if len(starts) < _FEWEST_CHAPTERS:
        return _cut_evenly(_paragraphs(lines))
    # What comes before the first heading is the title page.
    sections = [lines[start + 1 : end] for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    chapters = ["\n\n".join(_paragraphs(section)) for section in sections]
    return [chapter for chapter in chapters if chapter]


def _paragraphs(lines: Sequence[str]) -> list[str]:
    paragraphs: list[str] = []
    words: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            words.extend(line.replace("_", "").split())  # underscores only mark italics
            continue
        paragraph = " ".join(words)
        words = []
        if paragraph and not paragraph.startswith(_FOOTNOTE_MARK) and not _CLOSING_LINE.fullmatch(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def _cut_evenly(paragraphs: Sequence[str]) -> list[str]:
    pieces: list[str] = []
    piece: list[str] = []
    size = 0
    for paragraph in paragraphs:
        piece.append(paragraph)
        size += len(paragraph)
        if size >= _PIECE_CHARACTERS:
            pieces.append("\n\n".join(piece))
            piece, size = [], 0
    return [*pieces, "\n\n".join(piece)] if piece else pieces
