#!/usr/bin/env bash
# Run the tests: bash tests/run.sh [pytest arguments]. Those marked slow: bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
has() { "$PYTHON" -c "import $1" 2>/dev/null; } # NANOMUON_PYTHON may name an interpreter without these two
if has ruff && [ $# -eq 0 ]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
fi
parallel=()
# Two files at a time, since the tests in a file share runs and process groups. A worker that dies ends the whole run.
if has xdist; then parallel=(--numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0); fi
exec "$PYTHON" -m pytest ${parallel[@]+"${parallel[@]}"} -m "not slow" "$@" # with two -m, the last one counts
