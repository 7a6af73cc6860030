# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev mutants, which sources it. Puts one mistake at a time into the library.

phase build && configure
do_it cmake --build "$build" --target json_tests files_tests format_tests text_tests ops_tests quant_tests io_tests train_tests grad_scaler_probe schedule_probe data_probe judge \
  qlorapp_cli _C
phase mutants
QLORAPP_BUILD_DIR=$PWD/$build
export QLORAPP_BUILD_DIR
do_it "$python" tests/mutants/mutants.py "$@"
