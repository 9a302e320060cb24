/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A new file is made under another name and renamed when it is complete. So an empty or truncated
 * coordinator.db is damage, whenever a crash happened, and is never taken for a first start.
 *
 * SQLite's own check does not find flipped bits in values. Tables have their own checksum, and all
 * else is covered by a digest in the meta table. The policy has a separate digest, so that a build
 * that does not know it can write the rest.
 */
#include "coordinator/table_store_sqlite.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/printable.h"
#include "coordinator/failpoint.h"
#include "coordinator/policy.h"

/* "epcx", so that another program's database is refused */
#define APPLICATION_ID 0x65706378
#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)

typedef struct sqlite_store {
    ep_table_store base; /* first; base.place is the path of the database */
    char directory[EP_TABLE_STORE_PLACE_BYTES - 32];
    int lock_fd;
    sqlite3 *db;
    uint64_t term;
} sqlite_store;

/* A file of an older build gets this table when it is opened; such builds leave it alone. */
#define POLICY_SQL                                                                                 \
    "CREATE TABLE IF NOT EXISTS policy(key TEXT PRIMARY KEY, value INTEGER NOT NULL, revision "    \
    "INTEGER NOT NULL,"                                                                            \
    " set_at INTEGER NOT NULL, who TEXT NOT NULL) STRICT;"

static const char schema_sql[] = "PRAGMA application_id=" TEXT(
    APPLICATION_ID) ";"
                    "PRAGMA user_version=" TEXT(
                        EP_TABLE_STORE_SQLITE_SCHEMA) ";"
                                                      "BEGIN;"
                                                      "CREATE TABLE meta(name TEXT PRIMARY KEY, "
                                                      "value INTEGER NOT NULL) STRICT;"
                                                      "CREATE TABLE node(place INTEGER PRIMARY "
                                                      "KEY, node_id INTEGER NOT NULL UNIQUE, name "
                                                      "TEXT NOT NULL UNIQUE,"
                                                      " url TEXT NOT NULL, state TEXT NOT NULL, "
                                                      "incarnation INTEGER NOT NULL) STRICT;"
                                                      "CREATE TABLE drained(place INTEGER PRIMARY "
                                                      "KEY, name TEXT NOT NULL UNIQUE) STRICT;"
                                                      "CREATE TABLE placement(kind TEXT PRIMARY "
                                                      "KEY, term INTEGER NOT NULL, number INTEGER "
                                                      "NOT NULL,"
                                                      " checksum INTEGER NOT NULL, bytes BLOB NOT "
                                                      "NULL) STRICT;" POLICY_SQL "COMMIT";

/* ---- errors ---- */

static ep_err damaged(const sqlite_store *store, ep_error *out_error, const char *what)
{
    return ep_error_set(
        out_error, EP_ERR_DATA_LOSS,
        "%s is damaged: %s. Put a backup in its place; or move it and its -wal file away to begin "
        "without state (nodes register again by themselves; drains and the policy must be set "
        "again)",
        store->base.place, what);
}

static ep_err failed(const sqlite_store *store, int code, const char *doing, ep_error *out_error)
{
    const char *text = store->db != NULL && sqlite3_errcode(store->db) == code
                           ? sqlite3_errmsg(store->db)
                           : sqlite3_errstr(code);
    int primary = code & 0xff;
    if (primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB) {
        return damaged(store, out_error, text);
    }
    if (primary == SQLITE_NOMEM) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for %s", store->base.place,
                            doing);
    }
    return ep_error_set(out_error, EP_ERR_IO, "%s: %s failed: %s (SQLite %d)", store->base.place,
                        doing, text, code);
}

static ep_err failed_call(const char *path, const char *doing, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_IO, "%s: %s failed: %s", path, doing, strerror(errno));
}

/* ---- statements ---- */

static int execute(sqlite_store *store, const char *sql)
{
    return sqlite3_exec(store->db, sql, NULL, NULL, NULL);
}

