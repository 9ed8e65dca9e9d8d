#!/usr/bin/env bash
# Everything that must hold before a change lands: lint, layer contracts, tests.
# Arguments go to pytest: bash scripts/test.sh tests/core -k schedule
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
# Tests start some hundred processes: our modules are compiled once, not in every one of them.
unset PYTHONDONTWRITEBYTECODE

ruff check --quiet .
lint-imports --no-logo
python -m pytest -q "$@"
