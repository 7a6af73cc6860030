# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev test, which sources it. Builds everything and runs every test.

skipped() {  # counts skipped test cases in a log: ctest prints no output of a passing test
  awk '/there is no GPU|no GPU here/ { n++ } match($0, /[0-9]+ skipped/) { n += substr($0, RSTART, RLENGTH) } END { print n + 0 }' "$1"
}

phase build && configure
do_it cmake --build "$build" --target all qlorapp_header_tests
phase tests
status=0
do_it ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error --output-log "$build/ctest.log" "$@" || status=$?
finish
[ $dry_run = yes ] || say "$(skipped "$build/Testing/Temporary/LastTest.log") test cases were skipped, for example those that need a GPU"
[ $dry_run = yes ] || sed -n '/tests passed,\|tests passed out of/,$p' "$build/ctest.log"  # ctest's summary last
exit $status
