/* SPDX-License-Identifier: Apache-2.0 */
/* The store: what is written comes back; damage, another schema, another holder and a full disk are
 * named. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "coordinator/table_store_sqlite.h"
#include "support/expect.h"
#include "support/process.h"

static ep_error error; /* of the last call */

#define EXPERTS 40
#define FIRST_TERM 1000

static char dir[EP_TEST_PATH_BYTES];
static char file[EP_TEST_PATH_BYTES + 32];

static void setup(void)
{
    cr_assert(ep_test_dir_create(dir));
    snprintf(file, sizeof(file), "%s/coordinator.db", dir);
}

static void teardown(void)
{
    ep_test_dir_remove(dir);
}

TestSuite(coordinator_store, .init = setup, .fini = teardown);

static ep_routing_table *make_table(uint64_t number)
{
    ep_routing_table *table;
    const ep_layer_shape shape = {
        .layer = 3, .hidden = 64, .inner = 32, .experts = EXPERTS, .top_k = 2};
    cr_assert_eq(ep_routing_table_create(2, 1, 1, &table), EP_OK);
    table->epoch = (ep_epoch){.term = FIRST_TERM, .number = number};
    snprintf(table->policy, sizeof(table->policy), "uniform");
    table->decode_tokens_max = 256;
    for (uint32_t n = 0; n < 2; n++) {
        table->nodes[n].node_id = n + 4;
        snprintf(table->nodes[n].name, sizeof(table->nodes[n].name), "node-%u", n);
        snprintf(table->nodes[n].url, sizeof(table->nodes[n].url), "tcp://127.0.0.1:%u", 9000 + n);
    }
    cr_assert_eq(ep_routing_table_model_init(table, 0, "demo", "v1", 1), EP_OK);
    snprintf(table->models[0].numerics[0], EP_NUMERICS_BYTES, "portable/bf16");
    table->models[0].numerics_of_node[0] = table->models[0].numerics_of_node[1] = 0;
    cr_assert_eq(ep_routing_table_layer_init(table, 0, 0, &shape, EXPERTS), EP_OK);
    for (uint32_t e = 0; e <= EXPERTS; e++) {
        table->layers[0].offsets[e] = e;
        if (e < EXPERTS) {
            table->layers[0].copies[e] = (e + (uint32_t)number) % 2;
        }
    }
    return table;
}

static void make_kept(uint64_t number, ep_coordinator_kept *kept)
{
    *kept = (ep_coordinator_kept){
        .number = number, .next_node_id = 6, .nodes_count = 2, .drained_count = 1};
    kept->nodes = calloc(2, sizeof(*kept->nodes));
    kept->drained = calloc(1, sizeof(*kept->drained));
    for (uint32_t n = 0; n < 2; n++) {
        ep_coordinator_kept_node *node = &kept->nodes[n];
        node->node_id = n + 4;
        node->incarnation = UINT64_MAX - n;
        snprintf(node->name, sizeof(node->name), "node-%u", n);
        snprintf(node->url, sizeof(node->url), "tcp://127.0.0.1:%u", 9000 + n);
        snprintf(node->state, sizeof(node->state), "serving");
    }
    snprintf(kept->drained[0], sizeof(kept->drained[0]), "node-1");
    kept->policy.revision = number + 2;
    kept->policy.values[EP_POLICY_COPIES] = (ep_policy_value){
        .revision = number, .number = 2, .set_at = 1700000000, .who = "alice@host"};
    kept->policy.values[EP_POLICY_HEDGE_PERMILLE] = (ep_policy_value){
        .revision = number + 1, .number = 0, .set_at = 1700000001, .who = "unknown"};
    kept->assigned = make_table(number - 1);
    kept->published = make_table(number);
}

static ep_table_store *open_store(void)
{
    ep_table_store *store;
    ASSERT_OK(ep_table_store_sqlite_open(dir, &store, &error), error);
    return store;
}

