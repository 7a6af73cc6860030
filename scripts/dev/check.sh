# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev check, which sources it. Builds and tests what a change touches.

found=$("$python" scripts/touched.py "$@") || exit 1
targets=$(printf '%s\n' "$found" | sed -n 1p)
tests=$(printf '%s\n' "$found" | sed -n 2p)
[ -n "$tests" ] || { say "no test is affected"; exit 0; }
phase build && configure
# shellcheck disable=SC2086
[ -z "$targets" ] || do_it cmake --build "$build" --target $targets
phase tests
status=0 suites='' files=''
for test in $tests; do
  case $test in tests/*) files="$files $test" ;; *) suites="$suites${suites:+|}$test" ;; esac
done
[ -z "$suites" ] || do_it ctest --test-dir "$build" -j "$(nproc)" --output-on-failure -R "^($suites)\$" || status=$?
# shellcheck disable=SC2086
[ -z "$files" ] || do_it "$python" -m pytest -q -p no:cacheprovider $files || status=$?
finish
exit $status
