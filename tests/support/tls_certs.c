/* SPDX-License-Identifier: Apache-2.0 */
/* Makes certificates with libcrypto: a CA and certificates signed by it, with any dates. */
#include "support/tls_certs.h"

#include <fcntl.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdlib.h>
#include <unistd.h>

#include "support/check.h"

#define DAY_S (24 * 3600L)

struct ep_test_cert {
    X509 *x509;
    EVP_PKEY *key;
};

static void add_extension(X509 *cert, int nid, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, cert, cert, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, nid, value);
    CHECK(extension != NULL && X509_add_ext(cert, extension, -1) == 1);
    X509_EXTENSION_free(extension);
}

ep_test_cert *ep_test_cert_new(const char *host, const ep_test_cert *issuer, int from_days,
                               int until_days)
{
    static long serial;
    char name[128];
    ep_test_cert *cert = calloc(1, sizeof(*cert));
    CHECK(cert != NULL && (cert->x509 = X509_new()) != NULL &&
          (cert->key = EVP_EC_gen("P-256")) != NULL);
    X509 *x = cert->x509;
    X509_NAME *subject = X509_get_subject_name(x);
    CHECK(X509_set_version(x, 2) == 1 &&
          ASN1_INTEGER_set(X509_get_serialNumber(x), getpid() * 1000L + ++serial) == 1);
    CHECK(X509_gmtime_adj(X509_getm_notBefore(x), from_days * DAY_S) != NULL);
    CHECK(X509_gmtime_adj(X509_getm_notAfter(x), until_days * DAY_S) != NULL);
    CHECK(X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, (const unsigned char *)host, -1,
                                     -1, 0) == 1);
    CHECK(X509_set_issuer_name(x, issuer != NULL ? X509_get_subject_name(issuer->x509) : subject) ==
          1);
    CHECK(X509_set_pubkey(x, cert->key) == 1);
    snprintf(name, sizeof(name), "DNS:%s", host);
    add_extension(x, NID_basic_constraints,
                  issuer == NULL ? "critical,CA:TRUE" : "critical,CA:FALSE");
    add_extension(x, NID_subject_alt_name, name);
    CHECK(X509_sign(x, issuer != NULL ? issuer->key : cert->key, EVP_sha256()) > 0);
    return cert;
}

void ep_test_cert_free(ep_test_cert *cert)
{
    X509_free(cert->x509);
    EVP_PKEY_free(cert->key);
    free(cert);
}

static FILE *append_to(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    FILE *file = fd >= 0 ? fdopen(fd, "a") : NULL;
    CHECK(file != NULL);
    return file;
}

void ep_test_cert_write(const ep_test_cert *cert, const char *path)
{
    FILE *file = append_to(path);
    CHECK(PEM_write_X509(file, cert->x509) == 1 && fclose(file) == 0);
}

void ep_test_cert_write_key(const ep_test_cert *cert, const char *path)
{
    FILE *file = append_to(path);
    CHECK(PEM_write_PrivateKey(file, cert->key, NULL, NULL, 0, NULL, NULL) == 1 &&
          fclose(file) == 0);
}