/* The only value of a query's first row. */
static int query_number(sqlite_store *store, const char *sql, int64_t *out_value)
{
    sqlite3_stmt *statement;
    int code = sqlite3_prepare_v2(store->db, sql, -1, &statement, NULL);
    if (code != SQLITE_OK) {
        return code;
    }
    code = sqlite3_step(statement);
    if (code == SQLITE_ROW) {
        *out_value = sqlite3_column_int64(statement, 0);
    }
    sqlite3_finalize(statement);
    return code == SQLITE_ROW ? SQLITE_OK : code == SQLITE_DONE ? SQLITE_NOTFOUND : code;
}

/* Runs a statement whose values are bound, and finalizes it. */
static int run(sqlite3_stmt *statement)
{
    int code = sqlite3_step(statement);
    int end = sqlite3_finalize(statement);
    return code == SQLITE_DONE ? SQLITE_OK : end != SQLITE_OK ? end : code;
}

static int set_meta(sqlite_store *store, const char *name, uint64_t value)
{
    sqlite3_stmt *statement;
    int code = sqlite3_prepare_v2(store->db, "INSERT OR REPLACE INTO meta VALUES(?,?)", -1,
                                  &statement, NULL);
    if (code != SQLITE_OK) {
        return code;
    }
    sqlite3_bind_text(statement, 1, name, -1, SQLITE_STATIC);
    sqlite3_bind_int64(statement, 2, (int64_t)value);
    return run(statement);
}

/* ---- digest ---- */

static uint64_t fnv(uint64_t hash, const void *bytes, size_t count)
{
    const uint8_t *byte = bytes;
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ byte[i]) * 0x100000001b3u;
    }
    return hash;
}

/* Digest of everything but the tables. Texts include their terminator, so that "ab","c" and
 * "a","bc" differ. */
static uint64_t digest_of(const ep_coordinator_kept *kept, uint64_t term)
{
    const uint64_t numbers[] = {term, kept->number, kept->next_node_id, kept->nodes_count,
                                kept->drained_count};
    uint64_t hash = fnv(0xcbf29ce484222325u, numbers, sizeof(numbers));
    for (size_t n = 0; n < kept->nodes_count; n++) {
        const ep_coordinator_kept_node *node = &kept->nodes[n];
        const uint64_t ids[] = {node->node_id, node->incarnation};
        hash = fnv(hash, ids, sizeof(ids));
        hash = fnv(hash, node->name, strlen(node->name) + 1);
        hash = fnv(hash, node->url, strlen(node->url) + 1);
        hash = fnv(hash, node->state, strlen(node->state) + 1);
    }
    for (size_t d = 0; d < kept->drained_count; d++) {
        hash = fnv(hash, kept->drained[d], strlen(kept->drained[d]) + 1);
    }
    return hash >> 1; /* fits SQLite's signed integers */
}

static uint64_t digest_of_policy(const ep_policy *policy)
{
    uint64_t hash = fnv(0xcbf29ce484222325u, &policy->revision, sizeof(policy->revision));
    for (int key = 0; key < EP_POLICY_KEYS; key++) {
        const ep_policy_value *value = &policy->values[key];
        const uint64_t numbers[] = {value->revision, value->number, value->set_at};
        if (value->revision != 0) { /* only set keys, since builds differ in the keys they know */
            const char *name = ep_policy_option((ep_policy_key)key)->name;
            hash = fnv(hash, name, strlen(name) + 1);
            hash = fnv(hash, numbers, sizeof(numbers));
            hash = fnv(hash, value->who, strlen(value->who) + 1);
        }
    }
    return hash >> 1;
}

/* ---- reading ---- */

static bool column_text(sqlite3_stmt *statement, int column, char *out, size_t bytes)
{
    const char *text = (const char *)sqlite3_column_text(statement, column);
    size_t length = (size_t)sqlite3_column_bytes(statement, column);
    if (text == NULL || length == 0 || length >= bytes || strlen(text) != length) {
        return false;
    }
    memcpy(out, text, length + 1);
    return true;
}

/* Errors: NO_MEMORY; DATA_LOSS: the row does not fit; NOT_FOUND: the row has a key that this build
 * does not know. */
typedef ep_err (*row_func)(sqlite3_stmt *statement, ep_coordinator_kept *kept);

