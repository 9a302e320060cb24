/* SPDX-License-Identifier: Apache-2.0 */
/* What only a tls+tcp lane must do: refuse every peer it cannot verify. */
#include <criterion/criterion.h>
#include <string.h>

#include "lane_fixture.h"

static lane_world world;
static side client;
static side server;

static void open_world(void)
{
    world_open(&world, "tls+tcp");
}

static void close_world(void)
{
    world_close(&world);
}

TestSuite(tls, .init = open_world, .fini = close_world, .timeout = 120);

/* Both ends get a frame to send; neither may arrive, and both ends must end. */
static void check_refused(void)
{
    world_listen(&world);
    pair_open(&world, &client, &server);
    cr_assert_eq(send_and_forget(&client, 0, 100), EP_OK);
    cr_assert_eq(send_and_forget(&server, 0, 100), EP_OK);
    side_start(&client);
    side_start(&server);
    pair_wait_closed(&client, &server);
    cr_assert_eq(client.frames, 0u);
    cr_assert_eq(server.frames, 0u);
    cr_assert_eq(client.end.code, EP_ERR_CONNECTION_LOST, "%s", client.end.text);
}

Test(tls, refuses_a_certificate_for_another_name)
{
    world.client_tls.server_name = "elsewhere.example";
    check_refused();
}

Test(tls, refuses_a_certificate_of_another_ca)
{
    world.client_tls.ca_file = world.tls_files[TLS_OTHER_CA];
    check_refused();
}

Test(tls, refuses_a_client_without_certificate_when_one_is_required)
{
    world.server_tls.require_client_cert = true;
    world_listen(&world);
    pair_open(&world, &client, &server);
    cr_assert_eq(send_and_forget(&client, 0, 100), EP_OK);
    side_start(&client);
    side_start(&server);
    pair_wait_closed(&client, &server);
    cr_assert_eq(server.frames, 0u);
}

Test(tls, accepts_a_client_with_certificate_when_one_is_required)
{
    world.server_tls.require_client_cert = true;
    world.client_tls.cert_key_file = world.tls_files[TLS_CLIENT];
    world_listen(&world);
    pair_start(&world, &client, &server);
    cr_assert_eq(send_and_forget(&client, 0, 100), EP_OK);
    side_wait_frames(&server, 1);
    pair_close(&client, &server);
}

static void ignore_dial(void *arg, ep_conn *conn, const ep_error *error)
{
    (void)arg;
    (void)conn;
    (void)error;
}

static ep_err try_dial(const ep_tls_config *tls, const char *url, ep_error *out_error)
{
    ep_dial *dial;
    ep_lane_address address = {.url = url, .tls = tls};
    return ep_lane_dial_begin(world.ops, &address, &world.limits, ignore_dial, NULL, &dial,
                              out_error);
}

Test(tls, names_the_missing_or_wrong_setting)
{
    ep_error error;
    world_listen(&world);
    ep_tls_config tls = world.client_tls;
    tls.server_name = NULL;
    cr_assert_eq(try_dial(&tls, world.dial_url, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "server_name"), "%s", error.text);
    tls.server_name = "";
    cr_assert_eq(try_dial(&tls, world.dial_url, &error), EP_ERR_INVALID_ARGUMENT);
    tls = world.client_tls;
    tls.ca_file = NULL;
    cr_assert_eq(try_dial(&tls, world.dial_url, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "ca_file"), "%s", error.text);
    tls.ca_file = "/nonexistent/ca.pem";
    cr_assert_eq(try_dial(&tls, world.dial_url, &error), EP_ERR_BAD_FILE);
    cr_assert_not_null(strstr(error.text, "/nonexistent/ca.pem"), "%s", error.text);
    tls = world.client_tls;
    tls.cert_key_file = tls.ca_file; /* no key in it */
    cr_assert_eq(try_dial(&tls, world.dial_url, &error), EP_ERR_BAD_FILE);
    cr_assert_not_null(strstr(error.text, "cert_key_file"), "%s", error.text);
    cr_assert_eq(try_dial(NULL, world.dial_url, &error), EP_ERR_INVALID_ARGUMENT);
    cr_assert_eq(try_dial(&world.client_tls, "tcp://127.0.0.1:1", &error), EP_ERR_INVALID_ARGUMENT);
}

static void ignore_accept(void *arg, ep_conn *conn)
{
    (void)arg;
    ep_conn_release(conn);
}

Test(tls, a_listener_needs_its_certificate)
{
    ep_error error;
    ep_listener *listener;
    ep_tls_config tls = world.server_tls;
    ep_lane_address address = {.url = "tls+tcp://127.0.0.1:0", .tls = &tls};
    tls.cert_key_file = NULL;
    cr_assert_eq(
        ep_lane_listen(world.ops, &address, &world.limits, ignore_accept, NULL, &listener, &error),
        EP_ERR_INVALID_ARGUMENT);
    cr_assert_not_null(strstr(error.text, "cert_key_file"), "%s", error.text);
}
