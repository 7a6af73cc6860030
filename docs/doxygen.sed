# SPDX-License-Identifier: Apache-2.0
# How Doxygen reads a header. The comment below the SPDX line documents the file.
1s|.*|/// @file|
# "@throws A, B or C if …": Doxygen knows one name per command.
s|@throws \([A-Za-z0-9:]*Error\), \([A-Z][A-Za-z]*Error\)|@throws \1 @throws \2|
s|\(@throws [A-Za-z0-9:]*Error @throws [A-Za-z]*Error\) or \([A-Z][A-Za-z]*Error\)|\1 @throws \2|
s|\(@throws [A-Za-z0-9:]*Error\)[.]$|\1|
# A deduction guide reads as a function with the name of its class.
s|^[A-Za-z]*(.*) -> .*;$|;|
# In the file's comment, lines that are indented by four are code, also without an empty line above (warnings below count that line).
1,/^#pragma once/{
  N
  s|^\(/// [^ ].*\)\n\(///     \)|\1\n///\n\2|
  P
  D
}
