/* SPDX-License-Identifier: Apache-2.0 */
/* Temporary certificates for tests, made in the process. A failure ends the test program with a
 * message. */
#ifndef EP_TEST_TLS_CERTS_H
#define EP_TEST_TLS_CERTS_H

#include <stdbool.h>

typedef struct ep_test_cert ep_test_cert;

/* Valid from now + from_days to now + until_days. host: its name; issuer NULL: a self-signed CA. */
ep_test_cert *ep_test_cert_new(const char *host, const ep_test_cert *issuer, int from_days,
                               int until_days);
void ep_test_cert_free(ep_test_cert *cert);
/* Append to a PEM file, which is made with mode 0600 if there is none. */
void ep_test_cert_write(const ep_test_cert *cert, const char *path);
void ep_test_cert_write_key(const ep_test_cert *cert, const char *path);

#endif
