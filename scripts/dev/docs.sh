# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh disable=SC2154
# ./dev docs, which sources it. The site of docs/ and the API reference.

phase docs
do_it mkdir -p build/docs
do_it doxygen docs/Doxyfile
do_it "$python" scripts/make_docs_source.py
do_it "$python" -m sphinx -b html -E -W --keep-going -q -j auto -c docs build/docs/source build/docs/html
[ $dry_run = yes ] || say "build/docs/html/index.html"
