# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev faults, which sources it. Kills and fails commands at each file call, replays losses of power and flips bits.

phase build && configure
do_it cmake --build "$build" --target qlorapp_cli fault_shim _C
phase faults
QLORAPP_BUILD_DIR=$PWD/$build
export QLORAPP_BUILD_DIR
do_it "$python" tests/faults/faults.py "$@"
do_it "$python" tests/faults/rank_kills.py
do_it "$python" tests/faults/powerloss.py
do_it "$python" tests/faults/flips.py
