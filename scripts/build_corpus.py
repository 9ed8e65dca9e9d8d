"""Make a text corpus without a download: the Python sources of the running standard library.

    python scripts/build_corpus.py --output corpus.jsonl

writes one JSON line a file, {"text": ..., "path": ...}, about 10 to 30 MB by distribution. The
order is that of the paths' hashes: the same on every machine with the same library, and with no
order of topics, so that a tail cut off by --split is a fair sample. Files that are empty, copies or
not UTF-8 are left out.

    python scripts/build_corpus.py --docstrings --output prose.jsonl

takes the docstrings of each file instead, as one text of paragraphs: prose, for BERT.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", required=True, help="JSON lines file to write")
    parser.add_argument(
        "--root",
        default=sysconfig.get_paths()["stdlib"],
        help="folder to read (default: %(default)s)",
    )
    parser.add_argument(
        "--max-megabytes", type=float, default=30, help="stop before this much text (default: 30)"
    )
    parser.add_argument("--docstrings", action="store_true", help="only the docstrings")
    args = parser.parse_args(argv)
    root, output = Path(args.root), Path(args.output)
    if not root.is_dir():
        print(f"build_corpus.py: --root {root} is not a folder", file=sys.stderr)
        return 2
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.partial")
    documents = size = 0
    with open(part, "w", encoding="utf-8", newline="\n") as file:
        for path, text in sources(root):
            text = docstrings(text) if args.docstrings else text
            if not text:
                continue
            if size + len(text) > args.max_megabytes * 1e6:
                break
            file.write(json.dumps({"text": text, "path": path}) + "\n")
            documents += 1
            size += len(text)
    os.replace(part, output)
    print(f"{output}: {documents:,} documents, {size / 1e6:.1f} MB of text from {root}")
    return 0


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path below root, text) of every distinct, readable .py file, ordered by the path's hash."""
    paths = [
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, folders, names in os.walk(root)
        for name in names
        if name.endswith(".py") and not LEFT_OUT.intersection(Path(folder).relative_to(root).parts)
    ]
    seen = set()
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        content = (root / path).read_bytes()
        digest = hashlib.sha256(content).digest()
        if content.isspace() or not content or digest in seen:
            continue
        seen.add(digest)
        try:
            yield path, content.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue


def docstrings(source: str) -> str:
    """The docstrings of a module's parts in order, an empty line between; "" if it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in old sources
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, kinds)),
        key=lambda node: getattr(node, "lineno", 0),
    )
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


if __name__ == "__main__":
    sys.exit(main())