static ep_err read_node(sqlite3_stmt *statement, ep_coordinator_kept *kept)
{
    ep_coordinator_kept_node node = {0};
    int64_t id = sqlite3_column_int64(statement, 0);
    void *grown = realloc(kept->nodes, (kept->nodes_count + 1) * sizeof(*kept->nodes));
    if (grown == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    kept->nodes = grown;
    node.node_id = (uint32_t)id;
    node.incarnation = (uint64_t)sqlite3_column_int64(statement, 4);
    bool good = id >= 0 && id <= UINT32_MAX &&
                column_text(statement, 1, node.name, sizeof(node.name)) &&
                column_text(statement, 2, node.url, sizeof(node.url)) &&
                column_text(statement, 3, node.state, sizeof(node.state));
    if (good) {
        kept->nodes[kept->nodes_count++] = node;
    }
    return good ? EP_OK : EP_ERR_DATA_LOSS;
}

static ep_err read_drained(sqlite3_stmt *statement, ep_coordinator_kept *kept)
{
    void *grown = realloc(kept->drained, (kept->drained_count + 1) * sizeof(*kept->drained));
    if (grown == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    kept->drained = grown;
    if (!column_text(statement, 0, kept->drained[kept->drained_count], sizeof(*kept->drained))) {
        return EP_ERR_DATA_LOSS;
    }
    kept->drained_count++;
    return EP_OK;
}

static ep_err read_policy_value(sqlite3_stmt *statement, ep_coordinator_kept *kept)
{
    char name[64];
    ep_policy_value value = {.number = (uint64_t)sqlite3_column_int64(statement, 1),
                             .revision = (uint64_t)sqlite3_column_int64(statement, 2),
                             .set_at = (uint64_t)sqlite3_column_int64(statement, 3)};
    if (!column_text(statement, 0, name, sizeof(name)) ||
        !column_text(statement, 4, value.who, sizeof(value.who))) {
        return EP_ERR_DATA_LOSS;
    }
    const ep_policy_key key = ep_policy_find(name);
    if (key == EP_POLICY_KEYS) {
        return EP_ERR_NOT_FOUND; /* read_rows names it */
    }
    if (value.revision == 0 || !ep_policy_value_is_good(key, value.number)) {
        return EP_ERR_DATA_LOSS;
    }
    kept->policy.values[key] = value;
    return EP_OK;
}

static ep_err read_rows(sqlite_store *store, const char *sql, row_func read_row,
                        ep_coordinator_kept *kept, ep_error *out_error)
{
    sqlite3_stmt *statement;
    ep_err err = EP_OK;
    int code = sqlite3_prepare_v2(store->db, sql, -1, &statement, NULL);
    while (err == EP_OK && (code == SQLITE_OK || code == SQLITE_ROW)) {
        code = sqlite3_step(statement);
        err = code == SQLITE_ROW ? read_row(statement, kept) : EP_OK;
    }
    if (err == EP_ERR_NOT_FOUND) {
        char key[EP_TEXT_ESCAPED_BYTES(64)];
        ep_text_escape((const char *)sqlite3_column_text(statement, 0), key, sizeof(key));
        sqlite3_finalize(statement);
        return ep_error_set(
            out_error, EP_ERR_FAILED_PRECONDITION,
            "%s keeps the key %s of the policy, which this build does not know: use the build that "
            "wrote it, and there expertctl policy unset %s",
            store->base.place, key, key);
    }
    if (err != EP_OK) {
        sqlite3_finalize(statement);
        return err == EP_ERR_DATA_LOSS ? damaged(store, out_error, "a row does not fit")
                                       : failed(store, SQLITE_NOMEM, "reading", out_error);
    }
    if (code != SQLITE_DONE) {
        sqlite3_finalize(statement);
        return failed(store, code, "reading", out_error);
    }
    sqlite3_finalize(statement);
    return EP_OK;
}

static ep_err read_table(sqlite_store *store, const char *kind, ep_routing_table **out_table,
                         ep_error *out_error)
{
    sqlite3_stmt *statement;
    ep_error error;
    ep_err err = EP_OK;
    int code = sqlite3_prepare_v2(
        store->db, "SELECT term, number, checksum, bytes FROM placement WHERE kind=?", -1,
        &statement, NULL);
    if (code != SQLITE_OK) {
        return failed(store, code, "reading", out_error);
    }
    sqlite3_bind_text(statement, 1, kind, -1, SQLITE_STATIC);
    code = sqlite3_step(statement);
    if (code == SQLITE_ROW) {
        ep_routing_table *table = NULL;
        err = ep_table_store_unpack(sqlite3_column_blob(statement, 3),
                                    (size_t)sqlite3_column_bytes(statement, 3), &table, &error);
        if (err == EP_OK &&
            (table->epoch.term != (uint64_t)sqlite3_column_int64(statement, 0) ||
             table->epoch.number != (uint64_t)sqlite3_column_int64(statement, 1) ||
             ep_routing_table_checksum(table) != (uint64_t)sqlite3_column_int64(statement, 2))) {
            err = ep_error_set(&error, EP_ERR_DATA_LOSS,
                               "table '%s' differs from its epoch or checksum", kind);
        }
        if (err == EP_OK) {
            *out_table = table;
        } else {
            ep_routing_table_unref(table);
            err = err == EP_ERR_DATA_LOSS
                      ? damaged(store, out_error, error.text)
                      : ep_error_set(out_error, err, "%s: %s", store->base.place, error.text);
        }
    } else if (code != SQLITE_DONE) {
        err = failed(store, code, "reading", out_error);
    }
    sqlite3_finalize(statement);
    return err;
}

/* A file of an older build has no policy. */
static ep_err read_policy(sqlite_store *store, ep_coordinator_kept *kept, ep_error *out_error)
{
    int64_t revision = 0, digest = (int64_t)digest_of_policy(&kept->policy);
    int code =
        query_number(store, "SELECT value FROM meta WHERE name='policy_revision'", &revision);
    code = code == SQLITE_OK
               ? query_number(store, "SELECT value FROM meta WHERE name='policy_digest'", &digest)
               : code;
    if (code != SQLITE_OK && code != SQLITE_NOTFOUND) {
        return failed(store, code, "reading", out_error);
    }
    kept->policy.revision = (uint64_t)revision;
    ep_err err = read_rows(store, "SELECT key, value, revision, set_at, who FROM policy",
                           read_policy_value, kept, out_error);
    if (err == EP_OK && (revision < 0 || digest_of_policy(&kept->policy) != (uint64_t)digest)) {
        err = damaged(store, out_error, "its policy differs from its digest");
    }
    return err;
}

/* *out_term 0: the store was never used. */
static ep_err load(sqlite_store *store, ep_coordinator_kept *out_kept, uint64_t *out_term,
                   ep_error *out_error)
{
    ep_coordinator_kept kept = {0};
    static const char *const names[] = {"term", "number", "next_node_id", "digest"};
    int64_t values[4] = {0};
    for (int i = 0; i < 4; i++) {
        char sql[64];
        snprintf(sql, sizeof(sql), "SELECT value FROM meta WHERE name='%s'", names[i]);
        int code = query_number(store, sql, &values[i]);
        if (code == SQLITE_NOTFOUND && i == 0) {
            *out_kept = kept;
            *out_term = 0;
            return EP_OK;
        }
        if (code == SQLITE_NOTFOUND) {
            return damaged(store, out_error, "a number is missing in table meta");
        }
        if (code != SQLITE_OK) {
            return failed(store, code, "reading", out_error);
        }
    }
    kept.number = (uint64_t)values[1];
    kept.next_node_id = (uint32_t)values[2];
    ep_err err =
        read_rows(store, "SELECT node_id, name, url, state, incarnation FROM node ORDER BY place",
                  read_node, &kept, out_error);
    err = err != EP_OK ? err
                       : read_rows(store, "SELECT name FROM drained ORDER BY place", read_drained,
                                   &kept, out_error);
    if (err == EP_OK &&
        (values[0] <= 0 || digest_of(&kept, (uint64_t)values[0]) != (uint64_t)values[3])) {
        err = damaged(store, out_error, "its numbers and nodes differ from their digest");
    }
    err = err != EP_OK ? err : read_policy(store, &kept, out_error);
    err = err != EP_OK ? err : read_table(store, "assigned", &kept.assigned, out_error);
    err = err != EP_OK ? err : read_table(store, "published", &kept.published, out_error);
    if (err != EP_OK) {
        ep_coordinator_kept_fini(&kept);
        return err;
    }
    *out_kept = kept;
    *out_term = (uint64_t)values[0];
    return EP_OK;
}

/* ---- writing ---- */

static int write_node(sqlite_store *store, size_t place, const ep_coordinator_kept_node *node)
{
    sqlite3_stmt *statement;
    int code = sqlite3_prepare_v2(store->db,
                                  "INSERT INTO node(place, node_id, name, url, state, incarnation) "
                                  "VALUES(?,?,?,?,?,?)",
                                  -1, &statement, NULL);
    if (code != SQLITE_OK) {
        return code;
    }
    sqlite3_bind_int64(statement, 1, (int64_t)place);
    sqlite3_bind_int64(statement, 2, node->node_id);
    sqlite3_bind_text(statement, 3, node->name, -1, SQLITE_STATIC);
    sqlite3_bind_text(statement, 4, node->url, -1, SQLITE_STATIC);
    sqlite3_bind_text(statement, 5, node->state, -1, SQLITE_STATIC);
    sqlite3_bind_int64(statement, 6, (int64_t)node->incarnation);
    return run(statement);
}

static int write_drained(sqlite_store *store, size_t place, const char *name)
{
    sqlite3_stmt *statement;
    int code = sqlite3_prepare_v2(store->db, "INSERT INTO drained(place, name) VALUES(?,?)", -1,
                                  &statement, NULL);
    if (code != SQLITE_OK) {
        return code;
    }
    sqlite3_bind_int64(statement, 1, (int64_t)place);
    sqlite3_bind_text(statement, 2, name, -1, SQLITE_STATIC);
    return run(statement);
}

static int write_policy_value(sqlite_store *store, ep_policy_key key, const ep_policy_value *value)
{
    sqlite3_stmt *statement;
    int code =
        sqlite3_prepare_v2(store->db, "INSERT INTO policy VALUES(?,?,?,?,?)", -1, &statement, NULL);
    if (code != SQLITE_OK) {
        return code;
    }
    sqlite3_bind_text(statement, 1, ep_policy_option(key)->name, -1, SQLITE_STATIC);
    sqlite3_bind_int64(statement, 2, (int64_t)value->number);
    sqlite3_bind_int64(statement, 3, (int64_t)value->revision);
    sqlite3_bind_int64(statement, 4, (int64_t)value->set_at);
    sqlite3_bind_text(statement, 5, value->who, -1, SQLITE_STATIC);
    return run(statement);
}

static int write_policy(sqlite_store *store, const ep_policy *policy)
{
    int code = SQLITE_OK;
    for (int key = 0; code == SQLITE_OK && key < EP_POLICY_KEYS; key++) {
        if (policy->values[key].revision != 0) {
            code = write_policy_value(store, (ep_policy_key)key, &policy->values[key]);
        }
    }
    code = code != SQLITE_OK ? code : EP_FAILPOINT(write_policy) ? SQLITE_FULL : SQLITE_OK;
    code = code != SQLITE_OK ? code : set_meta(store, "policy_revision", policy->revision);
    return code != SQLITE_OK ? code : set_meta(store, "policy_digest", digest_of_policy(policy));
}

static int write_table(sqlite_store *store, const char *kind, const ep_routing_table *table)
{
    sqlite3_stmt *statement;
    uint8_t *bytes;
    size_t count;
    if (table == NULL) {
        return SQLITE_OK;
    }
    if (ep_table_store_pack(table, &bytes, &count) != EP_OK) {
        return SQLITE_NOMEM;
    }
    int code = sqlite3_prepare_v2(store->db, "INSERT INTO placement VALUES(?,?,?,?,?)", -1,
                                  &statement, NULL);
    if (code == SQLITE_OK) {
        sqlite3_bind_text(statement, 1, kind, -1, SQLITE_STATIC);
        sqlite3_bind_int64(statement, 2, (int64_t)table->epoch.term);
        sqlite3_bind_int64(statement, 3, (int64_t)table->epoch.number);
        sqlite3_bind_int64(statement, 4, (int64_t)ep_routing_table_checksum(table));
        sqlite3_bind_blob64(statement, 5, bytes, count, SQLITE_STATIC);
        code = run(statement);
    }
    free(bytes);
    return code;
}

static int write_meta(sqlite_store *store, const ep_coordinator_kept *kept, uint64_t term)
{
    int code = set_meta(store, "term", term);
    code = code != SQLITE_OK ? code : set_meta(store, "number", kept->number);
    code = code != SQLITE_OK ? code : set_meta(store, "next_node_id", kept->next_node_id);
    return code != SQLITE_OK ? code : set_meta(store, "digest", digest_of(kept, term));
}

/* Runs inside the transaction. A failpoint acts as a full disk. */
static int write_rows(sqlite_store *store, const ep_coordinator_kept *kept)
{
    int code = EP_FAILPOINT(write_begun) ? SQLITE_FULL : SQLITE_OK;
    code = code != SQLITE_OK ? code
                             : execute(store, "DELETE FROM node; DELETE FROM drained; DELETE FROM "
                                              "policy; DELETE FROM placement");
    code = code != SQLITE_OK ? code : EP_FAILPOINT(write_cleared) ? SQLITE_FULL : SQLITE_OK;
    for (size_t n = 0; code == SQLITE_OK && n < kept->nodes_count; n++) {
        code = write_node(store, n, &kept->nodes[n]);
    }
    code = code != SQLITE_OK ? code : EP_FAILPOINT(write_nodes) ? SQLITE_FULL : SQLITE_OK;
    for (size_t d = 0; code == SQLITE_OK && d < kept->drained_count; d++) {
        code = write_drained(store, d, kept->drained[d]);
    }
    code = code != SQLITE_OK ? code : EP_FAILPOINT(write_drained) ? SQLITE_FULL : SQLITE_OK;
    code = code != SQLITE_OK ? code : write_policy(store, &kept->policy);
    code = code != SQLITE_OK ? code : write_table(store, "assigned", kept->assigned);
    code = code != SQLITE_OK ? code : EP_FAILPOINT(write_assigned) ? SQLITE_FULL : SQLITE_OK;
    code = code != SQLITE_OK ? code : write_table(store, "published", kept->published);
    code = code != SQLITE_OK ? code : EP_FAILPOINT(write_published) ? SQLITE_FULL : SQLITE_OK;
    code = code != SQLITE_OK ? code : write_meta(store, kept, store->term);
    return code != SQLITE_OK ? code : EP_FAILPOINT(write_before_commit) ? SQLITE_FULL : SQLITE_OK;
}

static ep_err end_transaction(sqlite_store *store, int code, ep_error *out_error)
{
    code = code != SQLITE_OK ? code : execute(store, "COMMIT");
    if (code == SQLITE_OK) {
        return EP_OK;
    }
    /* made before the rollback, which drops SQLite's text */
    ep_err err = failed(store, code, "writing", out_error);
    if (!sqlite3_get_autocommit(store->db)) {
        execute(store, "ROLLBACK");
    }
    return err;
}

static ep_err on_write(ep_table_store *base, const ep_coordinator_kept *kept, ep_error *out_error)
{
    sqlite_store *store = (sqlite_store *)base;
    int code = EP_FAILPOINT(write_before_begin) ? SQLITE_FULL : execute(store, "BEGIN IMMEDIATE");
    if (code != SQLITE_OK) {
        return failed(store, code, "writing", out_error);
    }
    ep_err err = end_transaction(store, write_rows(store, kept), out_error);
    (void)EP_FAILPOINT(write_committed);
    return err;
}

static ep_err on_begin_term(ep_table_store *base, uint64_t term_min, ep_coordinator_kept *out_kept,
                            uint64_t *out_term, ep_error *out_error)
{
    sqlite_store *store = (sqlite_store *)base;
    ep_coordinator_kept kept;
    uint64_t term;
    ep_err err = load(store, &kept, &term, out_error);
    if (err != EP_OK) {
        return err;
    }
    (void)EP_FAILPOINT(open_loaded);
    term = term + 1 > term_min ? term + 1 : term_min;
    int code = execute(store, "BEGIN IMMEDIATE");
    if (code != SQLITE_OK) {
        err = failed(store, code, "writing", out_error);
    } else {
        code = EP_FAILPOINT(term_begun) ? SQLITE_FULL : write_meta(store, &kept, term);
        code = code != SQLITE_OK ? code : EP_FAILPOINT(term_written) ? SQLITE_FULL : SQLITE_OK;
        err = end_transaction(store, code, out_error);
    }
    if (err != EP_OK) {
        ep_coordinator_kept_fini(&kept);
        return err;
    }
    (void)EP_FAILPOINT(term_committed);
    store->term = term;
    *out_kept = kept;
    *out_term = term;
    return EP_OK;
}

static void on_close(ep_table_store *base)
{
    sqlite_store *store = (sqlite_store *)base;
    sqlite3_close(store->db);
    if (store->lock_fd >= 0) {
        /* the file stays: removing it would race with a process that is opening it */
        close(store->lock_fd);
    }
    free(store);
}

static const ep_table_store_ops sqlite_ops = {
    .begin_term = on_begin_term, .write = on_write, .close = on_close};

/* ---- opening ---- */

static ep_err lock(sqlite_store *store, ep_error *out_error)
{
    char path[EP_TABLE_STORE_PLACE_BYTES];
    char text[32] = "unknown";
    snprintf(path, sizeof(path), "%s/lock", store->directory);
    store->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0640);
    if (store->lock_fd < 0) {
        return failed_call(path, "opening", out_error);
    }
    if (flock(store->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) {
            return failed_call(path, "locking", out_error);
        }
        ssize_t count = pread(store->lock_fd, text, sizeof(text) - 1, 0);
        text[count > 0 ? strspn(text, "0123456789") : 0] = '\0';
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "the state in %s is in use by another coordinator, process %s",
                            store->directory, text[0] != '\0' ? text : "unknown");
    }
    int length = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
    if (ftruncate(store->lock_fd, 0) != 0 ||
        pwrite(store->lock_fd, text, (size_t)length, 0) != length) {
        return failed_call(path, "writing", out_error);
    }
    return EP_OK;
}

