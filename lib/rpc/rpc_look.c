/* SPDX-License-Identifier: Apache-2.0 */
#include "rpc/rpc_look.h"

#include <errno.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/clock.h"
#include "base/printable.h"
#include "transport/address.h"
#include "transport/lane_fork.h"
#include "wire/frame.h"

#define REPLY_BYTES 2048
#define STEP_MS 1500   /* time to connect, and time for an answer to begin */
#define ANSWER_MS 3000 /* time for a whole answer, even if it comes byte by byte */
#define SLICE_MS 50    /* between checks of stop */
#define WORDS_BYTES 48 /* how much of a foreign answer is shown */

#define WHICH_PORT "give the port of listen, by default 7410 (coordinator) or 7420 (node)"

__attribute__((format(printf, 4, 5))) static void found(ep_rpc_look *look, const char *code,
                                                        const char *advice, const char *format, ...)
{
    va_list args;
    look->code = code;
    va_start(args, format);
    vsnprintf(look->text, sizeof(look->text), format, args);
    va_end(args);
    snprintf(look->advice, sizeof(look->advice), "%s", advice);
}

/* Waits for one of poll's events. False when a step's time is over, or the look must end. */
static bool wait_for(int fd, short events, const bool *stop)
{
    struct pollfd wanted = {.fd = fd, .events = events};
    uint64_t end_ns = ep_clock_now_ns() + STEP_MS * EP_NS_PER_MS;
    int n = 0;
    while (n <= 0 && ep_clock_now_ns() < end_ns &&
           (stop == NULL || !__atomic_load_n(stop, __ATOMIC_RELAXED))) {
        n = poll(&wanted, 1, SLICE_MS);
    }
    return n > 0;
}

/* Recognises a door by its greeting. */
static bool is_door(const char *greeting, size_t bytes, ep_rpc_look *out_look)
{
    static const char sp_hello[] = {0, 'S', 'P', 0};
    if (bytes < sizeof(sp_hello) || memcmp(greeting, sp_hello, sizeof(sp_hello)) != 0) {
        return false;
    }
    found(out_look, "door-port", WHICH_PORT, "this is a door (door_listen), for nng's REQ sockets");
    return true;
}

/*
 * ---- TLS ----
 *
 * One handshake as nng would make it: TLS 1.2, and a certificate's names as mbedtls reads them. The
 * first fault of the peer's certificate is noted and ignored, so that later faults are found too.
 * Only the handshake is sent on the connection.
 */

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
    return (wanted == SSL_ERROR_WANT_READ && wait_for(SSL_get_fd(h->ssl), POLLIN, h->stop)) ||
           (wanted == SSL_ERROR_WANT_WRITE && wait_for(SSL_get_fd(h->ssl), POLLOUT, h->stop));
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

