# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's own classes over the C++ engine: models are transformers' classes, adapters are PEFT's. Imports nothing by itself."""
