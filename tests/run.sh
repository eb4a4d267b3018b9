#!/usr/bin/env bash
# The tests: bash tests/run.sh [pytest arguments]; those marked slow: bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
has() { "$PYTHON" -c "import $1" 2>/dev/null; } # an interpreter given by NANOMUON_PYTHON may lack these two
if has ruff; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
fi
parallel=()
# Two files at a time; the tests of one file share their runs and their process groups. A worker that dies ends the whole run.
if has xdist; then parallel=(--numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0); fi
exec "$PYTHON" -m pytest ${parallel[@]+"${parallel[@]}"} -m "not slow" "$@" # of two -m the last one counts
