#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks format, rules and spelling without changing anything; --fix rewrites the sources. Needs requirements/lint.txt.
#     sh scripts/lint.sh PYTHON [--fix]
# Exits 1 on a finding and 77 if a pinned tool is missing (ctest reports that as skipped).
set -u
cd "$(dirname "$0")/.."
python=${1:?lint.sh needs the interpreter that has the tools}
fix=no
[ "${2:-}" != --fix ] || fix=yes

missing=$("$python" - <<'PY'
from importlib.metadata import PackageNotFoundError, version
for line in open("requirements/lint.txt"):
    name, _, pin = line.strip().partition("==")
    name = name.partition("[")[0]
    if pin:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "nothing"
        if found != pin:
            print(f"{name}=={pin} (found {found})")
PY
) || exit 77
if [ -n "$missing" ]; then
  printf 'lint: skipped, requires %s. Run: %s -m pip install -r requirements/lint.txt\n' "$(printf '%s' "$missing" | tr '\n' ',')" "$python" >&2
  exit 77
fi

clang_format=$("$python" -c 'import clang_format, pathlib; print(pathlib.Path(clang_format.__file__).parent / "data/bin/clang-format")')
if [ $fix = yes ]; then clang=-i rules=--fix layout= spelling=--write-changes; else clang='--dry-run --Werror' rules= layout=--check spelling=; fi
status=0
step() {
  printf '   $ %s\n' "$*" | cut -c1-160
  "$@" || status=1
}
# shellcheck disable=SC2086,SC2046
step "$clang_format" $clang $(find include src cuda cli python tests examples benchmarks -name '*.[hc]pp' -o -name '*.cu' -o -name '*.cuh')
# shellcheck disable=SC2086
step "$python" -m ruff check --no-cache $rules .
# shellcheck disable=SC2086
step "$python" -m ruff format --no-cache $layout .
# shellcheck disable=SC2086
step "$python" -m codespell_lib $spelling .
exit $status
