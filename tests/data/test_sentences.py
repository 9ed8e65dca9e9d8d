"""Sentence ends, by example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.sentences import split_sentences


@pytest.mark.parametrize(
    "marked",
    [
        "Hello world.|And then…|Maybe?|No!",
        "Dr. Smith and Mrs. Jones met St. John, e.g. in Berlin.|They left.",
        "J. R. R. Tolkien wrote it.|He died in 1973.|The U.S. Army left.",
        "So did I.|Then we ate.",
        "See Fig. 3, No. 7 and pp. 12.|He said no.|Then he left.",
        "Version 2.0.1 costs 3.50 now.|See www.example.com for it.",
        "A lower. case letter begins. nothing.",
        'She said "Stop."|Then (she left.)|“Why?”|‘Because.’',
        "What?!|Are you sure??|Yes...|Good.",
        "今日は晴れ。|明日は雨！|本当？|はい。",
        "नमस्ते।|आप कैसे हैं?|ठीक।",
        "Ça va bien.|Écoutez!|¿Qué tal?|¡Hola!",
        "Привет, мир.|Как дела?",
        "It is 5 p.m.|We left.|1999 was long ago.",
        "No stop at the end",
    ],
)
def test_examples(marked):
    assert split_sentences(marked.replace("|", " ")) == marked.split("|")


def test_scripts_without_spaces():
    assert split_sentences("今日は晴れ。明日は雨！本当？") == [
        "今日は晴れ。",
        "明日は雨！",
        "本当？",
    ]


def test_an_empty_line_ends_a_sentence_and_a_newline_does_not():
    text = "A heading\n\nThe first\nsentence. Another\r\n\r\nThe end"
    assert split_sentences(text) == ["A heading", "The first sentence.", "Another", "The end"]
    kept = split_sentences(text, keep_newlines=True)
    assert kept == ["A heading", "The first\nsentence.", "Another", "The end"]


def test_nothing_gives_nothing():
    assert split_sentences("") == split_sentences(" \n\n ") == []


@given(st.text(alphabet="aB .!?\n\"')(。1…", max_size=60))
def test_no_letter_is_lost(text):
    for keep in (False, True):
        sentences = split_sentences(text, keep_newlines=keep)
        assert "".join("".join(sentences).split()) == "".join(text.split())
        assert all(sentence == sentence.strip() and sentence for sentence in sentences)
