"""What this process runs: versions, and a digest of the source. Ranks compare them as they meet.

A node with an old checkout, or another torch, trains along for days and is wrong by a little, or
hangs in the first collective that only the others know. No torch: all is read from files.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "numpy", "phalanx")
FOLDERS = ("core", "models", "kernels", "data")
ROOT = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """What must be equal on all ranks beside the flags: what -> which.

    Takes some 10 ms: all *.py are read, since sizes stay when a digit changes and times differ
    between copies of the same code.
    """
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    for folder in FOLDERS:
        found[f"in {folder}/"] = digest(ROOT / folder, sorted((ROOT / folder).rglob("*.py")))
    recipe = getattr(sys.modules.get("__main__"), "__file__", None)
    if recipe and Path(recipe).is_file():
        found["as recipe"] = f"{Path(recipe).name}, {digest(Path(recipe).parent, [Path(recipe)])}"
    return found


def digest(folder: Path, files: list[Path]) -> str:
    """Names and contents of files in words; the names count from `folder`, wherever that is."""
    total = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return f"{len(files)} *.py of digest {total.hexdigest()[:8]}"
