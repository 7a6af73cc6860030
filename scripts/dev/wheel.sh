# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev wheel, which sources it. A wheel for this interpreter and torch, tried in a fresh venv.

phase wheel
PATH="$(dirname "$python"):$PATH"
export PATH
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
export CMAKE_BUILD_PARALLEL_LEVEL
rm -rf build/wheels build/wheel-untagged
do_it "$python" -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w build/wheel-untagged -C build-dir=build/wheel-release \
  -C "cmake.define.QLORAPP_CUDA_ARCHITECTURES=${QLORAPP_CUDA_ARCHITECTURES:-75-real;80-real;86-real;89-real;90-real;100-real;120}" \
  -C "cmake.define.QLORAPP_DEPS_DIR=${QLORAPP_DEPS_DIR:-}" .
# A manylinux tag: the oldest system that has the symbols used. Nothing is copied into the wheel, as torch brings its libraries.
do_it "$python" -m pip install -q --disable-pip-version-check --upgrade --target build/wheel-tools -r requirements/wheel.txt
do_it env PYTHONPATH=build/wheel-tools PATH="$PWD/build/wheel-tools/bin:$PATH" "$python" -m auditwheel repair --plat auto -w build/wheels \
  --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcu*' --exclude 'libnv*' --exclude 'libgomp*' --exclude 'libqlorapp*' \
  build/wheel-untagged/qlorapp-*.whl
phase check
rm -rf build/wheel-venv
do_it "$python" -m venv build/wheel-venv
# The venv finds torch and its dependencies in this interpreter's folder, so nothing is downloaded again.
do_it "$python" scripts/environment.py neighbor build/wheel-venv
do_it build/wheel-venv/bin/python -m pip install -q --disable-pip-version-check --no-deps build/wheels/qlorapp-*.whl
# The demo's training from the installed command, and the same folder through the installed package.
do_it build/wheel-venv/bin/qlorapp train --model examples/data/tiny-llama --data examples/data/train.jsonl --output build/wheel-venv/adapter \
  --max_steps 3 --logging_steps 1 --overwrite_output_dir true
do_it build/wheel-venv/bin/python scripts/try_wheel.py build/wheel-venv/adapter
do_it ls -l build/wheels
