/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One handshake as nng would make it: TLS 1.2, and a certificate's names as mbedtls reads them. The
 * first fault of the peer's certificate is noted and ignored, so that later faults are found too.
 * Only the handshake is sent on the connection.
 */
#include "rpc/rpc_look_tls.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/printable.h"
#include "transport/lane_fork.h"

#define NAME_BYTES 96
#define TIME_BYTES 24
#define ALERT_NONE (-1)
#define HANDSHAKE_MS 5000 /* for the whole handshake, even if the peer answers byte by byte */

typedef struct handshake {
    const ep_tls_config *tls; /* NULL: only find out whether TLS is spoken */
    const bool *stop;
    SSL_CTX *context;
    SSL *ssl;
    bool is_done;
    bool asks_for_cert;
    int alert;        /* the peer's alert, or ALERT_NONE */
    X509 *cert;       /* the peer's own certificate; NULL: none was sent */
    int fault;        /* X509_V_ERR_* of the first fault in the chain, or X509_V_OK */
    X509 *fault_cert; /* the certificate with that fault */
    unsigned long reason;
} handshake;

static void put_name(const X509_NAME *name, char out[NAME_BYTES])
{
    char text[NAME_BYTES] = "";
    BIO *memory = BIO_new(BIO_s_mem());
    if (memory != NULL && X509_NAME_print_ex(memory, name, 0, XN_FLAG_RFC2253) >= 0) {
        int n = BIO_read(memory, text, sizeof(text) - 1);
        text[n > 0 ? n : 0] = '\0';
    }
    BIO_free(memory);
    ep_text_escape(text, out, NAME_BYTES);
}

static void put_time(const ASN1_TIME *at, char out[TIME_BYTES])
{
    struct tm parts;
    if (ASN1_TIME_to_tm(at, &parts) != 1 ||
        strftime(out, TIME_BYTES, "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
        snprintf(out, TIME_BYTES, "(unreadable)");
    }
}

static size_t put_more(char *out, size_t bytes, size_t used, const char *text)
{
    return used + (used < bytes ? (size_t)snprintf(out + used, bytes - used, "%s%s",
                                                   used > 0 ? ", " : "", text)
                                : 0);
}

/* The hosts that a certificate is valid for: its DNS names, else its common name. */
static void put_hosts(const X509 *cert, char *out, size_t bytes)
{
    size_t used = 0;
    GENERAL_NAMES *names = X509_get_ext_d2i(cert, NID_subject_alt_name, NULL, NULL);
    out[0] = '\0';
    for (int i = 0; i < sk_GENERAL_NAME_num(names); i++) {
        const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, i);
        char host[NAME_BYTES];
        if (name->type == GEN_DNS) {
            const char *text = (const char *)ASN1_STRING_get0_data(name->d.dNSName);
            used = put_more(out, bytes, used, ep_text_escape(text, host, sizeof(host)));
        }
    }
    GENERAL_NAMES_free(names);
    if (used == 0) {
        char subject[NAME_BYTES];
        put_name(X509_get_subject_name(cert), subject);
        put_more(out, bytes, used, subject);
    }
}

static void put_list(const STACK_OF(X509_NAME) * names, char *out, size_t bytes)
{
    size_t used = 0;
    snprintf(out, bytes, "it names none");
    for (int i = 0; i < sk_X509_NAME_num(names); i++) {
        char name[NAME_BYTES];
        put_name(sk_X509_NAME_value(names, i), name);
        used = put_more(out, bytes, used, name);
    }
}

/* ---- the handshake ---- */

static int on_fault(int good, X509_STORE_CTX *store)
{
    SSL *ssl = X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx());
    handshake *h = SSL_get_app_data(ssl);
    if (!good && h->fault == X509_V_OK) {
        h->fault = X509_STORE_CTX_get_error(store);
        h->fault_cert = X509_STORE_CTX_get_current_cert(store);
        X509_up_ref(h->fault_cert);
    }
    if (h->cert == NULL) {
        h->cert = X509_STORE_CTX_get0_cert(store);
        X509_up_ref(h->cert);
    }
    return 1;
}

static int on_request(SSL *ssl, void *arg)
{
    (void)ssl;
    ((handshake *)arg)->asks_for_cert = true;
    return 1;
}

static void on_info(const SSL *ssl, int where, int value)
{
    if ((where & SSL_CB_READ_ALERT) == SSL_CB_READ_ALERT) {
        ((handshake *)SSL_get_app_data(ssl))->alert = value & 0xff;
    }
}

