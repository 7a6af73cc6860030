# SPDX-License-Identifier: Apache-2.0
"""All mutants."""

import checkpoints
import generation
import parsers
import quantizer
import safety
import scaling

MUTANTS = [*quantizer.MUTANTS, *scaling.MUTANTS, *checkpoints.MUTANTS, *parsers.MUTANTS, *safety.MUTANTS, *generation.MUTANTS]