static void found_issuer(const handshake *h, ep_rpc_look *out_look)
{
    char issuer[NAME_BYTES];
    char hosts[2 * NAME_BYTES];
    char known[2 * NAME_BYTES];
    STACK_OF(X509_NAME) *names = SSL_load_client_CA_file(h->tls->ca_file);
    put_name(X509_get_issuer_name(h->fault_cert), issuer);
    put_hosts(h->cert, hosts, sizeof(hosts));
    put_list(names, known, sizeof(known));
    sk_X509_NAME_pop_free(names, X509_NAME_free);
    found(
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
    found(out_look, "tls-refused", "renew tls_cert_key_file there, or set the clock here right",
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
        found(out_look, "tls-refused",
              "tls_cert_key_file (--tls-cert-key) must hold one of these, and its key",
              "the peer asks for a certificate, and none was given; issuers it accepts: %.120s",
              accepted);
        return;
    }
    put_name(X509_get_subject_name(own), name);
    put_name(X509_get_issuer_name(own), issuer);
    put_time(X509_get0_notAfter(own), end);
    bool is_over = X509_cmp_current_time(X509_get0_notAfter(own)) <= 0;
    found(out_look, "tls-refused",
          is_over ? "renew the certificate in tls_cert_key_file (--tls-cert-key)"
                  : "tls_cert_key_file (--tls-cert-key) must hold one that the CA of the peer's "
                    "tls_ca_file issued",
          "the peer refused the certificate in %.120s (%.60s, issued by %.60s, valid until %s); "
          "issuers it "
          "accepts: %.60s",
          h->tls->cert_key_file, name, issuer, end, accepted);
}

static void found_failure(const handshake *h, ep_rpc_look *out_look)
{
    const char *reason = h->alert != ALERT_NONE ? SSL_alert_desc_string_long(h->alert)
                                                : ERR_reason_error_string(h->reason);
    found(out_look, "tls-refused", "look at the log of the program there",
          "the TLS handshake fails: %.100s%s", h->alert != ALERT_NONE ? "the peer says " : "",
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
    (void)is_door(greeting, got > 0 ? (size_t)got : 0, out_look);
}

static void judge(const handshake *h, ep_rpc_look *out_look)
{
    switch (h->fault) {
    case X509_V_OK:
        break;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        found_issuer(h, out_look);
        return;
    case X509_V_ERR_CERT_HAS_EXPIRED:
    case X509_V_ERR_CERT_NOT_YET_VALID:
        found_dates(h, out_look);
        return;
    default:
        found(out_look, "tls-refused",
              "the program there needs another certificate in its tls_cert_key_file",
              "the certificate there is not good: %.200s", X509_verify_cert_error_string(h->fault));
        return;
    }
    if (h->cert != NULL && X509_check_host(h->cert, h->tls->server_name, 0, 0, NULL) != 1) {
        char hosts[2 * NAME_BYTES];
        put_hosts(h->cert, hosts, sizeof(hosts));
        found(out_look, "tls-refused",
              "tls_server_name (--tls-server-name) must be a name of the certificate",
              "the certificate there is for %.180s, not for %.120s", hosts, h->tls->server_name);
    } else if (!h->is_done && h->asks_for_cert) {
        found_own(h, out_look);
    } else if (!h->is_done) {
        found_failure(h, out_look);
    } else {
        look_inside(h, out_look);
    }
}

/* Whether the peer speaks TLS on this connection (closed here; -1 none). tls: our dial settings;
 * fills out_look if something is wrong with them there. NULL: only finds out whether. */
static bool look_tls(int taken_fd, const ep_tls_config *tls, const bool *stop,
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

/* ---- without TLS ---- */

/* As long as a frame's fixed part, so that expertd sees at once that it is no frame. */
static const char http_request[] =
    "GET / HTTP/1.0\r\nUser-Agent: expertd, which looks at what listens here\r\n\r\n";
_Static_assert(sizeof(http_request) > EP_FRAME_FIXED_BYTES, "the request is too short");
static const char our_page[] = "expertd: "; /* must match probes.c */

typedef struct port {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    const bool *stop;
} port;

static bool resolve(const char *where, int flags, port *out_port)
{
    ep_host_port at;
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags};
    struct addrinfo *list = NULL;
    if (!ep_address_split(where, &at) || getaddrinfo(at.host, at.port, &hints, &list) != 0) {
        return false;
    }
    memcpy(&out_port->address, list->ai_addr, list->ai_addrlen);
    out_port->address_bytes = list->ai_addrlen;
    freeaddrinfo(list);
    return true;
}

/* Returns -1 with errno on failure. */
static int dial(const port *there)
{
    ep_lane_fork_watch();
    int fd =
        EP_LANE_FD(socket(there->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int failed = 0;
    socklen_t bytes = sizeof(failed);
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, (const struct sockaddr *)&there->address, there->address_bytes) != 0) {
        failed = errno;
    }
    if (failed == EINPROGRESS) {
        bool is_over = wait_for(fd, POLLOUT, there->stop) &&
                       getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &bytes) == 0;
        failed = is_over ? failed : ETIMEDOUT;
    }
    if (failed != 0) {
        ep_lane_fd_close(fd);
        errno = failed;
        return -1;
    }
    return fd;
}

/* What the port answers. */
typedef struct answer {
    char text[REPLY_BYTES + 1];
    size_t bytes;
    int failed; /* errno, if there was no connection */
    bool ended; /* the peer ended the connection */
} answer;

static void say(const port *there, const void *words, size_t bytes, answer *out)
{
    int fd = dial(there);
    *out = (answer){.failed = fd < 0 ? errno : 0};
    if (fd < 0) {
        return;
    }
    const uint64_t end_ns = ep_clock_now_ns() + ANSWER_MS * EP_NS_PER_MS;
    ssize_t got = send(fd, words, bytes, MSG_NOSIGNAL);
    while (got > 0 && out->bytes < REPLY_BYTES && ep_clock_now_ns() < end_ns &&
           wait_for(fd, POLLIN, there->stop)) {
        got = recv(fd, out->text + out->bytes, REPLY_BYTES - out->bytes, 0);
        out->bytes += got > 0 ? (size_t)got : 0;
        if (out->bytes >= 5 && memcmp(out->text, "HTTP/", 5) != 0) {
            break; /* enough to recognise it; only a page is read to its end */
        }
    }
    out->ended = got <= 0;
    ep_lane_fd_close(fd);
}

/* Whether an empty Hello is answered by a frame (which refuses it). */
static bool speaks_frames(const port *there)
{
    answer reply;
    uint8_t hello[2 * EP_FRAME_FIXED_BYTES] = {0};
    const ep_frame frame = {.kind = EP_FRAME_REQUEST,
                            .call_id = 1,
                            .deadline_us = EP_FRAME_DEADLINE_NONE,
                            .header_bytes = 4, /* a call header of 0 bytes */
                            .tensor_offset = sizeof(hello)};
    ep_frame_encode(&frame, hello);
    say(there, hello, sizeof(hello), &reply);
    return reply.bytes >= 4 && memcmp(reply.text, hello, 4) == 0; /* the magic */
}

/* A door that has read anything but its greeting may close before it greets. */
static bool is_hasty_door(const port *there, ep_rpc_look *out_look)
{
    static const char sp_request[] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
    answer reply;
    say(there, sp_request, sizeof(sp_request), &reply);
    return is_door(reply.text, reply.bytes, out_look);
}

static void found_page(const char *page, ep_rpc_look *out_look)
{
    char line[sizeof(out_look->text)];
    char escaped[sizeof(out_look->text)];
    const char *body = strstr(page, "\r\n\r\n");
    if (body == NULL || strncmp(body + 4, our_page, strlen(our_page)) != 0) {
        found(out_look, "probe-port", WHICH_PORT,
              "HTTP is spoken there, as on a probe_address (by default 7411, 7421)");
        return;
    }
    body += 4 + strlen(our_page);
    snprintf(line, sizeof(line), "%.*s", (int)strcspn(body, "\r\n"), body);
    found(out_look, "probe-port", "give one of these addresses", "this is the probe port of %.350s",
          ep_text_escape(line, escaped, sizeof(escaped)));
}

static void found_other(const char *words, ep_rpc_look *out_look)
{
    char first[WORDS_BYTES];
    char escaped[EP_TEXT_ESCAPED_BYTES(WORDS_BYTES)];
    snprintf(first, sizeof(first), "%.*s", (int)strcspn(words, "\r\n"), words);
    found(out_look, "no-answer", WHICH_PORT, "something else listens there, which says '%s'",
          ep_text_escape(first, escaped, sizeof(escaped)));
}

static void look_plain(const port *there, bool wants_tls, ep_rpc_look *out_look)
{
    answer reply;
    say(there, http_request, sizeof(http_request) - 1, &reply);
    if (reply.failed != 0) {
        found(out_look, "nobody-there",
              "start it, or look into its ports_file and the network policy for the right address",
              "nobody listens there: %s", strerror(reply.failed));
    } else if (is_door(reply.text, reply.bytes, out_look)) {
        return;
    } else if (reply.bytes >= 5 && memcmp(reply.text, "HTTP/", 5) == 0) {
        found_page(reply.text, out_look);
    } else if (!wants_tls && look_tls(dial(there), NULL, there->stop, out_look)) {
        found(out_look, "tls-needed",
              "use tls+tcp:// with tls_ca_file (--tls-ca) and tls_server_name (--tls-server-name)",
              "TLS is spoken there, and we spoke without");
    } else if (wants_tls && speaks_frames(there)) {
        found(out_look, "tls-not-there",
              "use tcp://, or set tls_cert_key_file and a tls+tcp:// listen there",
              "expertd listens there without TLS");
    } else if (reply.bytes > 0) {
        found_other(reply.text, out_look);
    } else if (reply.ended && is_hasty_door(there, out_look)) {
        return;
    } else if (wants_tls) {
        found(out_look, "tls-not-there", WHICH_PORT,
              "nobody speaks TLS there: our words are answered by %s",
              reply.ended ? "the connection's end" : "silence");
    } else if (!reply.ended) {
        found(out_look, "no-answer", "look at the log of the program there; " WHICH_PORT,
              "somebody takes connections there and says nothing");
    }
}

void ep_rpc_look_at(const ep_lane_address *address, const char *peer, const bool *stop,
                    ep_rpc_look *out_look)
{
    port there = {.stop = stop};
    bool is_tls = ep_url_has_scheme(address->url, "tls+tcp");
    *out_look = (ep_rpc_look){0};
    if (!(peer != NULL ? resolve(peer, AI_NUMERICHOST | AI_NUMERICSERV, &there)
                       : resolve(address->url, 0, &there))) {
        found(out_look, "nobody-there", "check the name, or give the address in numbers",
              "the host's name cannot be resolved");
    } else if (!is_tls || !look_tls(dial(&there), address->tls, stop, out_look)) {
        look_plain(&there, is_tls, out_look);
    }
}
