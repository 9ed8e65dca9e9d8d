"""The folder of a run's checkpoints: names, order, what to delete, who may write.

Pure: standard library only. Neighbours: publication.py changes the folder, index.py says what one
checkpoint holds, store.py and reader.py write and read them. In the folder:

    iter_0000100/       a complete checkpoint; there is never an incomplete one under such a name
    iter_0000100.old/   what iter_0000100 was before it was saved again; exists for two renames
    iter_0000200.3f9c06d1.tmp/  being written, or left by a crash; the next save removes it
    branch_1/           checkpoints that a run which began at an older step has set aside
    latest              text: the name of the checkpoint to resume from
    latest.tmp          what `latest` says as soon as that checkpoint is in its place
    .lock               held by the run that saves here
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from core.checkpoint.errors import CheckpointError, MissingCheckpoint

LATEST, INDEX, LOCK = "latest", "index.json", ".lock"
_COMPLETE = re.compile(r"iter_(\d{7,})(\.old)?")
LITTER = re.compile(r"iter_\d{7,}(\.old)?(\.[0-9a-f]{8})?\.tmp")
_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's `latest`; its folders are named as ours
_FOREIGN = re.compile(
    rf"{_TRACKER}|.*\.(pt|pth|ckpt|distcp|metadata)|(pytorch_)?model[^/]*\.(bin|safetensors)"
)


def folder_name(iteration: int) -> str:
    """
    >>> folder_name(100)
    'iter_0000100'
    """
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The iteration of a complete checkpoint's folder name, None for any other name."""
    match = _COMPLETE.fullmatch(name)
    return int(match[1]) if match else None


# ---- reading ---------------------------------------------------------------------------------


def candidates(directory: Path, step: int | None = None) -> list[Path]:
    """The checkpoints to try, in order; only that of `step` when one is given.

    First what `latest` names, then the older ones, newest first, then those beyond it. `directory`
    may also be one checkpoint's own folder. Raises MissingCheckpoint when nothing was ever saved
    there, CheckpointError when the folder holds another program's checkpoint or not that step.
    """
    if (directory / INDEX).is_file():
        if step is not None and iteration_of(directory.resolve().name) not in (None, step):
            raise CheckpointError(f"{directory} is one checkpoint, not that of iteration {step}")
        return [directory]
    found = complete(directory)
    if step is not None and found:
        chosen = [path for path in found if iteration_of(path.name) == step]
        if not chosen:
            have = ", ".join(map(str, sorted({iteration_of(path.name) for path in found})))
            raise CheckpointError(f"{directory} has no iteration {step}; it has {have}")
        return chosen
    if not found:
        if foreign := foreign_files(directory):
            raise CheckpointError(foreign_text(directory, foreign))
        if (pointer := latest(directory)) and iteration_of(pointer) is not None:
            raise CheckpointError(
                f"{directory / LATEST} names {pointer}, and neither that nor another checkpoint is "
                "there; put one back, or remove that file to start from the beginning"
            )
        raise MissingCheckpoint(f"{directory} has no checkpoint")
    pointer = latest(directory)
    current = iteration_of(pointer) if pointer else None
    if current is None:
        return found
    beyond = [path for path in found if iteration_of(path.name) > current]
    return [path for path in found if path not in beyond] + beyond


def latest(directory: Path) -> str | None:
    """What the pointer says, or was about to say; None when there is none that can be read."""
    if about_to_be := next_pointer(directory):
        return about_to_be
    try:
        return (directory / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def next_pointer(directory: Path) -> str | None:
    """The complete checkpoint that a crash between `publish`'s renames kept from being `latest`.

    A pointer that somebody has written since counts more.
    """
    pointer, following = directory / LATEST, directory / f"{LATEST}.tmp"
    try:
        text = following.read_text(encoding="utf-8")
        if pointer.exists() and pointer.stat().st_mtime_ns > following.stat().st_mtime_ns:
            return None
    except (OSError, UnicodeDecodeError):
        return None
    name = text.strip()
    whole = text.endswith("\n") and iteration_of(name) is not None
    return name if whole and (directory / name).is_dir() else None


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, newest first, each before what it replaced; not another program's."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if iteration_of(path.name) is not None]
    ours = [path for path in named if (path / INDEX).exists() or not foreign_files(path)]
    return sorted(ours, key=lambda path: (-iteration_of(path.name), path.name))


def foreign_files(directory: Path) -> list[str]:
    """Files by which other programs' checkpoints are known, up to two folders below this one."""
    if not directory.is_dir():
        return []
    return sorted(
        str(path.relative_to(directory))
        for pattern in ("*", "*/*", "*/*/*")
        for path in directory.glob(pattern)
        if _FOREIGN.fullmatch(path.name) and not (path.parent / INDEX).exists()
    )


def foreign_text(directory: Path, foreign: list[str]) -> str:
    shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if foreign[3:] else "")
    return (
        f"{directory} holds another program's checkpoint ({shown}); those files are never opened. "
        "What is read here is a folder iter_NNNNNNN with index.json and safetensors files"
    )


# ---- before a run ----------------------------------------------------------------------------