static uint64_t begin(ep_table_store *store, ep_coordinator_kept *kept)
{
    uint64_t term;
    ASSERT_OK(ep_table_store_begin_term(store, FIRST_TERM, kept, &term, &error), error);
    return term;
}

/* A store with something in it, closed. */
static void fill(uint64_t number)
{
    ep_coordinator_kept kept;
    ep_table_store *store = open_store();
    begin(store, &kept);
    ep_coordinator_kept_fini(&kept);
    make_kept(number, &kept);
    ASSERT_OK(ep_table_store_write(store, &kept, &error), error);
    ep_coordinator_kept_fini(&kept);
    ep_table_store_close(store);
}

/* Opening, or what follows it, must fail with code and text. */
static void expect_refusal(ep_err code, const char *text)
{
    ep_table_store *store = NULL;
    ep_coordinator_kept kept = {0};
    uint64_t term;
    ep_error_clear(&error);
    ep_err err = ep_table_store_sqlite_open(dir, &store, &error);
    err = err != EP_OK ? err : ep_table_store_begin_term(store, FIRST_TERM, &kept, &term, &error);
    cr_assert_eq(err, code, "%s: %s", ep_err_name(err), error.text);
    ASSERT_TEXT(error, text);
    cr_assert_not_null(strstr(error.text, dir), "the place is not in '%s'", error.text);
    ep_table_store_close(store);
}

Test(coordinator_store, what_is_written_comes_back_under_the_next_term)
{
    ep_coordinator_kept kept, expected;
    ep_table_store *store = open_store();
    cr_assert_eq(begin(store, &kept), FIRST_TERM);
    cr_assert_null(kept.published);
    cr_assert_eq(kept.nodes_count, 0u);
    ep_table_store_close(store);
    fill(7); /* FIRST_TERM + 1 */
    store = open_store();
    cr_assert_eq(begin(store, &kept), FIRST_TERM + 2,
                 "a term for each start, whatever the clock says");
    make_kept(7, &expected);
    cr_assert_eq(kept.number, 7u);
    cr_assert_eq(kept.next_node_id, 6u);
    cr_assert_eq(kept.nodes_count, 2u);
    cr_assert_arr_eq(kept.nodes, expected.nodes, 2 * sizeof(*kept.nodes));
    cr_assert_eq(kept.drained_count, 1u);
    cr_assert_str_eq(kept.drained[0], "node-1");
    cr_assert_eq(memcmp(&kept.policy, &expected.policy, sizeof(kept.policy)), 0);
    cr_assert_eq(kept.published->epoch.number, 7u);
    cr_assert_eq(ep_routing_table_checksum(kept.published),
                 ep_routing_table_checksum(expected.published));
    cr_assert_eq(ep_routing_table_checksum(kept.assigned),
                 ep_routing_table_checksum(expected.assigned));
    ep_coordinator_kept_fini(&kept);
    ep_coordinator_kept_fini(&expected);
    ep_table_store_close(store);
}

/* A backup, or a coordinator that ran without its store meanwhile: clients have seen terms that the
 * store has not. */
Test(coordinator_store, a_term_is_never_below_the_clock_nor_the_stored_one)
{
    ep_coordinator_kept kept;
    uint64_t term;
    fill(7);
    for (uint64_t clock = 5 * FIRST_TERM; clock > 0;
         clock = clock > FIRST_TERM ? FIRST_TERM / 2 : 0) {
        ep_table_store *store = open_store();
        ASSERT_OK(ep_table_store_begin_term(store, clock, &kept, &term, &error), error);
        cr_assert_eq(term, clock > FIRST_TERM ? 5u * FIRST_TERM : 5u * FIRST_TERM + 1);
        cr_assert_eq(kept.published->epoch.number, 7u);
        ep_coordinator_kept_fini(&kept);
        ep_table_store_close(store);
    }
}