static ep_err sync_directory(const sqlite_store *store, ep_error *out_error)
{
    int fd = open(store->directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int failure = fd < 0 || fsync(fd) != 0 ? errno : 0;
    if (fd >= 0) {
        close(fd);
    }
    errno = failure;
    return failure == 0 ? EP_OK : failed_call(store->directory, "syncing", out_error);
}

static ep_err open_file(sqlite_store *store, const char *path, int flags, ep_error *out_error)
{
    int code = sqlite3_open_v2(path, &store->db, flags | SQLITE_OPEN_FULLMUTEX, NULL);
    if (code != SQLITE_OK) {
        return failed(store, code, "opening", out_error);
    }
    sqlite3_extended_result_codes(store->db, 1);
    /* Exclusive, so that no other process writes and the index of the log is in memory. In a mapped
     * file a full disk could cause a SIGBUS. */
    code = execute(store, "PRAGMA locking_mode=EXCLUSIVE; PRAGMA synchronous=FULL");
    return code == SQLITE_OK ? EP_OK : failed(store, code, "opening", out_error);
}

static ep_err create_file(sqlite_store *store, ep_error *out_error)
{
    static const char *const leftovers[] = {".new", ".new-journal"};
    char path[EP_TABLE_STORE_PLACE_BYTES + 16];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s%s", store->base.place, leftovers[i]);
        if (unlink(path) != 0 && errno != ENOENT) {
            return failed_call(path, "removing", out_error);
        }
    }
    snprintf(path, sizeof(path), "%s.new", store->base.place);
    ep_err err = open_file(store, path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, out_error);
    if (err != EP_OK) {
        return err;
    }
    int code = EP_FAILPOINT(create_file) ? SQLITE_FULL : execute(store, schema_sql);
    code = code != SQLITE_OK ? code : EP_FAILPOINT(create_schema) ? SQLITE_FULL : SQLITE_OK;
    if (code != SQLITE_OK) {
        return failed(store, code, "creating", out_error);
    }
    code = sqlite3_close(store->db);
    store->db = NULL;
    if (code != SQLITE_OK) {
        return failed(store, code, "creating", out_error);
    }
    (void)EP_FAILPOINT(create_before_rename);
    if (rename(path, store->base.place) != 0) {
        return failed_call(path, "renaming", out_error);
    }
    (void)EP_FAILPOINT(create_renamed);
    return sync_directory(store, out_error);
}

