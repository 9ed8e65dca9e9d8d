#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements, then the project itself (editable).
# Does nothing when nothing changed: a stamp in .venv remembers what was installed.
# PYTHON=python3.12 bash scripts/setup.sh   chooses the interpreter for a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

python="${PYTHON:-python3}"
command -v "$python" >/dev/null ||
    fail "$python was not found; install Python 3.10 or newer, or say which one: PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is Python $version, 3.10 or newer is needed; say which one: PYTHON=/path/to/python3"

stamp=.venv/installed
wanted=$("$python" - <<'END'
import hashlib, pathlib
files = (pathlib.Path(name).read_bytes() for name in ("requirements.txt", "setup.py"))
print(hashlib.sha256(b"\0".join(files)).hexdigest(), pathlib.Path.cwd())
END
)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "setup: making .venv with Python $version"
    "$python" -m venv --clear .venv ||
        fail "could not make .venv; on Debian and Ubuntu: apt-get install python3-venv"
fi
rm -f "$stamp"
echo "setup: installing requirements.txt (torch is large: a minute or more the first time)"
options=(--disable-pip-version-check)
[ -t 1 ] || options+=(-qq)  # pip's progress bars are for a terminal; errors are shown anyway
.venv/bin/python -m pip install "${options[@]}" -r requirements.txt
.venv/bin/python -m pip install "${options[@]}" --no-deps --no-build-isolation --editable .
echo "$wanted" >"$stamp"
echo "setup: done"
