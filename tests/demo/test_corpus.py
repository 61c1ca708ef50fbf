"""Reading the novels out of R's format, and cutting them into chapters."""

import zlib
from pathlib import Path

import pytest

from demo.corpus import (
    CorpusError,
    fetch_novels,
    load_corpus,
    read_r_character_vector,
    read_r_database,
    split_chapters,
)


def int32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def serialised(lines: list[str]) -> bytes:
    """What R's serialize() writes for a character vector."""
    header = b"X\n" + int32(3) + int32(0x040201) + int32(0x030500) + int32(5) + b"UTF-8"
    strings = b"".join(int32(0x00040009) + int32(len(line.encode())) + line.encode() for line in lines)
    return header + int32(16) + int32(len(lines)) + strings


def database(*books: list[str]) -> bytes:
    return b"".join(int32(len(serialised(book))) + zlib.compress(serialised(book)) for book in books)


def book(chapters: int) -> list[str]:
    lines = ["A NOVEL", ""]
    for number in range(1, chapters + 1):
        lines += [f"Chapter {number}", "", f"Paragraph one of {number},", "  continued.", "", "Paragraph two.", ""]
    return [*lines, "THE END"]


def test_character_vector_is_read_whole() -> None:
    lines = ["It cost £5.", "", "Finis"]
    assert read_r_character_vector(serialised(lines)) == lines


def test_database_holds_one_vector_per_book() -> None:
    assert read_r_database(database(["a", "b"], ["c"])) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("damaged", "complaint"),
    [
        (b"\0\0\0\1not zlib", "no zlib stream at byte 0"),
        (int32(4) + zlib.compress(b"A\n\0\0\0\3"), "serialisation format 3"),
        (int32(4) + zlib.compress(serialised(["a"])[:23] + int32(13) + int32(0)), "not a character vector"),
        (int32(4) + zlib.compress(serialised(["a"])[:31] + int32(14) + int32(0)), "unexpected item"),
    ],
)
def test_other_content_is_refused(damaged: bytes, complaint: str) -> None:
    with pytest.raises(CorpusError, match=complaint):
        read_r_database(damaged)


def test_chapters_are_flowing_text_without_headings_titles_and_closing_lines() -> None:
    chapters = split_chapters(book(6))
    assert len(chapters) == 6
    assert chapters[0] == "Paragraph one of 1, continued.\n\nParagraph two."
    assert chapters[-1] == "Paragraph one of 6, continued.\n\nParagraph two."


def test_marks_of_the_edition_are_dropped() -> None:
    lines = [*book(6)[:-1], "_She_ knew.", "", "*A footnote.", "", "A NOTE ON THE TEXT", "", "Edited."]
    assert split_chapters(lines)[-1].endswith("Paragraph two.\n\nShe knew.")


def test_text_without_headings_is_cut_at_paragraphs() -> None:
    paragraph = "word " * 1000
    pieces = split_chapters([line for _ in range(9) for line in (paragraph, "")])
    assert [piece.count("\n\n") + 1 for piece in pieces] == [4, 4, 1]


def test_no_chapter_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("\n".join(book(9)), encoding="utf-8")
    corpus = load_corpus([file])
    assert len(corpus.heldout) == 2
    assert sorted(corpus.training + corpus.heldout) == sorted(split_chapters(book(9)))
    assert not set(corpus.training) & set(corpus.heldout)


def test_a_machine_without_apt_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CorpusError, match=r"apt-get is not on this machine.*--corpus"):
        fetch_novels()
