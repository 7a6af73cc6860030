# SPDX-License-Identifier: Apache-2.0
"""All mutants."""

import checkpoints
import parsers
import quantizer
import scaling

MUTANTS = [*quantizer.MUTANTS, *scaling.MUTANTS, *checkpoints.MUTANTS, *parsers.MUTANTS]
