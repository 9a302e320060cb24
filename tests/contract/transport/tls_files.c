/* SPDX-License-Identifier: Apache-2.0 */
/* Throw-away certificates, made by the openssl command at run time. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lane_fixture.h"

static const char *const names[] = {"ca.pem",     "ca.key",     "other-ca.pem", "other-ca.key",
                                    "server.pem", "client.pem", "own.key",      "own.crt"};

static void run(const char *folder, const char *arguments)
{
    char command[1024];
    snprintf(command, sizeof(command), "cd %s && openssl %s >log 2>&1", folder, arguments);
    int status = system(command);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s", command);
}

static void make_ca(const char *folder, const char *name)
{
    char arguments[512];
    snprintf(
        arguments, sizeof(arguments),
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=%s "
        "-addext basicConstraints=critical,CA:TRUE -keyout %s.key -out %s.pem",
        name, name, name);
    run(folder, arguments);
}

/* Certificate and key in one file, as nng wants them. */
static void make_cert(const char *folder, const char *name, const char *host)
{
    char arguments[512];
    char command[512];
    snprintf(arguments, sizeof(arguments),
             "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
             "/CN=%s -CA ca.pem -CAkey ca.key "
             "-addext subjectAltName=DNS:%s -addext basicConstraints=critical,CA:FALSE -keyout "
             "own.key -out own.crt",
             host, host);
    run(folder, arguments);
    snprintf(command, sizeof(command), "cd %s && cat own.crt own.key >%s.pem", folder, name);
    CHECK(system(command) == 0);
}

static char *path_in(const char *folder, const char *name)
{
    char *path = malloc(strlen(folder) + strlen(name) + 2);
    CHECK(path != NULL);
    sprintf(path, "%s/%s", folder, name);
    return path;
}

void tls_files_create(lane_world *w)
{
    snprintf(w->tls_folder, sizeof(w->tls_folder), "/tmp/lane-contract-XXXXXX");
    CHECK(mkdtemp(w->tls_folder) != NULL);
    make_ca(w->tls_folder, "ca");
    make_ca(w->tls_folder, "other-ca");
    make_cert(w->tls_folder, "server", "localhost");
    make_cert(w->tls_folder, "client", "client");
    w->server_tls.ca_file = path_in(w->tls_folder, "ca.pem");
    w->server_tls.cert_key_file = path_in(w->tls_folder, "server.pem");
    w->client_tls.ca_file = path_in(w->tls_folder, "ca.pem");
    w->client_tls.server_name = "localhost";
}

void tls_files_remove(lane_world *w)
{
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char *path = path_in(w->tls_folder, names[i]);
        unlink(path);
        free(path);
    }
    char *log = path_in(w->tls_folder, "log");
    unlink(log);
    free(log);
    rmdir(w->tls_folder);
    free((char *)(uintptr_t)w->server_tls.ca_file);
    free((char *)(uintptr_t)w->server_tls.cert_key_file);
    free((char *)(uintptr_t)w->client_tls.ca_file);
}
