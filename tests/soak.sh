#!/usr/bin/env bash
# What takes too long for tests/run.sh: bash tests/soak.sh [kills]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
exec "$PYTHON" -m tests.soak "$@"
