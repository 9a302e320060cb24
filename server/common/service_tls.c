/* SPDX-License-Identifier: Apache-2.0 */
/* Checks certificates and keys. */
#include "common/service_tls.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/private_file.h"

#define TIME_BYTES 64

/* One of the files. */
typedef struct tls_file {
    const ep_options *options;
    const char *key;
    const char *path;
    ep_error *error;
    bool log;           /* warn when little time is left */
    uint64_t *expiry_s; /* raised to the end of each valid certificate */
} tls_file;

#define FAIL(file, ...) ep_options_fail((file)->options, (file)->key, (file)->error, __VA_ARGS__)

static void put_time(const ASN1_TIME *at, char out[TIME_BYTES])
{
    struct tm parts;
    if (ASN1_TIME_to_tm(at, &parts) != 1 ||
        strftime(out, TIME_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
        snprintf(out, TIME_BYTES, "(unreadable)");
    }
}

static uint64_t unix_seconds(const ASN1_TIME *at)
{
    struct tm parts;
    time_t seconds = ASN1_TIME_to_tm(at, &parts) == 1 ? timegm(&parts) : 0;
    return seconds > 0 ? (uint64_t)seconds : 0;
}

/* Checks that a certificate is valid now; warns when little time is left. */
static ep_err check_dates(const tls_file *file, const X509 *cert)
{
    uint64_t until_s = unix_seconds(X509_get0_notAfter(cert));
    char from[TIME_BYTES], until[TIME_BYTES];
    int days = 0, seconds = 0;
    put_time(X509_get0_notBefore(cert), from);
    put_time(X509_get0_notAfter(cert), until);
    if (X509_cmp_current_time(X509_get0_notBefore(cert)) >= 0) {
        return FAIL(file, "the certificate in %.200s is valid only from %s, until %s", file->path,
                    from, until);
    }
    if (X509_cmp_current_time(X509_get0_notAfter(cert)) <= 0) {
        return FAIL(file, "the certificate in %.200s was valid from %s until %s: it has expired",
                    file->path, from, until);
    }
    if (ASN1_TIME_diff(&days, &seconds, NULL, X509_get0_notAfter(cert)) == 1 &&
        days < EP_TLS_WARN_DAYS && file->log) {
        ep_log(EP_LOG_WARN, "tls-expires", EP_KV(key, file->key), EP_KV(path, file->path),
               EP_KV(valid_until, until), EP_KV(days_left, days),
               EP_KV(hint, "put a newer one in its place: it is in force within a minute"));
    }
    *file->expiry_s = until_s > *file->expiry_s ? until_s : *file->expiry_s;
    return EP_OK;
}

static ep_err open_file(const tls_file *file, bool has_key, FILE **out_stream)
{
    struct stat st;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    bool is_file = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    bool is_private = is_file && (!has_key || ep_file_is_private(&st));
    FILE *stream = is_private ? fdopen(fd, "r") : NULL;
    if (stream == NULL) {
        char why[EP_ERRNO_TEXT_BYTES];
        ep_err err =
            fd < 0 || is_private
                ? FAIL(file, "cannot read %.200s: %s", file->path, ep_errno_text(errno, why))
            : !is_file ? FAIL(file, "cannot read %.200s: no regular file", file->path)
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

/* One valid certificate is enough, since old ones may be there beside their successors. */
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
    /* the end of the file is expected; any other error is a broken block */
    bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    ERR_clear_error();
    if (count == 0 || !at_end) {
        return FAIL(file, "%.200s holds %s", file->path,
                    count == 0 ? "no certificate in PEM form"
                               : "a broken block after its certificates");
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
    X509 *cert = PEM_read_X509(stream, NULL, NULL, NULL); /* the others are the chain */
    rewind(stream);
    EVP_PKEY *key = PEM_read_PrivateKey(stream, NULL, no_password, NULL);
    if (cert == NULL) {
        err = FAIL(file, "%.200s holds no certificate in PEM form", file->path);
    } else if (key == NULL) {
        err = FAIL(file,
                   "%.200s holds no key in PEM form without a password; certificate and key belong "
                   "into this one file",
                   file->path);
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

static const struct {
    const char *key;
    ep_err (*check)(const tls_file *file);
} rows[EP_TLS_FILES] = {{"tls_ca_file", check_ca},
                        {"tls_cert_key_file", check_cert_key},
                        {"admin_tls_ca_file", check_ca}};

static ep_err check_all(const ep_options *options, bool log, uint64_t expiry_s[EP_TLS_FILES],
                        ep_error *out_error)
{
    for (size_t i = 0; i < EP_TLS_FILES; i++) {
        const char *path = ep_options_text(options, rows[i].key);
        const tls_file file = {.options = options,
                               .key = rows[i].key,
                               .path = path,
                               .error = out_error,
                               .log = log,
                               .expiry_s = &expiry_s[i]};
        expiry_s[i] = 0;
        ep_err err = path[0] != 0 ? rows[i].check(&file) : EP_OK;
        if (err != EP_OK) {
            return err;
        }
    }
    return EP_OK;
}

ep_err ep_service_tls_check(const ep_options *options, ep_error *out_error)
{
    uint64_t expiry_s[EP_TLS_FILES];
    return check_all(options, true, expiry_s, out_error);
}

/* ---- renewal ---- */

#define LOOK_MS 60000u

static void look_at_files(const ep_options *options, ep_tls_stamp out_stamps[EP_TLS_FILES])
{
    for (size_t i = 0; i < EP_TLS_FILES; i++) {
        const char *path = ep_options_text(options, rows[i].key);
        struct stat st;
        /* they are compared as bytes, so padding must be zero */
        memset(&out_stamps[i], 0, sizeof(out_stamps[i]));
        if (path[0] != 0 && stat(path, &st) == 0) {
            out_stamps[i].changed_ns =
                (int64_t)(st.st_ctim.tv_sec * (int64_t)EP_NS_PER_S + st.st_ctim.tv_nsec);
            out_stamps[i].inode = st.st_ino;
            out_stamps[i].bytes = (uint64_t)st.st_size;
        }
    }
}

static void take(ep_tls_watch *watch, const ep_tls_stamp stamps[EP_TLS_FILES],
                 const uint64_t expiry_s[EP_TLS_FILES])
{
    memcpy(watch->in_force, stamps, sizeof(watch->in_force));
    for (size_t i = 0; i < EP_TLS_FILES; i++) {
        __atomic_store_n(&watch->expiry_s[i], expiry_s[i], __ATOMIC_RELAXED);
    }
}

static void set_refusal(ep_tls_watch *watch, const char *text)
{
    pthread_mutex_lock(&watch->lock);
    snprintf(watch->refusal, sizeof(watch->refusal), "%s", text);
    pthread_mutex_unlock(&watch->lock);
}

static void renew(void *arg)
{
    ep_tls_watch *watch = arg;
    ep_tls_stamp stamps[EP_TLS_FILES];
    uint64_t expiry_s[EP_TLS_FILES];
    ep_error error;
    /* before the files are read, so that the next check sees what is written meanwhile */
    look_at_files(watch->options, stamps);
    if (memcmp(stamps, watch->in_force, sizeof(stamps)) == 0) {
        set_refusal(watch, "");
        return;
    }
    if (check_all(watch->options, true, expiry_s, &error) != EP_OK ||
        ep_rpc_server_renew_tls(watch->server, &error) != EP_OK) {
        set_refusal(watch, error.text);
        ep_log(
            EP_LOG_ERROR, "tls-refused", EP_KV(reason, error.text),
            EP_KV(effect, "the files read before stay in force until a restart, which would fail"),
            EP_KV(retry_ms, LOOK_MS));
        return;
    }
    take(watch, stamps, expiry_s);
    set_refusal(watch, "");
    ep_log(
        EP_LOG_INFO, "tls-renewed",
        EP_KV(days_left, ((long long)ep_tls_watch_expiry(watch) - (long long)time(NULL)) / 86400),
        EP_KV(effect, "new connections get the new files"));
}

ep_err ep_tls_watch_start(ep_tls_watch *watch, const ep_options *options, ep_service_loop *loop,
                          ep_rpc_server *server)
{
    ep_tls_stamp stamps[EP_TLS_FILES];
    uint64_t expiry_s[EP_TLS_FILES] = {0};
    ep_error error;
    *watch =
        (ep_tls_watch){.options = options, .server = server, .lock = PTHREAD_MUTEX_INITIALIZER};
    look_at_files(options, stamps);
    /* they were good a moment ago; if not, listening reports why */
    (void)check_all(options, false, expiry_s, &error);
    take(watch, stamps, expiry_s);
    if (ep_tls_watch_expiry(watch) == 0) {
        return EP_OK; /* without TLS there is nothing to watch */
    }
    ep_err err = ep_service_loop_timer_create(loop, renew, watch, &watch->timer);
    if (err == EP_OK) {
        ep_loop_timer_start(watch->timer, LOOK_MS, LOOK_MS);
    }
    return err;
}

void ep_tls_watch_reload(ep_tls_watch *watch)
{
    if (watch->timer != NULL) {
        renew(watch);
    }
}

void ep_tls_watch_collect(ep_tls_watch *watch, ep_metrics *metrics)
{
    char refusal[EP_ERROR_TEXT_BYTES];
    for (size_t i = 0; i < EP_TLS_FILES; i++) {
        uint64_t expiry_s = __atomic_load_n(&watch->expiry_s[i], __ATOMIC_RELAXED);
        const ep_metric_label label = {"key", rows[i].key};
        if (expiry_s != 0) {
            ep_gauge_set(metrics, "expertd_tls_expiry_seconds",
                         "When the certificate in force ends, in seconds since 1970", &label, 1,
                         (double)expiry_s);
        }
    }
    ep_tls_watch_refusal(watch, refusal);
    ep_gauge_set(metrics, "expertd_tls_refused",
                 "1 when the TLS files in place are not good: a restart would fail", NULL, 0,
                 refusal[0] != '\0');
}

uint64_t ep_tls_watch_expiry(const ep_tls_watch *watch)
{
    uint64_t first = 0;
    for (size_t i = 0; i < EP_TLS_FILES; i++) {
        uint64_t expiry_s = __atomic_load_n(&watch->expiry_s[i], __ATOMIC_RELAXED);
        first = expiry_s != 0 && (first == 0 || expiry_s < first) ? expiry_s : first;
    }
    return first;
}

void ep_tls_watch_refusal(ep_tls_watch *watch, char out_text[EP_ERROR_TEXT_BYTES])
{
    pthread_mutex_lock(&watch->lock);
    snprintf(out_text, EP_ERROR_TEXT_BYTES, "%s", watch->refusal);
    pthread_mutex_unlock(&watch->lock);
}

ep_probe_check ep_tls_watch_check(ep_tls_watch *watch)
{
    ep_probe_check check = {.name = "tls", .ok = true};
    char refusal[EP_ERROR_TEXT_BYTES];
    ep_tls_watch_refusal(watch, refusal);
    if (refusal[0] != '\0') {
        snprintf(check.text, sizeof(check.text), "repair this file, a restart would fail: %.270s",
                 refusal);
    } else {
        snprintf(check.text, sizeof(check.text), "%s",
                 watch->timer != NULL ? "files are good" : "off");
    }
    return check;
}
