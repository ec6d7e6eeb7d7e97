"What the general reader looks for fast is what the plain form of the same rule finds."

import random
import re

import numpy as np
import pytest

from stabilitylab.read.freetext import named_numbers, words
from stabilitylab.read.freetext.steps import StepCounter, nearest_steps
from stabilitylab.read.shapes import Piece
from stabilitylab.read.text import EVENT_WORDS, NUMBERED_EVENT_WORDS

NUMBER = re.compile(  # as one reads it; the reader's own begins each alternative with one set of bytes
    rb"(?:(?<![\w.)\]])[-+])?(?<![\w.])"
    rb"(?:(?:\d{1,3}(?:,\d{3})+(?!\d|,\d)|\d+)(?:\.\d*(?!\w*\.))?|\.\d+)"
    rb"(?:[eE][-+]?\d+)?(?![\w]*[_=])(?!\.\d)"
    rb"|(?:(?<![\w.])[-+])?(?<![\w.'\"])(?:nan|NaN|NAN|inf|Inf|INF|[iI]nfinity)(?![\w.:=]|-\w)"
)
WORDS = """
- + . 1 23 , 000 123 e E-5 nan NaN NAN inf Inf INF infinity Infinity n I a _ = : ) ] ' " ( / x µ -a INFO: port
line 0x1f h 2024-01-02 12:30 Jan cuda:0 .py:3 rank [default2 days loss step global heckpoint saving NCCL
updates) verflow estor
"""
PIECES = [word.encode() for word in WORDS.split()] + [b" ", b"  ", b"\n", b"\r", b"\0"]


def texts(seed, count, most):
    "Pieces of numbers, stamps and words of events in any order."
    chance = random.Random(seed)
    return [b"".join(chance.choices(PIECES, k=chance.randint(1, most))) for _ in range(count)]


def test_numbers_and_stamps():
    for text in texts(0, 20_000, 12):
        spans = [match.span() for match in NUMBER.finditer(text)]
        assert [match.span() for match in named_numbers._NUMBER.finditer(text)] == spans, text
        has_stamp = named_numbers._STAMPS.search(text) is not None
        assert not has_stamp or any(shape.search(text) for shape in named_numbers._MAY_STAMP), text


def test_every_word_of_an_event_is_found_where_it_stands():
    needles = frozenset(word for row in EVENT_WORDS + NUMBERED_EVENT_WORDS for word in row)
    for text in texts(1, 300, 400):
        piece = Piece(text)
        found = words._find_all(piece, needles)
        for needle in needles:
            places = [match.start() for match in re.finditer(re.escape(needle), piece.buf.tobytes())]
            assert sorted(found[needle].tolist()) == places, (needle, text)


def test_a_selection_holds_the_lines_that_are_marked():
    chance = random.Random(2)
    for text in texts(2, 300, 200):
        piece = Piece(text)
        mask = np.array([chance.random() < 0.4 for _ in piece.start], bool)
        if mask.any():
            part = words._select(piece, mask)
            lines = [part.line(i) for i in range(len(part.start))]
            assert lines == [piece.line(i) for i in np.flatnonzero(mask)]


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_the_nearest_step_is_above_but_for_headers(n):
    counted = np.arange(100, 100 + 50 * n, 50)
    counter = StepCounter([], np.arange(n), counted, None, "step", "step", True)
    assert nearest_steps(counted + 7, counter).tolist() == list(range(n))  # right below its line
    below = nearest_steps(counted - 7, counter)  # right above it
    assert below.tolist() == list(range(n))
    assert nearest_steps(np.array([0]), counter).tolist() == [0]
    assert nearest_steps(np.array([10**9]), counter).tolist() == [n - 1]
