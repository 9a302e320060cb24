/* SPDX-License-Identifier: Apache-2.0 */
/* Translates nng's errors into ours, and our TLS settings into nng's. */
#include "transport/nng/nng_lane.h"

#include <errno.h>

#include "transport/address.h"

ep_err ep_nng_err(int nng_error)
{
    switch (nng_error) {
    case NNG_ENOMEM:
        return EP_ERR_NO_MEMORY;
    case NNG_ENOFILES:
        return EP_ERR_RESOURCE_EXHAUSTED;
    case NNG_EPERM:
        return EP_ERR_PERMISSION_DENIED;
    case NNG_EINVAL:
    case NNG_ENOTSUP:
        return EP_ERR_INVALID_ARGUMENT;
    case NNG_ECANCELED:
        return EP_ERR_CANCELLED;
    default:
        return EP_ERR_UNAVAILABLE;
    }
}

const char *ep_nng_advice(int nng_error, bool listens)
{
    return ep_address_advice(nng_error == NNG_EADDRINUSE     ? EADDRINUSE
                             : nng_error == NNG_EADDRINVAL   ? EADDRNOTAVAIL
                             : nng_error == NNG_ECONNREFUSED ? ECONNREFUSED
                             : nng_error == NNG_EPERM        ? EACCES
                                                             : 0,
                             listens);
}

ep_err ep_nng_failed(const char *url, int failed, bool listens, ep_error *out_error)
{
    ep_err err = failed == NNG_EADDRINVAL ? EP_ERR_INVALID_ARGUMENT : ep_nng_err(failed);
    return ep_error_set(out_error, err, "cannot %s %s: %s%s", listens ? "listen on" : "dial", url,
                        nng_strerror(failed), ep_nng_advice(failed, listens));
}

static ep_err check_keys(const ep_lane_address *address, bool dials, ep_error *out_error)
{
    const ep_tls_config *tls = address->tls;
    const char *other = dials ? tls->server_name : tls->cert_key_file;
    const bool has_ca = tls->ca_file != NULL && tls->ca_file[0] != '\0';
    if (has_ca && other != NULL && other[0] != '\0') {
        return EP_OK;
    }
    return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT, "TLS setting %s is required for %s",
                        !has_ca ? "ca_file"
                        : dials ? "server_name"
                                : "cert_key_file",
                        address->url);
}

/* what: the fault, when the file itself can be read. */
static ep_err bad_file(const char *key, const char *option, const char *path, int failed,
                       const char *what, ep_error *out_error)
{
    const char *why = failed == NNG_ENOENT   ? "no such file"
                      : failed == NNG_EPERM  ? "this process may not read it"
                      : failed == NNG_ENOMEM ? nng_strerror(failed)
                                             : what;
    return ep_error_set(out_error, EP_ERR_BAD_FILE, "%s (expertctl's %s) '%s': %s", key, option,
                        path, why);
}

static ep_err load_files(const ep_tls_config *tls, nng_tls_config *config, ep_error *out_error)
{
    int failed = nng_tls_config_ca_file(config, tls->ca_file);
    if (failed != 0) {
        return bad_file("tls_ca_file", "--tls-ca", tls->ca_file, failed,
                        "it holds no certificate in PEM form, or a broken one", out_error);
    }
    if (tls->cert_key_file != NULL && tls->cert_key_file[0] != '\0') {
        failed = nng_tls_config_cert_key_file(config, tls->cert_key_file, NULL);
        if (failed != 0) {
            return bad_file(
                "tls_cert_key_file", "--tls-cert-key", tls->cert_key_file, failed,
                "it must hold a certificate in PEM form and its key, without a password",
                out_error);
        }
    }
    return EP_OK;
}

ep_err ep_nng_tls_config_create(const ep_lane_address *address, enum nng_tls_mode mode,
                                nng_tls_config **out_config, ep_error *out_error)
{
    const ep_tls_config *tls = address->tls;
    const bool dials = mode == NNG_TLS_MODE_CLIENT;
    ep_err err = check_keys(address, dials, out_error);
    if (err != EP_OK) {
        return err;
    }
    nng_tls_config *config;
    int failed = nng_tls_config_alloc(&config, mode);
    if (failed != 0) {
        return ep_error_set(out_error, ep_nng_err(failed), "cannot set up TLS: %s",
                            nng_strerror(failed));
    }
    err = load_files(tls, config, out_error);
    if (err == EP_OK) {
        bool verify = dials || tls->require_client_cert;
        failed = nng_tls_config_auth_mode(config, verify ? NNG_TLS_AUTH_MODE_REQUIRED
                                                         : NNG_TLS_AUTH_MODE_NONE);
        if (failed == 0 && dials) {
            failed = nng_tls_config_server_name(config, tls->server_name);
        }
        if (failed != 0) {
            err = ep_error_set(out_error, ep_nng_err(failed), "cannot set up TLS: %s",
                               nng_strerror(failed));
        }
    }
    if (err != EP_OK) {
        nng_tls_config_free(config);
        return err;
    }
    *out_config = config;
    return EP_OK;
}
