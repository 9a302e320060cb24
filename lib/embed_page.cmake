# SPDX-License-Identifier: Apache-2.0
# cmake -DIN=page -DOUT=c-file -DNAME=symbol -P: a text file as a C string, one array element per byte.
file(READ ${IN} hex HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "0x0a," "0x0a,\n" bytes "${bytes}")
file(WRITE ${OUT} "extern const char ${NAME}[];\nconst char ${NAME}[] = {\n${bytes}0};\n")
