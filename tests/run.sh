#!/usr/bin/env bash
# The tests: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
"$PYTHON" -m ruff check .
exec "$PYTHON" -m pytest "$@"
