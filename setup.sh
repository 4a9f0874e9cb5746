#!/usr/bin/env bash
# Creates .venv with the pinned CPU stack, once; `make setup` runs it. Python 3.11 on Linux x86-64.
set -euo pipefail
cd "$(dirname "$0")"
stamp=.venv/.installed-$(cat requirements/*.lock setup.sh pyproject.toml | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0
say() { printf '%s\n' "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

python=
for candidate in ${PYTHON:-python3.11 python3}; do
  "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && python=$candidate && break
done
[ -n "$python" ] || fail "needs Python 3.11, and ${PYTHON:-neither python3.11 nor python3} is none: set PYTHON to one"
free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
[ "$free_kb" -gt 5000000 ] || fail "needs 5 GB of disk here, $((free_kb / 1000000)) GB is free: make room"
"$python" -c 'import ctypes.util, sys; sys.exit(ctypes.util.find_library("numa") is None)' ||
  fail "libnuma is missing, which vLLM's CPU build needs: install the package libnuma1"

say "installing into .venv (3.4 GB, some minutes)"
"$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@" 2> >(grep -v '^WARNING: Location' >&2); }
# torch's CPU build: from wherever pip is pointed to, else from PyTorch's own index, asked for this one package only.
pip install --no-deps 'torch==2.13.0+cpu' 2>/dev/null ||
  pip install --no-deps --index-url https://download.pytorch.org/whl/cpu 'torch==2.13.0+cpu' ||
  fail "torch 2.13.0+cpu was found neither in pip's index nor in PyTorch's CPU index"
pip install --no-deps -r requirements/dev.lock
pip install --no-deps -r requirements/cpu.lock
pip install --no-deps --no-build-isolation -e .
rm -f .venv/.installed-*
touch "$stamp"
say "done"