def problems(directory: Path | str, bytes_needed: int) -> Iterator[str]:
    """One sentence per reason why a checkpoint of this many bytes could not be saved there.

    The caller names the flag. Writes nothing: the probe is an unnamed file where the system has
    such, in the nearest folder that exists.
    """
    directory = Path(directory)
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        yield f"{existing} is not a folder"
        return
    if (directory / INDEX).is_file():
        yield f"{directory} is one checkpoint; give the folder it lies in, {directory.parent}"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield f"cannot write in {existing} ({error.strerror})"
        return
    if holder := _held_by(directory):
        yield _another_run(directory, holder)
    foreign = [name for name in foreign_files(directory) if name.startswith(("iter_", _TRACKER))]
    if foreign and not complete(directory):
        yield f"{foreign_text(directory, foreign)}; choose another folder"
    if lack := no_room(existing, bytes_needed - _litter_bytes(directory)):
        yield lack


def _litter_bytes(directory: Path) -> int:
    """What `tidy` will free before the first save. A link's target stays, and so does a file that
    has another name elsewhere."""
    size = 0
    for path in litter(directory) if directory.is_dir() else ():
        for folder, _, names in () if path.is_symlink() else os.walk(path):
            for name in names:
                try:
                    facts = os.lstat(os.path.join(folder, name))
                except OSError:
                    continue  # somebody has removed it since
                size += facts.st_blocks * 512 if facts.st_nlink == 1 else 0
    return size


def no_room(directory: Path, bytes_needed: int) -> str:
    """That a folder's disk cannot take so much, or ""."""
    free = shutil.disk_usage(directory).free
    if free >= bytes_needed:
        return ""
    return (
        f"a checkpoint takes {size_text(bytes_needed)}, {directory} has {size_text(free)} free; "
        "free some space or choose another folder"
    )


def size_text(count: float) -> str:
    """
    >>> size_text(20 * 1024**2)
    '20.0 MiB'
    """
    if count < 1024:
        return f"{count:.0f} bytes"
    power = min(4, int(math.log(count, 1024)))
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def differences(saved: dict, given: dict) -> list[str]:
    """One line per setting whose saved and given values differ, in the order of `saved`.

    Nested groups of settings are compared by their leaves' names; a setting that only one side has
    is a difference too.

    >>> differences({"model": {"hidden_size": 64}}, {"hidden_size": 96})
    ['--hidden-size: 64 in the checkpoint, 96 given']
    """
    saved, given = _leaves(saved), _leaves(given)
    lines = []
    for key in saved | given:
        before, now = saved.get(key, _ABSENT), given.get(key, _ABSENT)
        if before != now:
            flag = "--" + key.replace("_", "-")
            lines.append(f"{flag}: {_value(before)} in the checkpoint, {_value(now)} given")
    return lines


_ABSENT = object()


def _value(value: object) -> str:
    return "absent" if value is _ABSENT else str(value)


def _leaves(settings: dict) -> dict:
    """Nested dictionaries flattened to {last key: value}; tuples become lists, as in JSON."""
    flat: dict = {}
    for key, value in settings.items():
        flat |= _leaves(value) if isinstance(value, dict) else {key: json.loads(json.dumps(value))}
    return flat


# ---- writing ---------------------------------------------------------------------------------


class Lock:
    """The right to save in a folder, held until `release` or the end of the process.

    A POSIX record lock: it dies with its process, however that ends, works over NFS, and is not
    inherited by forked workers. Raises CheckpointError when another process holds it.

    unprotected  why the file system gives no lock, "" when it does: the run goes on, to be told
    """

    def __init__(self, directory: Path) -> None:
        self.unprotected = ""
        self._file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = _holder(self._file)
            self.release()
            raise CheckpointError(_another_run(directory, holder)) from None
        except OSError as error:
            self.unprotected = error.strerror
            return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _holder(file: int) -> str:
    return os.pread(file, 200, 0).decode(errors="replace").strip() or "unknown process"


def _another_run(directory: Path, holder: str) -> str:
    return f"another run is saving in {directory} ({holder}); give each run a folder of its own"


def _held_by(directory: Path) -> str | None:
    """Which process holds the folder, by a shared lock that conflicts with nobody's question.

    Not for a process that holds it itself: closing the file would let go.
    """
    try:
        file = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return _holder(file)
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(file)
    return None


def litter(directory: Path) -> list[Path]:
    """Folders that no load needs: half written, half removed, or replaced by a new one."""
    return [
        path
        for path in sorted(directory.iterdir())
        if LITTER.fullmatch(path.name) or (is_old(path) and path.with_suffix("").exists())
    ]


def is_old(path: Path) -> bool:
    return path.suffix == ".old" and iteration_of(path.name) is not None


def obsolete(
    iterations: Iterable[int],
    newest: int,
    keep_last: int | None,
    retain_interval: int | None,
    loaded: int | None = None,
) -> list[int]:
    """Which checkpoints may go now that `newest` is complete.

    Kept: the `keep_last` newest, the multiples of `retain_interval` (0 is none of them), and the
    one this run was loaded from. Either rule alone keeps what it names plus the newest; without
    both everything stays. Those beyond `newest` are of a run that was given up: not ours to judge.

    >>> obsolete([100, 200, 300, 400, 500], 500, keep_last=2, retain_interval=200)
    [100, 300]
    """
    if keep_last is None and retain_interval is None:
        return []
    upto = sorted(n for n in set(iterations) | {newest} if n <= newest)
    kept = set(upto[-(keep_last or 1) :]) | {newest, loaded}
    if retain_interval is not None:
        kept |= {n for n in upto if n > 0 and n % retain_interval == 0}
    return [n for n in upto if n not in kept]


def saved_iterations(directory: Path) -> list[int]:
    """Iterations of the complete checkpoints, newest first."""
    return sorted({iteration_of(path.name) for path in complete(directory)}, reverse=True)


def write_text(path: Path, text: str) -> None:
    """Writes and syncs a small file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