Test(coordinator_store, a_second_holder_is_told_who_the_first_is)
{
    char text[64];
    ep_table_store *store = open_store();
    snprintf(text, sizeof(text), "in use by another coordinator, process %ld", (long)getpid());
    expect_refusal(EP_ERR_FAILED_PRECONDITION, text);
    ep_table_store_close(store);
    ep_table_store_close(open_store());
}

Test(coordinator_store, every_cut_of_the_file_is_refused)
{
    struct stat status;
    fill(7);
    cr_assert_eq(stat(file, &status), 0);
    for (off_t size = status.st_size - 1; size >= 0; size = size > 1500 ? size - 1500
                                                            : size > 0  ? 0
                                                                        : -1) {
        cr_assert_eq(truncate(file, size), 0);
        expect_refusal(EP_ERR_DATA_LOSS, "Put a backup in its place");
    }
    expect_refusal(EP_ERR_DATA_LOSS, "it is empty");
}

/* A byte anywhere: refused, or it lay in an unused part and all is as it was. */
Test(coordinator_store, flipped_bytes_never_pass_unseen)
{
    static uint8_t whole[1 << 18];
    uint32_t refused = 0;
    fill(7);
    int fd = open(file, O_RDWR | O_CLOEXEC);
    ssize_t size = read(fd, whole, sizeof(whole));
    cr_assert(size > 4096 && size < (ssize_t)sizeof(whole));
    ep_coordinator_kept expected;
    make_kept(7, &expected);
    for (ssize_t at = 0; at < size; at += 211) {
        uint8_t flipped = whole[at] ^ 0x41;
        ep_table_store *store = NULL;
        ep_coordinator_kept kept = {0};
        uint64_t term = 0;
        cr_assert_eq(pwrite(fd, whole, (size_t)size, 0), size);
        cr_assert_eq(ftruncate(fd, size), 0);
        cr_assert_eq(pwrite(fd, &flipped, 1, at), 1);
        ep_err err = ep_table_store_sqlite_open(dir, &store, &error);
        err =
            err != EP_OK ? err : ep_table_store_begin_term(store, FIRST_TERM, &kept, &term, &error);
        refused += err != EP_OK;
        if (err == EP_OK) {
            cr_assert_eq(term, FIRST_TERM + 1, "byte %zd", at);
            cr_assert_eq(kept.number, 7u);
            cr_assert_eq(memcmp(&kept.policy, &expected.policy, sizeof(kept.policy)), 0, "byte %zd",
                         at);
            cr_assert_arr_eq(kept.nodes, expected.nodes, 2 * sizeof(*kept.nodes));
            cr_assert_eq(ep_routing_table_checksum(kept.published),
                         ep_routing_table_checksum(expected.published));
        }
        ep_coordinator_kept_fini(&kept);
        ep_table_store_close(store);
    }
    close(fd);
    ep_coordinator_kept_fini(&expected);
    cr_assert_gt(refused, 5u, "only %u flips were refused", refused);
}

static void change(const char *sql)
{
    sqlite3 *db;
    cr_assert_eq(sqlite3_open(file, &db), SQLITE_OK);
    cr_assert_eq(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK, "%s", sqlite3_errmsg(db));
    sqlite3_close(db);
}

Test(coordinator_store, another_schema_is_refused_with_both_versions)
{
    fill(7);
    change("PRAGMA user_version=2");
    expect_refusal(EP_ERR_FAILED_PRECONDITION, "has schema version 2, this build reads 1");
    change("PRAGMA user_version=1; PRAGMA application_id=5");
    expect_refusal(EP_ERR_DATA_LOSS, "not the database of a coordinator");
}

