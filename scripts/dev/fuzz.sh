# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev fuzz, which sources it. Builds the parsers under libFuzzer, and runs each on changed inputs.

phase build && configure  # for the headers of fmt in the build folder
do_it cmake -S tests/fuzz -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DQLORAPP_FMT_DIR="$PWD/$build/fmt" -DQLORAPP_DEPS_DIR="${QLORAPP_DEPS_DIR:-}"
do_it cmake --build build/fuzz
do_it cmake --build "$build" --target judge
phase fuzz
do_it "$python" tests/fuzz/fuzz.py build/fuzz/fuzz "$@"
do_it "$python" tests/fuzz/differential.py "$build/tests/fuzz/judge"
