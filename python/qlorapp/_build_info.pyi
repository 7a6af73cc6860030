# SPDX-License-Identifier: Apache-2.0
# What CMake writes into _build_info.py.
TORCH_VERSION: str
VERSION: str
