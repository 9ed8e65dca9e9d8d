"""`HFFolder`: config.json and safetensors of transformers' layout, read without its package.

Used by convert_hf.py. The headers are read at once and checked against the files and the shards'
index; a tensor's bytes are read when it is asked for.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from core.checkpoint.files import SAFETENSORS_NAMES
from scripts.hf_families import family_of
from scripts.hf_layout import Unsupported

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class HFFolder:
    """config.json and the tensors of a folder in transformers' layout, read one at a time.

    Raises Unsupported naming every file or tensor that is missing, truncated or pickled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.family = family_of(self.config)
        self._places: dict[str, tuple[Path, int, dict]] = {}
        for name, (path, start, facts) in self._find_tensors().items():
            self._places[self._full(name)] = (path, start, facts)

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name][2]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        stored = self._places[name][2]["dtype"]
        found = [dtype for dtype, theirs in SAFETENSORS_NAMES.items() if theirs == stored]
        if not found:
            raise Unsupported(f"{name} has the dtype {stored}, which is not supported")
        return found[0]

    def read(self, name: str) -> Tensor:
        path, start, facts = self._places[name]
        begin, end = facts["data_offsets"]
        data = bytearray(end - begin)
        with open(path, "rb") as file:
            file.seek(start + begin)
            if file.readinto(data) != len(data):
                raise Unsupported(f"{path} ends inside {name}")
        if not data:
            return torch.empty(self.shape(name), dtype=self.dtype(name))
        return torch.frombuffer(data, dtype=self.dtype(name)).view(self.shape(name))

    def _find_tensors(self) -> dict[str, tuple[Path, int, dict]]:
        """Every tensor's file, where that file's data begins, and the header's facts."""
        wanted = None
        if (self.folder / INDEX).is_file():
            wanted = read_json(self.folder / INDEX).get("weight_map") or {}
            files = sorted(set(wanted.values()))
        elif (self.folder / SINGLE).is_file():
            files = [SINGLE]
        else:
            pickled = sorted(path.name for path in self.folder.glob("pytorch_model*.bin"))
            why = f"has {SINGLE} and {INDEX} neither"
            if pickled:
                why = f"has only pickled weights ({pickled[0]}), which are never opened; "
                why += "save it with safetensors first"
            raise Unsupported(f"{self.folder} {why}")
        places: dict[str, tuple[Path, int, dict]] = {}
        problems = []
        for file in files:
            path = self.folder / file
            if Path(file).name != file or not path.is_file():
                problems.append(f"{path} is missing, {INDEX} names it")
                continue
            try:
                start, header = safetensors_header(path)
            except Unsupported as error:
                problems.append(str(error))
                continue
            for name, facts in header.items():
                if wanted is None or wanted.get(name) == file:
                    places[name] = (path, start, facts)
        lost = [name for name in wanted or () if name not in places]
        if lost and not problems:
            problems.append(f"{INDEX} lies: {listed(lost)} not in the named file")
        if problems:
            raise Unsupported("; ".join(problems))
        return places

    def _full(self, name: str) -> str:
        """As today's files have it: with the prefix that files saved from the bare model leave
        out, and the norms' parameters as the oldest files of BERT do not call them."""
        prefix = self.family.prefix
        bare = not name.startswith((prefix, *self.family.outside))
        for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("Norm.beta", "Norm.bias")):
            name = name.replace(old, new)
        return prefix + name if bare else name


def safetensors_header(path: Path) -> tuple[int, dict[str, dict]]:
    """(where the data begins, {name: {"dtype", "shape", "data_offsets"}}) of a whole file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 0 < length <= size - 8 else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((facts["data_offsets"][1] for facts in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unsupported(f"{path} is not a safetensors file") from None
    if 8 + length + end != size:
        raise Unsupported(f"{path} has {size} bytes, its header speaks of {8 + length + end}")
    return 8 + length, header


def read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unsupported(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path} is not readable JSON ({error})") from None
    if not isinstance(found, dict):
        raise Unsupported(f"{path} is no JSON object")
    return found


def listed(names) -> str:
    """Some names for a message."""
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")