static ep_err check_integrity(sqlite_store *store, ep_error *out_error)
{
    sqlite3_stmt *statement;
    ep_err err = EP_OK;
    int code = sqlite3_prepare_v2(store->db, "PRAGMA integrity_check(1)", -1, &statement, NULL);
    code = code != SQLITE_OK ? code : sqlite3_step(statement);
    if (code != SQLITE_ROW) {
        err = failed(store, code, "checking", out_error);
    } else {
        const char *text = (const char *)sqlite3_column_text(statement, 0);
        err = text != NULL && strcmp(text, "ok") == 0
                  ? EP_OK
                  : damaged(store, out_error, text != NULL ? text : "?");
    }
    sqlite3_finalize(statement);
    return err;
}

static ep_err check_schema(sqlite_store *store, ep_error *out_error)
{
    int64_t id = 0;
    int64_t version = 0;
    int code = query_number(store, "PRAGMA application_id", &id);
    code = code != SQLITE_OK ? code : query_number(store, "PRAGMA user_version", &version);
    if (code != SQLITE_OK) {
        return failed(store, code, "reading", out_error);
    }
    if (id != APPLICATION_ID) {
        return damaged(store, out_error, "it is not the database of a coordinator");
    }
    if (version != EP_TABLE_STORE_SQLITE_SCHEMA) {
        return ep_error_set(out_error, EP_ERR_FAILED_PRECONDITION,
                            "%s has schema version %" PRId64
                            ", this build reads %d: use the build that wrote it, or "
                            "move it away to begin without state",
                            store->base.place, version, EP_TABLE_STORE_SQLITE_SCHEMA);
    }
    return EP_OK;
}