static bool prepare(handshake *h, int fd)
{
    h->context = SSL_CTX_new(TLS_client_method());
    if (h->context == NULL) {
        return false;
    }
    SSL_CTX_set_max_proto_version(h->context, TLS1_2_VERSION);
    /* accept what is weak: mbedtls decides that, not this look */
    SSL_CTX_set_security_level(h->context, 0);
    SSL_CTX_set_verify(h->context, SSL_VERIFY_PEER, on_fault);
    SSL_CTX_set_cert_cb(h->context, on_request, h);
    SSL_CTX_set_info_callback(h->context, on_info);
    if (h->tls != NULL) {
        SSL_CTX_load_verify_file(h->context, h->tls->ca_file);
        X509_STORE_set_flags(SSL_CTX_get_cert_store(h->context), X509_V_FLAG_PARTIAL_CHAIN);
    }
    if (h->tls != NULL && h->tls->cert_key_file != NULL) {
        SSL_CTX_use_certificate_chain_file(h->context, h->tls->cert_key_file);
        SSL_CTX_use_PrivateKey_file(h->context, h->tls->cert_key_file, SSL_FILETYPE_PEM);
    }
    h->ssl = SSL_new(h->context);
    return h->ssl != NULL && SSL_set_app_data(h->ssl, h) == 1 && SSL_set_fd(h->ssl, fd) == 1 &&
           (h->tls == NULL || SSL_set_tlsext_host_name(h->ssl, h->tls->server_name) == 1);
}

/* Waits for what ssl needs after this result; false when that does not come. */
static bool go_on(const handshake *h, int result)
{
    int wanted = SSL_get_error(h->ssl, result);
    return (wanted == SSL_ERROR_WANT_READ &&
            ep_rpc_look_wait(SSL_get_fd(h->ssl), POLLIN, h->stop)) ||
           (wanted == SSL_ERROR_WANT_WRITE &&
            ep_rpc_look_wait(SSL_get_fd(h->ssl), POLLOUT, h->stop));
}

static void shake(handshake *h, int fd)
{
    ERR_clear_error();
    if (fd < 0 || !prepare(h, fd)) {
        return;
    }
    int result;
    const uint64_t end_ns = ep_clock_now_ns() + HANDSHAKE_MS * EP_NS_PER_MS;
    ERR_clear_error(); /* files could not be read: the dial has already reported that */
    do {
        result = SSL_connect(h->ssl);
    } while (result != 1 && ep_clock_now_ns() < end_ns && go_on(h, result));
    h->is_done = result == 1;
    h->reason = ERR_peek_last_error();
}

static void fini(handshake *h, int fd)
{
    X509_free(h->cert);
    X509_free(h->fault_cert);
    SSL_free(h->ssl);
    SSL_CTX_free(h->context);
    ERR_clear_error();
    ep_lane_fd_close(fd);
}

/* ---- reporting what was found ---- */

static void put_authorities(const char *file, char *out, size_t bytes)
{
    STACK_OF(X509_NAME) *names = SSL_load_client_CA_file(file);
    put_list(names, out, bytes);
    sk_X509_NAME_pop_free(names, X509_NAME_free);
}

static void found_issuer(const handshake *h, ep_rpc_look *out_look)
{
    char issuer[NAME_BYTES];
    char hosts[2 * NAME_BYTES];
    char known[2 * NAME_BYTES];
    put_name(X509_get_issuer_name(h->fault_cert), issuer);
    put_hosts(h->cert, hosts, sizeof(hosts));
    put_authorities(h->tls->ca_file, known, sizeof(known));
    ep_rpc_look_found(
        out_look, "tls-refused", "tls_ca_file (--tls-ca) must hold the CA that issued it",
        "the certificate there (of %.60s) is issued by %.60s, which is not that of %.120s (%.60s)",
        hosts, issuer, h->tls->ca_file, known);
}

static void found_dates(const handshake *h, ep_rpc_look *out_look)
{
    char name[NAME_BYTES];
    char at[TIME_BYTES];
    char now[TIME_BYTES];
    bool is_over = h->fault == X509_V_ERR_CERT_HAS_EXPIRED;
    time_t clock = time(NULL);
    struct tm parts;
    put_name(X509_get_subject_name(h->fault_cert), name);
    put_time(is_over ? X509_get0_notAfter(h->fault_cert) : X509_get0_notBefore(h->fault_cert), at);
    strftime(now, sizeof(now), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&clock, &parts));
    ep_rpc_look_found(out_look, "tls-refused",
                      "renew tls_cert_key_file there, or set the clock here right",
                      "the certificate there (%.80s) %s %s, and the clock here says %s", name,
                      is_over ? "has expired: it was valid until" : "is not valid before", at, now);
}

