"""What changes the folder of a run's checkpoints: publication, setting aside, removal.

Pure: standard library only. Neighbours: directory.py says what is in the folder, and that a load at
any moment of this finds a whole checkpoint; store.py writes what is published here.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from core.checkpoint.directory import (
    INDEX,
    LATEST,
    LITTER,
    complete,
    foreign_files,
    foreign_text,
    is_old,
    iteration_of,
    litter,
    next_pointer,
    sync,
    write_text,
)
from core.checkpoint.errors import CheckpointError


def tidy(directory: Path) -> list[str]:
    """Removes what crashed saves left, and completes a publication that was cut short.

    Returns a sentence per thing that cannot be removed, which stands in nobody's way.
    """
    if next_pointer(directory):
        (directory / f"{LATEST}.tmp").replace(directory / LATEST)
    (directory / f"{LATEST}.tmp").unlink(missing_ok=True)
    with suppress(OSError):
        _finish_branches(directory)
    stuck = []
    for path in litter(directory):
        try:
            remove = _remove if LITTER.fullmatch(path.name) else discard
            remove(path)
        except OSError as error:
            stuck.append(f"{path} is left from an earlier save and cannot be removed: {error}")
    for path in sorted(directory.iterdir()):
        if is_old(path) and not os.path.lexists(path.with_suffix("")):
            path.rename(path.with_suffix(""))
    return stuck


def _finish_branches(directory: Path) -> None:
    """An empty one is of a publication cut short: what the new checkpoint has replaced was for it.

    In vain when nothing has been replaced, and removed.
    """
    replaced = [path for path in litter(directory) if is_old(path)]
    for branch in directory.glob("branch_*"):
        if branch.is_dir() and not any(branch.iterdir()):
            for path in replaced:
                _move(path, branch / path.with_suffix("").name)
            if not replaced:
                branch.rmdir()
            replaced = []


def publish(directory: Path, name: str, new: Path, after: int | None = None) -> list[str]:
    """Makes the finished folder `new` the checkpoint `name`, and `latest` point to it.

    All that can run out of space happens before the rename, and a checkpoint of the same name
    stays whole until the new one is in its place. What lies beyond iteration `after` is another
    run's, or this one's before it went back: it is moved into a folder of its own as soon as the
    new one is there, for it must neither count as one of the newest nor be turned to when one of
    ours is damaged. Returns what there is to say about that.
    """
    final, old = directory / name, directory / f"{name}.old"
    pointer = directory / f"{LATEST}.tmp"
    if final.exists() and (foreign := foreign_files(final)) and not (final / INDEX).exists():
        raise CheckpointError(foreign_text(final, foreign) + "; choose another --save folder")
    theirs = [] if after is None else _beyond(directory, after)
    branch = _new_branch(directory) if theirs else None
    try:
        write_text(pointer, name + "\n")
        sync(new)
        if os.path.lexists(final):
            final.rename(old)
        new.rename(final)
    except OSError:
        if branch:
            with suppress(OSError):
                branch.rmdir()
        raise
    pointer.replace(directory / LATEST)
    sync(directory)
    said = _set_aside([(old if path == final else path) for path in theirs], branch)
    if os.path.lexists(old):
        with suppress(OSError):  # the new one is there; `tidy` tries again, and says so
            discard(old)
    return said


def _beyond(directory: Path, after: int) -> list[Path]:
    """Oldest first: of a run killed while they move, those before its newest would pass as its."""
    return [path for path in reversed(complete(directory)) if iteration_of(path.name) > after]


def _new_branch(directory: Path) -> Path:
    number = 1
    while (branch := directory / f"branch_{number}").exists():
        number += 1
    branch.mkdir()
    return branch


def _set_aside(theirs: list[Path], branch: Path | None) -> list[str]:
    """Moves another run's checkpoints; the one that was replaced is the first, see `tidy`."""
    moved, said = [], []
    for path in sorted(theirs, key=lambda path: not is_old(path)):
        name = path.name.removesuffix(".old")
        try:
            _move(path, branch / name)
        except OSError as error:
            said.append(f"{path} is not of this run and cannot be moved to {branch}: {error}")
        else:
            moved.append(name)
    if moved:
        said.append(
            f"{', '.join(sorted(moved, key=iteration_of))} in {branch.parent} are not of this run; "
            f"moved to {branch}, to keep or to remove"
        )
        with suppress(OSError):  # the new one is there, whatever becomes of the old
            sync(branch)
    return said


def _move(path: Path, to: Path) -> None:
    if path.is_symlink():  # it may be relative, and would point elsewhere from there
        to.symlink_to(path.resolve())
        path.unlink()
    else:
        path.rename(to)


def discard(path: Path) -> None:
    """Removes a checkpoint; at no instant is half of it visible under its name."""
    grave = path.with_name(f"{path.name}.{token()}.tmp")
    path.rename(grave)
    _remove(grave)


def _remove(path: Path) -> None:
    """A folder, or the link to one that was archived elsewhere, which stays there."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def token() -> str:
    """For a temporary name that nothing else has, not even what could not be removed."""
    return os.urandom(4).hex()
