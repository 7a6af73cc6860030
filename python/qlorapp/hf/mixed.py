# SPDX-License-Identifier: Apache-2.0
"""The base of mixins before transformers' Trainer: a type checker sees the methods that they call and replace."""

from typing import TYPE_CHECKING

import transformers

if TYPE_CHECKING:
    Mixed = transformers.Trainer
else:
    Mixed = object
