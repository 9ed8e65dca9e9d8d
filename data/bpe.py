"""GPT-2's byte-level BPE in Python, for where the package tokenizers is not installed.

A text is cut into words by GPT-2's pattern; a word's bytes, each written as a printable character,
are merged pair by pair in the order of merges.txt. Same ids as the Rust library, about a hundred
times slower on words not seen before. Imports the package regex (for the pattern's \\p classes) and
the standard library; data/tokenizer.py wraps it.
"""

from __future__ import annotations

import functools
import itertools

import regex

WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@functools.cache
def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself, or the next free one from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), 256),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


class BytePairs:
    """Encodes with a vocabulary {token: id} and the lines of a merges.txt."""

    def __init__(self, vocabulary: dict[str, int], merges: list[str]):
        pairs = [
            tuple(line.split(" ")) for line in merges if line and not line.startswith("#version")
        ]
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self._ids = vocabulary
        self._tokens = {number: token for token, number in vocabulary.items()}
        self._word = functools.lru_cache(maxsize=1 << 16)(self._merge)

    def encode(self, text: str) -> list[int]:
        return [number for word in WORDS.findall(text) for number in self._word(word)]

    def decode(self, ids: list[int]) -> str:
        back = {character: byte for byte, character in byte_characters().items()}
        joined = "".join(self._tokens[number] for number in ids)
        return bytes(back[character] for character in joined).decode("utf-8", errors="replace")

    def _merge(self, word: str) -> tuple[int, ...]:
        parts = [byte_characters()[byte] for byte in word.encode("utf-8")]
        while len(parts) > 1:
            best = min(
                itertools.pairwise(parts), key=lambda pair: self._ranks.get(pair, len(self._ranks))
            )
            if best not in self._ranks:
                break
            merged, i = [], 0
            while i < len(parts):
                pair = tuple(parts[i : i + 2])
                merged.append("".join(pair) if pair == best else parts[i])
                i += 2 if pair == best else 1
            parts = merged
        return tuple(self._ids[part] for part in parts)