static void found_own(const handshake *h, ep_rpc_look *out_look)
{
    char accepted[2 * NAME_BYTES];
    char name[NAME_BYTES];
    char issuer[NAME_BYTES];
    char end[TIME_BYTES];
    const X509 *own = SSL_get_certificate(h->ssl);
    put_list(SSL_get0_peer_CA_list(h->ssl), accepted, sizeof(accepted));
    if (own == NULL) {
        ep_rpc_look_found(
            out_look, "tls-refused",
            "tls_cert_key_file (--tls-cert-key) must hold one of these, and its key",
            "the peer asks for a certificate, and none was given; issuers it accepts: %.120s",
            accepted);
        return;
    }
    put_name(X509_get_subject_name(own), name);
    put_name(X509_get_issuer_name(own), issuer);
    put_time(X509_get0_notAfter(own), end);
    bool is_over = X509_cmp_current_time(X509_get0_notAfter(own)) <= 0;
    ep_rpc_look_found(
        out_look, "tls-refused",
        is_over ? "renew the certificate in tls_cert_key_file (--tls-cert-key)"
                : "tls_cert_key_file (--tls-cert-key) must hold one that the CA of the peer's "
                  "tls_ca_file issued",
        "the peer refused the certificate in %.120s (%.60s, issued by %.60s, valid until %s); "
        "issuers it "
        "accepts: %.60s",
        h->tls->cert_key_file, name, issuer, end, accepted);
}

static bool is_of_dates(int fault)
{
    return fault == X509_V_ERR_CERT_HAS_EXPIRED || fault == X509_V_ERR_CERT_NOT_YET_VALID;
}

static bool is_of_issuer(int fault)
{
    return fault == X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT ||
           fault == X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY ||
           fault == X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT ||
           fault == X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN ||
           fault == X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE ||
           fault == X509_V_ERR_CERT_SIGNATURE_FAILURE;
}

static void found_failure(const handshake *h, ep_rpc_look *out_look)
{
    const char *reason = h->alert != ALERT_NONE ? SSL_alert_desc_string_long(h->alert)
                                                : ERR_reason_error_string(h->reason);
    ep_rpc_look_found(out_look, "tls-refused", "look at the log of the program there",
                      "the TLS handshake fails: %.100s%s",
                      h->alert != ALERT_NONE ? "the peer says " : "",
                      reason != NULL ? reason : "the connection ends in it");
}

/* Recognises a door behind TLS, which greets first. */
static void look_inside(const handshake *h, ep_rpc_look *out_look)
{
    char greeting[16];
    int got;
    do {
        got = SSL_read(h->ssl, greeting, sizeof(greeting));
    } while (got <= 0 && go_on(h, got));
    (void)ep_rpc_look_is_door(greeting, got > 0 ? (size_t)got : 0, out_look);
}

static void judge(const handshake *h, ep_rpc_look *out_look)
{
    if (is_of_issuer(h->fault)) {
        found_issuer(h, out_look);
    } else if (is_of_dates(h->fault)) {
        found_dates(h, out_look);
    } else if (h->fault != X509_V_OK) {
        ep_rpc_look_found(out_look, "tls-refused",
                          "the program there needs another certificate in its tls_cert_key_file",
                          "the certificate there is not good: %.200s",
                          X509_verify_cert_error_string(h->fault));
    } else if (h->cert != NULL && X509_check_host(h->cert, h->tls->server_name, 0, 0, NULL) != 1) {
        char hosts[2 * NAME_BYTES];
        put_hosts(h->cert, hosts, sizeof(hosts));
        ep_rpc_look_found(out_look, "tls-refused",
                          "tls_server_name (--tls-server-name) must be a name of the certificate",
                          "the certificate there is for %.180s, not for %.120s", hosts,
                          h->tls->server_name);
    } else if (!h->is_done && h->asks_for_cert) {
        found_own(h, out_look);
    } else if (!h->is_done) {
        found_failure(h, out_look);
    } else {
        look_inside(h, out_look);
    }
}

bool ep_rpc_look_tls(int taken_fd, const ep_tls_config *tls, const bool *stop,
                     ep_rpc_look *out_look)
{
    handshake h = {.tls = tls, .stop = stop, .alert = ALERT_NONE};
    shake(&h, taken_fd);
    bool is_tls = h.cert != NULL || h.alert != ALERT_NONE;
    if (is_tls && tls != NULL) {
        judge(&h, out_look);
    }
    fini(&h, taken_fd);
    return is_tls;
}
