/* SPDX-License-Identifier: Apache-2.0 */
/* A caller of libexpertd: COORDINATOR CA SERVER_NAME TOKEN_FILE CERT_KEY WORD. Prints why there is
 * no service, once the reason has the word. */
#include <stdio.h>
#include <string.h>

#include "expertd/client.h"

#define WAIT_US 200000u
#define WAITS 300 /* of patience */

int main(int argc, char **argv)
{
    char token[256] = "";
    ep_client_config config;
    ep_client *client = NULL;
    ep_error error;
    FILE *file = argc == 7 ? fopen(argv[4], "r") : NULL;
    if (file == NULL || fgets(token, sizeof(token), file) == NULL) {
        fprintf(stderr, "usage: COORDINATOR CA SERVER_NAME TOKEN_FILE CERT_KEY WORD\n");
        return 2;
    }
    fclose(file);
    token[strcspn(token, "\n")] = '\0';
    ep_client_config_init(&config);
    config.coordinator_url = argv[1];
    config.tls_ca_file = argv[2];
    config.tls_server_name = argv[3];
    config.token = token;
    config.tls_cert_key_file = argv[5];
    bool good = false;
    bool is_said = ep_client_create(&config, &client, &error) != EP_OK;
    for (int i = 0; !good && !is_said && i < WAITS; i++) {
        good = ep_client_wait_ready(client, WAIT_US, &error) == EP_OK;
        is_said = !good && strstr(error.text, argv[6]) != NULL;
    }
    if (!good) {
        fprintf(stderr, "%s: %s\n", ep_err_name(error.code), error.text);
    }
    ep_client_destroy(client);
    return good ? 0 : 1;
}