Test(coordinator_store, values_that_were_changed_are_refused)
{
    static const char *const changes[] = {
        "UPDATE node SET name='node-9' WHERE place=1",
        "UPDATE meta SET value=1 WHERE name='term'",
        "DELETE FROM meta WHERE name='number'",
        "DELETE FROM drained",
        "UPDATE policy SET value=3 WHERE key='copies'",
        "UPDATE policy SET value=99 WHERE key='copies'",
        "UPDATE policy SET revision=0 WHERE key='copies'",
        "UPDATE policy SET who='' WHERE key='copies'",
        "DELETE FROM policy WHERE key='copies'",
        "DELETE FROM policy",
        "UPDATE meta SET value=8 WHERE name='policy_revision'",
        "DELETE FROM meta WHERE name='policy_revision'",
        "UPDATE meta SET value=8 WHERE name='policy_digest'",
        "UPDATE placement SET number=9 WHERE kind='published'",
        "UPDATE placement SET bytes=x'00' WHERE kind='assigned'",
        "UPDATE placement SET bytes=(SELECT bytes FROM placement WHERE kind='assigned') WHERE "
        "kind='published'",
    };
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        teardown();
        setup();
        fill(7);
        change(changes[i]);
        expect_refusal(EP_ERR_DATA_LOSS, "is damaged");
    }
}

Test(coordinator_store, a_file_of_a_build_without_a_policy_is_taken_and_gets_one)
{
    ep_coordinator_kept kept;
    fill(7);
    change("DROP TABLE policy; DELETE FROM meta WHERE name LIKE 'policy%'");
    ep_table_store *store = open_store();
    begin(store, &kept);
    cr_assert_eq(kept.number, 7u);
    cr_assert_eq(kept.policy.revision, 0u);
    cr_assert_eq(kept.policy.values[EP_POLICY_COPIES].revision, 0u);
    ep_coordinator_kept_fini(&kept);
    ep_table_store_close(store);
    fill(8);
    store = open_store();
    begin(store, &kept);
    cr_assert_eq(kept.policy.revision, 10u);
    ep_coordinator_kept_fini(&kept);
    ep_table_store_close(store);
}

Test(coordinator_store, a_key_of_a_newer_build_is_named)
{
    fill(7);
    change("INSERT INTO policy VALUES('later', 1, 1, 1, 'x')");
    expect_refusal(EP_ERR_FAILED_PRECONDITION,
                   "keeps the key later of the policy, which this build does not know: use the "
                   "build that wrote it, and there expertctl policy unset later");
}

Test(coordinator_store, a_log_without_its_file_is_refused)
{
    char wal[sizeof(file) + 8];
    snprintf(wal, sizeof(wal), "%s-wal", file);
    close(open(wal, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    expect_refusal(EP_ERR_DATA_LOSS, "its -wal file is there");
}

Test(coordinator_store, a_directory_that_is_not_there_is_named)
{
    cr_assert_eq(rmdir(dir), 0);
    expect_refusal(EP_ERR_IO, "No such file or directory");
}

/* The limit on file sizes stands for a full disk. */
Test(coordinator_store, a_full_disk_fails_the_write_and_keeps_what_was)
{
    struct rlimit limit;
    ep_coordinator_kept kept;
    signal(SIGXFSZ, SIG_IGN);
    fill(7);
    ep_table_store *store = open_store();
    begin(store, &kept);
    ep_coordinator_kept_fini(&kept);
    getrlimit(RLIMIT_FSIZE, &limit);
    rlim_t before = limit.rlim_cur;
    limit.rlim_cur = 4096;
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    make_kept(9, &kept);
    for (int i = 0; i < 3; i++) {
        ASSERT_FAILS(ep_table_store_write(store, &kept, &error), EP_ERR_IO, error, file);
    }
    limit.rlim_cur = before;
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    ep_table_store_close(store);
    store = open_store();
    ep_coordinator_kept old;
    begin(store, &old);
    cr_assert_eq(old.number, 7u);
    cr_assert_eq(old.published->epoch.number, 7u);
    ep_coordinator_kept_fini(&old);
    ASSERT_OK(ep_table_store_write(store, &kept, &error), error);
    ep_coordinator_kept_fini(&kept);
    ep_table_store_close(store);
}
