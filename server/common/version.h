/* SPDX-License-Identifier: Apache-2.0 */
/* Version of this build, for --version, the info metric and Hello. */
#ifndef EP_SERVER_COMMON_VERSION_H
#define EP_SERVER_COMMON_VERSION_H

#include <stdbool.h>
#include <stdio.h>

/* Static texts. */
const char *ep_version_text(void);     /* "0.1.0" */
const char *ep_version_build(void);    /* source revision, or "unknown" */
const char *ep_version_isa(void);      /* instruction set of the build: "x86_64" */
const char *ep_version_software(void); /* "expertd 0.1.0 (revision)", as in Hello */
void ep_version_print(const char *program, bool json, FILE *out);

#endif
