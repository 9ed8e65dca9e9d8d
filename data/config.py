"""DataConfig: which tokens a GPT is trained on, with Megatron's flag names and defaults.

Pure: standard library only; nothing of ours is imported. data/gpt.py and data/tokenizer.py read it;
files are looked at there, not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# What each tokenizer is read from.
TOKENIZER_NEEDS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": (),
}


@dataclass(kw_only=True)
class DataConfig:
    """Data and tokenizer"""

    data_path: tuple[str, ...] | None = None
    """Prefix of the .bin and .idx files."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and testing."""
    mock_data: bool = False
    """Synthetic, learnable text; every required flag gets a small value."""
    tokenizer_type: Literal["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"] | None = (
        None
    )
    """How text was made into tokens."""
    tokenizer_model: str | None = None
    """tokenizer.json, or the folder that has it, for HuggingFaceTokenizer."""
    vocab_file: str | None = None
    """vocab.json for GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt for GPT2BPETokenizer."""
    reset_position_ids: bool = False
    """Positions start again after an end of document."""
    reset_attention_mask: bool = False
    """No attention across an end of document."""
    eod_mask_loss: bool = False
    """No loss on ends of documents."""
    mmap_bin_files: bool = True
    """Read the .bin file piece by piece instead of mapping it into memory."""

    def _split_is_usable(self) -> bool:
        try:
            shares = [float(part) for part in self.split.split(",")]
        except ValueError:
            return False
        return len(shares) <= 3 and all(0 <= s < math.inf for s in shares) and sum(shares) > 0

    def problems(self) -> Iterator[str]:
        """What contradicts itself, before any file is opened."""
        if self.mock_data and self.data_path:
            yield f"--mock-data and --data-path {' '.join(self.data_path)} exclude each other"
        if not self.mock_data and not self.data_path:
            yield "no data: give --data-path PREFIX, or --mock-data for synthetic text"
        if self.data_path and len(self.data_path) > 1:
            yield (
                f"--data-path takes one prefix, got {len(self.data_path)}: "
                f"{' '.join(self.data_path)}; blending is not here yet"
            )
        if not self._split_is_usable():
            yield f"--split {self.split} is not one to three shares such as 969,30,1"
        needed = TOKENIZER_NEEDS.get(self.tokenizer_type or "", ())
        for name in needed:
            if getattr(self, name) is None:
                yield f"--tokenizer-type {self.tokenizer_type} needs --{name.replace('_', '-')}"
        for name in ("tokenizer_model", "vocab_file", "merge_file"):
            if getattr(self, name) and name not in needed:
                readers = [kind for kind, needs in TOKENIZER_NEEDS.items() if name in needs]
                yield f"--{name.replace('_', '-')} is read only by --tokenizer-type {readers[0]}"
