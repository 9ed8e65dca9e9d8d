"""Where sentences end, by rule: for `--split-sentences`, without a model or a download.

A sentence ends at . ! ? or … (with what closes quotes and brackets) before a space and a letter
that can begin one; at the full stops of scripts that write no spaces; and at an empty line. A full
stop does not end one after a title or another word that calls for a name ("Dr. Smith", "e.g.
Berlin"), after "No." and the like before a number, or after an initial ("J. R. R. Tolkien").
Imports the package regex.
"""

from __future__ import annotations

import regex

# A name follows these, so that its capital begins no sentence.
BEFORE_NAMES = frozenset(
    "mr mrs ms dr prof st rev hon gen col maj capt lt sgt gov sen rep pres messrs mme mlle mt ft "
    "vs e.g i.e cf viz ca bzw z.b d.h approx dept univ assn".split()
)
# These do not end a sentence where a number follows.
BEFORE_NUMBERS = frozenset(
    "no nos fig figs eq eqs sec ch vol vols art p pp ed nr str "
    "jan feb mar apr jun jul aug sep sept oct nov dec".split()
)

END = regex.compile(
    r"(?P<stop>[.!?…]+|[。！？｡؟۔।॥]+)"
    r"(?P<close>[\"'”’»)\]}」』）]*)"
    r"(?P<space>\s*)"
)
BEGINNING = regex.compile(r"[\"'“‘«(\[{¿¡—–-]*[\p{Lu}\p{Lt}\p{Lo}\p{N}]")
LAST_WORD = regex.compile(r"[\p{L}\p{N}][\p{L}\p{N}.'’]*$")
INITIAL = regex.compile(r"(?:\p{Lu}|\p{Lu}(?:\.\p{Lu})+)$")
PARAGRAPH = regex.compile(r"\n\s*\n")
SPACELESS = frozenset("。！？｡")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """The sentences of a text in order. No letter is lost; spaces around sentences are, and
    newlines within one become spaces unless keep_newlines.

    >>> split_sentences("Dr. Smith saw it at 3.15 p.m. today. 'Really?' he asked. Yes!")
    ['Dr. Smith saw it at 3.15 p.m. today.', "'Really?' he asked.", 'Yes!']
    """
    sentences = []
    for paragraph in PARAGRAPH.split(text):
        start = 0
        for match in END.finditer(paragraph):
            if _ends(paragraph, start, match):
                sentences.append(paragraph[start : match.end()])
                start = match.end()
        sentences.append(paragraph[start:])
    whole = (s.strip() if keep_newlines else " ".join(s.split()) for s in sentences)
    return [sentence for sentence in whole if sentence]


def _ends(text: str, start: int, match: regex.Match) -> bool:
    """Whether the sentence from `start` ends at this stop."""
    if match["stop"][0] in SPACELESS:
        return True
    if match.end() == len(text):
        return True
    if not match["space"] or not BEGINNING.match(text, match.end()):
        return False
    if match["stop"] != "." or match["close"]:
        return True
    word = LAST_WORD.search(text, max(start, match.start() - 40), match.start())
    if word is None:
        return True
    last = word[0].lower()
    if last in BEFORE_NUMBERS:
        return not text[match.end()].isdigit()
    return last not in BEFORE_NAMES and (last == "i" or not INITIAL.match(word[0]))
