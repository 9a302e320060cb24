/* SPDX-License-Identifier: Apache-2.0 */
/* Checking certificates and keys. */
#include "common/service_tls.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/private_file.h"

#define TIME_BYTES 64

/* One of the files, for messages about it. */
typedef struct tls_file {
    const ep_options *options;
    const char *key;
    const char *path;
    ep_error *error;
} tls_file;

#define FAIL(file, ...) ep_options_fail((file)->options, (file)->key, (file)->error, __VA_ARGS__)

static void put_time(const ASN1_TIME *at, char out[TIME_BYTES])
{
    struct tm parts;
    if (ASN1_TIME_to_tm(at, &parts) != 1 || strftime(out, TIME_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
        snprintf(out, TIME_BYTES, "(unreadable)");
    }
}

/* Valid now? Else why not. Warns when little time is left. */
static ep_err check_dates(const tls_file *file, const X509 *cert)
{
    char from[TIME_BYTES], until[TIME_BYTES];
    int days = 0, seconds = 0;
    put_time(X509_get0_notBefore(cert), from);
    put_time(X509_get0_notAfter(cert), until);
    if (X509_cmp_current_time(X509_get0_notBefore(cert)) >= 0) {
        return FAIL(file, "the certificate in %.200s is valid only from %s, until %s", file->path, from,
                    until);
    }
    if (X509_cmp_current_time(X509_get0_notAfter(cert)) <= 0) {
        return FAIL(file, "the certificate in %.200s was valid from %s until %s: it has expired", file->path,
                    from, until);
    }
    if (ASN1_TIME_diff(&days, &seconds, NULL, X509_get0_notAfter(cert)) == 1 && days < EP_TLS_WARN_DAYS) {
        ep_log(EP_LOG_WARN, "tls-expires", "%s %s valid_until %s days_left %d", file->key, file->path, until,
               days);
    }
    return EP_OK;
}

static ep_err open_file(const tls_file *file, bool has_key, FILE **out_stream)
{
    struct stat st;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    bool is_file = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    bool is_private = is_file && (!has_key || ep_file_is_private(&st, geteuid()));
    FILE *stream = is_private ? fdopen(fd, "r") : NULL;
    if (stream == NULL) {
        ep_err err = fd < 0 || is_private ? FAIL(file, "cannot read %.200s: %s", file->path, strerror(errno))
                     : !is_file           ? FAIL(file, "cannot read %.200s: no regular file", file->path)
                                          : FAIL(file, "%.200s holds a key and has mode %04o; allowed: %s", file->path,
                                                 (unsigned)(st.st_mode & 07777), EP_PRIVATE_FILE_ALLOWED);
        if (fd >= 0) {
            close(fd);
        }
        return err;
    }
    *out_stream = stream;
    return EP_OK;
}

/* Old certificates may stand beside their successors, so one that is valid is enough. */
static ep_err check_ca(const tls_file *file)
{
    FILE *stream = NULL;
    X509 *cert;
    size_t count = 0, valid = 0;
    ep_err err = open_file(file, false, &stream);
    if (err != EP_OK) {
        return err;
    }
    while ((cert = PEM_read_X509(stream, NULL, NULL, NULL)) != NULL) {
        err = check_dates(file, cert);
        count++;
        valid += err == EP_OK;
        X509_free(cert);
    }
    fclose(stream);
    /* the end of the file is the expected end; anything else is a broken block */
    bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    ERR_clear_error();
    if (count == 0 || !at_end) {
        return FAIL(file, "%.200s holds %s", file->path,
                    count == 0 ? "no certificate in PEM form" : "a broken block after its certificates");
    }
    return valid > 0 ? EP_OK : err;
}

static int no_password(char *buffer, int bytes, int writes, void *arg)
{
    (void)buffer, (void)bytes, (void)writes, (void)arg;
    return -1; /* never ask on the terminal */
}

static ep_err check_pair(const tls_file *file, FILE *stream)
{
    ep_err err = EP_OK;
    X509 *cert = PEM_read_X509(stream, NULL, NULL, NULL); /* further ones are the chain */
    rewind(stream);
    EVP_PKEY *key = PEM_read_PrivateKey(stream, NULL, no_password, NULL);
    if (cert == NULL) {
        err = FAIL(file, "%.200s holds no certificate in PEM form", file->path);
    } else if (key == NULL) {
        err = FAIL(file, "%.200s holds no key in PEM form without a password", file->path);
    } else if (X509_check_private_key(cert, key) != 1) {
        err = FAIL(file, "the key in %.200s does not belong to its certificate", file->path);
    } else {
        err = check_dates(file, cert);
    }
    ERR_clear_error();
    EVP_PKEY_free(key);
    X509_free(cert);
    return err;
}

static ep_err check_cert_key(const tls_file *file)
{
    FILE *stream = NULL;
    ep_err err = open_file(file, true, &stream);
    if (err == EP_OK) {
        err = check_pair(file, stream);
        fclose(stream);
    }
    return err;
}

ep_err ep_service_tls_check(const ep_options *options, ep_error *out_error)
{
    static const struct {
        const char *key;
        ep_err (*check)(const tls_file *file);
    } rows[] = {
        {"tls_ca_file", check_ca}, {"tls_cert_key_file", check_cert_key}, {"admin_tls_ca_file", check_ca}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const char *path = ep_options_text(options, rows[i].key);
        const tls_file file = {.options = options, .key = rows[i].key, .path = path, .error = out_error};
        ep_err err = path[0] != 0 ? rows[i].check(&file) : EP_OK;
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}
