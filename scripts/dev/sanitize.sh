# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev sanitize, which sources it. The C++ tests under sanitizers.

build=build/sanitize
phase build
PATH="$(dirname "$python"):$PATH"
export PATH
options="-G Ninja -DPython_EXECUTABLE=$python -DQLORAPP_DEPS_DIR=${QLORAPP_DEPS_DIR:-} -DQLORAPP_CUDA=OFF -DQLORAPP_BUILD_PYTHON=OFF -DQLORAPP_BUILD_EXAMPLES=OFF"
suites=$(sed -n 's/^foreach(layer \(.*\))$/\1/p' tests/CMakeLists.txt | tr ' ' '\n' | sed '/^cuda$/d; s/$/_tests/')
# shellcheck disable=SC2086
do_it cmake -S . -B build/sanitize $options -DCMAKE_BUILD_TYPE=Debug \
  "-DCMAKE_CXX_FLAGS=-O1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
# shellcheck disable=SC2086
do_it cmake --build build/sanitize --target $suites
# shellcheck disable=SC2086
do_it cmake -S . -B build/threads $options -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS=-O1 -fsanitize=thread"
do_it cmake --build build/threads --target core_tests json_tests files_tests format_tests run_folder_tests
phase tests
# torch is not built with sanitizers: its containers, and what its libraries define twice or keep to the end, are its own.
do_it env ASAN_OPTIONS=detect_container_overflow=0:detect_odr_violation=0:detect_leaks=0:protect_shadow_gap=0 \
  ctest --test-dir build/sanitize -R '^cpp\.' --parallel "$(nproc)" --output-on-failure --no-tests=error
do_it ctest --test-dir build/threads -R '^cpp\.(core|json|files|format)$' --output-on-failure --no-tests=error
do_it build/threads/tests/io/run_folder_tests
