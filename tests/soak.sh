#!/usr/bin/env bash
# What takes too long for tests/run.sh: bash tests/soak.sh [kills], bash tests/soak.sh --minutes 10
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh dev
exec "$PYTHON" -m tests.soak "$@"
