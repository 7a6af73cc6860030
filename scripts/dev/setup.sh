# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2034,SC2154
# For ./dev, which sources it: the packages and the interpreter that a command needs, and the build folder. Needs command, compiler, build and
# the functions of ./dev; sets python.

# 1. Packages. Calls apt-get only if one is missing.
have_header() {
  for folder in "${QLORAPP_DEPS_DIR:-/usr/include}" /usr/include /usr/local/include /usr/include/eigen3; do
    [ ! -e "$folder/$1" ] || return 0
  done
  return 1
}
new_enough_compiler() {
  version=$("${CXX:-g++}" -dumpversion 2>/dev/null | cut -d. -f1) && [ "${version:-0}" -ge 11 ]
}
packages() {
  missing=
  interpreter=${QLORAPP_PYTHON:-python3}
  if [ $command = docs ]; then packages_of_docs; else packages_of_build; fi
  [ -n "$missing" ] || return 0
  root=
  [ "$(id -u)" = 0 ] || root=sudo
  if command -v apt-get >/dev/null && { [ -z "$root" ] || sudo -n true 2>/dev/null; }; then
    say "packages missing:$missing"
    do_it $root apt-get update -qq || true
    # shellcheck disable=SC2086
    do_it $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing && return 0
    [ -z "$needed" ] || fail "apt-get could not install:$needed"
  fi
  [ -z "$needed" ] || fail "packages are missing and cannot be installed from here. Run as root: apt-get install -y$missing"
  say "no ccache here; building without it"
}
packages_of_docs() {  # the site is made from sources: no compiler, no torch
  command -v doxygen >/dev/null || missing="$missing doxygen"
  "$interpreter" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
  needed=$missing
}
packages_of_build() {
  new_enough_compiler || missing="$missing ${compiler:-build-essential}"
  command -v "$interpreter" >/dev/null || missing="$missing python3"
  "$interpreter" scripts/environment.py headers 2>/dev/null || missing="$missing python3-dev"
  has_torch "$interpreter" || [ -x .venv/bin/python ] || python3 -c 'import ensurepip, venv' 2>/dev/null ||
    missing="$missing python3-venv"
  have_header nlohmann/json.hpp || missing="$missing nlohmann-json3-dev"
  have_header CLI/CLI.hpp || missing="$missing libcli11-dev"
  have_header Eigen/Core || missing="$missing libeigen3-dev"
  if [ $command = fuzz ] && ! echo 'int main() {}' | clang++ -x c++ -fsanitize=address - -o /dev/null 2>/dev/null; then
    missing="$missing clang"
    ! apt-cache show libclang-rt-14-dev >/dev/null 2>&1 || missing="$missing libclang-rt-14-dev"  # Debian 12 keeps it apart
  fi
  have_header catch2/catch.hpp || have_header catch2/catch_all.hpp || missing="$missing catch2"
  needed=$missing  # ccache only saves time
  command -v ccache >/dev/null || missing="$missing ccache"
}

# 2. Python. Uses an interpreter that has torch, and then downloads no torch.
has_torch() {
  command -v "$1" >/dev/null && "$1" scripts/environment.py torch 2>/dev/null
}
docs_tools() {  # in a venv of their own: their pins never meet those of the tests
  python=build/docs-venv/bin/python
  [ -x $python ] || do_it "${QLORAPP_PYTHON:-python3}" -m venv build/docs-venv
  stamp=$(cksum <requirements/docs.txt | tr -d ' ')
  if [ "$(cat build/docs-venv/requirements.stamp 2>/dev/null)" != "$stamp" ]; then
    do_it $python -m pip install -q --disable-pip-version-check -r requirements/docs.txt
    [ $dry_run = yes ] || printf '%s' "$stamp" >build/docs-venv/requirements.stamp
  fi
}
interpreter() {
  if [ $command = docs ]; then docs_tools; return 0; fi
  stamp=$(cat requirements/build.txt requirements/lint.txt requirements/test.txt | cksum | tr -d ' ')
  if [ -n "${QLORAPP_PYTHON:-}" ]; then
    has_torch "$QLORAPP_PYTHON" || fail "QLORAPP_PYTHON=$QLORAPP_PYTHON has no torch >= 2.8 with headers. pip install torch==2.11.0 there, or unset it."
    python=$(command -v "$QLORAPP_PYTHON")
  elif has_torch python3; then
    python=$(command -v python3)
  else
    python=$PWD/.venv/bin/python
    if [ ! -x "$python" ]; then
      say "no torch >= 2.8 found: making .venv (about 5 GB, once)"
      do_it python3 -m venv .venv
    fi
    if [ "$(cat .venv/requirements.stamp 2>/dev/null)" != "$stamp" ]; then
      do_it "$python" -m pip install -q --disable-pip-version-check -r requirements/test.txt
      [ $dry_run = yes ] || printf '%s' "$stamp" >.venv/requirements.stamp
    fi
    return 0
  fi
  say "using $python, which has torch"
  tools=$(dirname "$python")
  PATH="$tools:$PATH"
  lacking=$("$python" scripts/environment.py lacking)
  if [ -n "$lacking" ] && [ "$(cat build/python.stamp 2>/dev/null)" != "$python $stamp" ]; then
    say "it lacks: $lacking. Trying pip, with its torch held fixed"
    mkdir -p build
    "$python" scripts/environment.py hold_torch >build/constraints.txt
    # shellcheck disable=SC2086
    do_it "$python" -m pip install -q --disable-pip-version-check -c build/constraints.txt $lacking ||
      say "pip could not install them; the tests that need them will be skipped"
    [ $dry_run = yes ] || printf '%s' "$python $stamp" >build/python.stamp
  fi
}

# 3. Configure and build. ninja itself notices when a CMakeLists.txt has changed.
configure() {
  PATH="$(dirname "$python"):$PATH"
  CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}  # a torch file takes about a gigabyte to compile
  export PATH CMAKE_BUILD_PARALLEL_LEVEL
  if [ $dry_run = no ]; then
    command -v cmake >/dev/null && command -v ninja >/dev/null || fail "needs cmake >= 3.25 and ninja: $python -m pip install cmake ninja"
  fi
  settings="$python ${CXX:-g++} ${QLORAPP_DEPS_DIR:-}"
  if [ ! -e $build/build.ninja ] || [ "$(cat $build/settings.stamp 2>/dev/null)" != "$settings" ]; then
    # --fresh: a build folder keeps the paths of another Python's torch, and its compiler when CXX is unset again.
    do_it cmake --fresh -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$python" -DQLORAPP_DEPS_DIR="${QLORAPP_DEPS_DIR:-}"
    [ $dry_run = yes ] || printf '%s' "$settings" >"$build/settings.stamp"
  fi
}
