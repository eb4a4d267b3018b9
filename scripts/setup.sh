# Creates the Python environment of this checkout, for speedrun.sh and tests/run.sh:
#
#   source scripts/setup.sh train     everything that a run needs: the extra of this name in pyproject.toml
#   source scripts/setup.sh dev       that, and what the tests need
#
# Afterwards $PYTHON is an interpreter with these packages, in the versions of constraints.txt. They are installed again only if
# that file or pyproject.toml has changed: .venv/installed holds their checksum and the extra.
#
#   NANOMUON_PYTHON=/path/to/python   use this interpreter, which must have all packages, and install nothing. Its PyTorch may be
#                                     any from 2.11 on, for example one built for the CUDA version of an older driver

extra=$1
if [ -n "${NANOMUON_PYTHON:-}" ]; then
    PYTHON=$NANOMUON_PYTHON
    needed="torch tiktoken rustbpe datasets numpy pyarrow safetensors filelock pydantic matplotlib scipy yaml"
    missing=$("$PYTHON" -c 'import importlib.metadata, importlib.util, re, sys
missing = [name for name in sys.argv[1:] if not importlib.util.find_spec(name)]
if not missing and [int(n) for n in re.findall(r"\d+", importlib.metadata.version("torch"))[:2]] < [2, 11]:
    missing = ["PyTorch 2.11 or newer"]
print(*missing)' $needed 2>/dev/null) || {
        echo "error: NANOMUON_PYTHON=$PYTHON does not run: set it to a Python interpreter, or unset it" >&2
        return 2
    }
    if [ -n "$missing" ]; then
        echo "error: NANOMUON_PYTHON=$PYTHON has no $missing: $PYTHON -m pip install -e '.[$extra]', or unset NANOMUON_PYTHON" >&2
        return 2
    fi
else
    PYTHON=.venv/bin/python
    checksum=$(cat pyproject.toml constraints.txt | cksum)
    # Read by that Python itself, which may be gone, for example after an upgrade of the system
    installed=$("$PYTHON" -c 'print(open(".venv/installed").read())' 2>/dev/null || true)
    if [ "$installed" != "$checksum $extra" ] && [ "$installed" != "$checksum dev" ]; then # dev includes train
        echo "environment: installing into .venv (a minute or two)" || true
        if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "error: this needs Python 3.10 or newer; install it and its venv module" >&2
            return 2
        fi
        rm -f .venv/installed # until the installation is complete
        { "$PYTHON" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear .venv; } &&
            "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[$extra]" || {
            echo "error: the installation failed (see above); run the command again to continue it" >&2
            return 2
        }
        # Compile bytecode on all cores; pip would use one, which would take half of the total time. Errors do not matter: some
        # packages contain templates that are not Python, and a module without bytecode is compiled when it is imported
        "$PYTHON" -m compileall -q -q -j 0 .venv/lib || true
        echo "$checksum $extra" >.venv/installed
    else
        echo "environment: .venv is complete, skipped" || true
    fi
fi
