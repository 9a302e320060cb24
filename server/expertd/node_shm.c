/* SPDX-License-Identifier: Apache-2.0 */
/* The node's shared-memory listener. */
#include "expertd/node_shm.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

/* Parses a list such as "1,2,3". */
static ep_err load_ids(const ep_options *options, const char *key, uint32_t out_ids[EP_SHM_IDS_MAX],
                       size_t *out_count, ep_error *out_error)
{
    const char *at = ep_options_text(options, key);
    size_t count = 0;
    while (*at != 0) {
        char *end;
        errno = 0;
        unsigned long long id = strtoull(at, &end, 10);
        bool ends = *end == 0 || (*end == ',' && end[1] != 0);
        if (!isdigit((unsigned char)*at) || errno != 0 || id >= UINT32_MAX || !ends ||
            count == EP_SHM_IDS_MAX) {
            return ep_options_fail(
                options, key, out_error,
                "'%.100s' is no list of numbers like 1000,1001, at most %d of them",
                ep_options_text(options, key), EP_SHM_IDS_MAX);
        }
        out_ids[count++] = (uint32_t)id;
        at = *end == ',' ? end + 1 : end;
    }
    *out_count = count;
    return EP_OK;
}

ep_err ep_node_shm_config_load(const ep_options *options, ep_node_shm_config *out_config,
                               ep_error *out_error)
{
    ep_node_shm_config config = {.mode = (ep_node_shm_mode)ep_options_number(options, "shm"),
                                 .only_certificates =
                                     ep_options_bool(options, "tls_client_certs") &&
                                     ep_options_text(options, "token_file")[0] == 0,
                                 .dir = ep_options_text(options, "shm_dir"),
                                 .ring_bytes = ep_options_number(options, "shm_ring_bytes"),
                                 .total_bytes = ep_options_number(options, "shm_total_bytes")};
    if (config.dir[0] != 0 && config.dir[0] != '/') {
        return ep_options_fail(options, "shm_dir", out_error, "'%.100s' is no absolute path",
                               config.dir);
    }
    if ((config.ring_bytes & (config.ring_bytes - 1)) != 0) {
        return ep_options_fail(options, "shm_ring_bytes", out_error, "%zu is no power of two",
                               config.ring_bytes);
    }
    if (config.mode != EP_NODE_SHM_OFF &&
        config.total_bytes < ep_shm_connection_bytes(config.ring_bytes)) {
        return ep_options_fail(
            options, "shm_total_bytes", out_error,
            "%zu is less than the %zu that one connection takes with shm_ring_bytes %zu",
            config.total_bytes, ep_shm_connection_bytes(config.ring_bytes), config.ring_bytes);
    }
    ep_err err = load_ids(options, "shm_uids", config.uids, &config.uids_count, out_error);
    err = err == EP_OK ? load_ids(options, "shm_gids", config.gids, &config.gids_count, out_error)
                       : err;
    if (err == EP_OK) {
        *out_config = config;
    }
    return err;
}

/* Makes a directory that only this user can enter, if the service manager gave none. */
static ep_err make_private(const char *dir, ep_error *out_error)
{
    struct stat st;
    if (mkdir(dir, 0700) != 0 && errno != EEXIST) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot create %s: %s", dir, strerror(errno));
    }
    if (lstat(dir, &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid() ||
        (st.st_mode & 077) != 0) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "%s is not a directory that only user %u can enter", dir, geteuid());
    }
    return EP_OK;
}

static ep_err find_dir(const ep_node_shm_config *config, char *out_dir, size_t bytes,
                       ep_error *out_error)
{
    const char *given = getenv("RUNTIME_DIRECTORY");
    if (config->dir[0] != 0) {
        snprintf(out_dir, bytes, "%s", config->dir);
        return EP_OK;
    }
    if (given != NULL && given[0] == '/') {
        /* the first of several directories */
        snprintf(out_dir, bytes, "%.*s", (int)strcspn(given, ":"), given);
        return EP_OK;
    }
    snprintf(out_dir, bytes, "/tmp/expertd-%u", geteuid());
    return make_private(out_dir, out_error);
}

static ep_err listen_in(const ep_node_shm_config *config, const char *dir, const char *node_name,
                        ep_rpc_server *server, char *out_url, size_t bytes, ep_error *out_error)
{
    int n = snprintf(out_url, bytes, "shm://%s/%s.sock", dir, node_name);
    if (n < 0 || (size_t)n >= bytes) {
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "the name of the socket in %.100s is too long", dir);
    }
    /* node names may hold characters that are not fit for a file name */
    for (char *c = out_url + strlen("shm://") + strlen(dir) + 1; *c != 0; c++) {
        if (!isalnum((unsigned char)*c) && strchr("._-", *c) == NULL) {
            *c = '_';
        }
    }
    const ep_shm_config shm = {.ring_bytes = config->ring_bytes,
                               .total_bytes = config->total_bytes,
                               .uids = config->uids,
                               .uids_count = config->uids_count,
                               .gids = config->gids,
                               .gids_count = config->gids_count};
    const ep_lane_address address = {.url = out_url, .shm = &shm};
    return ep_rpc_server_listen(server, &address, EP_ROLES_MAIN, out_error);
}

ep_err ep_node_shm_listen(const ep_node_shm_config *config, const char *node_name,
                          ep_rpc_server *server, ep_error *out_error)
{
    char dir[EP_ADDRESS_BYTES];
    char url[EP_ADDRESS_BYTES];
    ep_error why;
    if (config->mode == EP_NODE_SHM_OFF) {
        return EP_OK;
    }
    if (config->mode == EP_NODE_SHM_AUTO && config->only_certificates) {
        ep_log(EP_LOG_INFO, "shm-unavailable",
               EP_KV(reason, "tls_client_certs is set and token_file is not, and "
                             "shared memory knows users, not certificates"),
               EP_KV(effect, "callers of this host use the network"),
               EP_KV(hint, "shm: on offers it all the same"));
        return EP_OK;
    }
    ep_err err = find_dir(config, dir, sizeof(dir), &why);
    err = err == EP_OK ? listen_in(config, dir, node_name, server, url, sizeof(url), &why) : err;
    if (err == EP_OK) {
        ep_log(EP_LOG_INFO, "shm-listening", EP_KV(url, url));
        return EP_OK;
    }
    if (config->mode == EP_NODE_SHM_ON) {
        return ep_error_set(out_error, err, "shm: %s", why.text);
    }
    ep_log(EP_LOG_WARN, "shm-unavailable", EP_KV(reason, why.text),
           EP_KV(effect, "callers of this host use the network"));
    return EP_OK;
}