static ep_err open_checked(sqlite_store *store, ep_error *out_error)
{
    int64_t ignored = 0;
    ep_err err = open_file(store, store->base.place, SQLITE_OPEN_READWRITE, out_error);
    err = err != EP_OK ? err : check_schema(store, out_error);
    err = err != EP_OK ? err : check_integrity(store, out_error);
    if (err != EP_OK) {
        return err;
    }
    (void)EP_FAILPOINT(open_checked);
    int code =
        execute(store, "PRAGMA journal_mode=WAL; PRAGMA journal_size_limit=16777216;" POLICY_SQL);
    code = code != SQLITE_OK ? code : query_number(store, "SELECT count(*) FROM meta", &ignored);
    return code == SQLITE_OK ? EP_OK : failed(store, code, "opening", out_error);
}

static ep_err prepare_file(sqlite_store *store, ep_error *out_error)
{
    struct stat status;
    char wal[EP_TABLE_STORE_PLACE_BYTES + 16];
    if (stat(store->base.place, &status) == 0) {
        return status.st_size > 0 ? EP_OK : damaged(store, out_error, "it is empty");
    }
    if (errno != ENOENT) {
        return failed_call(store->base.place, "reading", out_error);
    }
    snprintf(wal, sizeof(wal), "%s-wal", store->base.place);
    if (stat(wal, &status) == 0) {
        return damaged(store, out_error, "it is missing, but its -wal file is there");
    }
    return create_file(store, out_error);
}

ep_err ep_table_store_sqlite_open(const char *directory, ep_table_store **out_store,
                                  ep_error *out_error)
{
    sqlite_store *store = calloc(1, sizeof(*store));
    if (store == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the state in %s",
                            directory);
    }
    store->base.ops = &sqlite_ops;
    store->lock_fd = -1;
    if (strlen(directory) >= sizeof(store->directory)) {
        ep_table_store_close(&store->base);
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "the state's directory has %zu characters, allowed 1..%zu",
                            strlen(directory), sizeof(store->directory) - 1);
    }
    memcpy(store->directory, directory, strlen(directory) + 1);
    snprintf(store->base.place, sizeof(store->base.place), "%s/coordinator.db", directory);
    ep_err err = lock(store, out_error);
    err = err != EP_OK ? err : prepare_file(store, out_error);
    err = err != EP_OK ? err : open_checked(store, out_error);
    if (err != EP_OK) {
        ep_table_store_close(&store->base);
        return err;
    }
    *out_store = &store->base;
    return EP_OK;
}
