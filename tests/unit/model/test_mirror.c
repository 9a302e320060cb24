/* SPDX-License-Identifier: Apache-2.0 */
/* A mirror gives the source's bytes or an error, whatever was cut off, lost or damaged before:
 * never the zeros of a hole. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "model/mirror.h"
#include "model/model.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"
#include "support/format_fixture.h"

static ep_error error; /* of the last call */

#define LAYERS 2
#define EXPERTS 6
#define PIECE_BYTES ((size_t)32 << 10)
#define PATH_BYTES 2048
#define FILES 5 /* config, index, shards; of the formats no more */

static char source_path[EP_FIXTURE_PATH_BYTES];
static char mirror_path[EP_FIXTURE_PATH_BYTES];
static ep_checkpoint *source;
static ep_mirror_entry entries[FILES];
static size_t files_count;
static uint64_t all_bytes;
static size_t piece_bytes = PIECE_BYTES;

static struct {
    uint64_t bytes;
    uint32_t calls;
    uint32_t dies_at; /* 0: never */
    bool fails;
    bool is_other; /* gives other bytes than those of the version, behind the heads */
} wire;

/* The disk of the mirror: from a call on it fails, half of what is to be written arrives
 * nevertheless. */
static _Thread_local struct {
    uint32_t fails_at; /* 0: never */
    uint32_t calls;
    int error;
    bool fails_reads;
} disk;

static bool disk_fails(void)
{
    if (disk.fails_at == 0 || ++disk.calls < disk.fails_at) {
        return false;
    }
    errno = disk.error;
    return true;
}

ssize_t pwrite(int fd, const void *from, size_t bytes, off_t offset)
{
    if (disk_fails()) {
        (void)syscall(SYS_pwrite64, fd, from, bytes / 2, offset);
        errno = disk.error;
        return -1;
    }
    return syscall(SYS_pwrite64, fd, from, bytes, offset);
}

ssize_t write(int fd, const void *from, size_t bytes)
{
    return disk_fails() ? -1 : syscall(SYS_write, fd, from, bytes);
}

ssize_t pread(int fd, void *out, size_t bytes, off_t offset)
{
    return disk.fails_reads && disk_fails() ? -1 : syscall(SYS_pread64, fd, out, bytes, offset);
}

/* What a build with _FORTIFY_SOURCE calls. */
ssize_t __pread_chk(int fd, void *out, size_t bytes, off_t offset, size_t room);
ssize_t __pread_chk(int fd, void *out, size_t bytes, off_t offset, size_t room)
{
    return bytes > room ? -1 : pread(fd, out, bytes, offset);
}

int fdatasync(int fd)
{
    (void)fd;
    return disk_fails() ? -1 : 0;
}

int fsync(int fd)
{
    (void)fd;
    return disk_fails() ? -1 : 0;
}

int ftruncate(int fd, off_t bytes)
{
    return disk_fails() ? -1 : (int)syscall(SYS_ftruncate, fd, bytes);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    return disk_fails() ? -1 : (int)syscall(SYS_renameat, from_dir, from, to_dir, to);
}

/* What the source's node would send. */
static ep_err fetch(void *arg, const char *name, uint64_t offset, void *out, size_t bytes,
                    ep_error *out_error)
{
    (void)arg;
    wire.calls++;
    if (wire.calls == wire.dies_at) {
        _exit(0);
    }
    if (wire.fails) {
        return ep_error_set(out_error, EP_ERR_UNAVAILABLE, "%s: no node gives it", name);
    }
    for (size_t i = 0; i < files_count; i++) {
        const char *own;
        uint64_t own_bytes;
        ep_checkpoint_file(source, i, &own, &own_bytes);
        if (strcmp(own, name) == 0) {
            wire.bytes += bytes;
            const ep_err err = ep_checkpoint_read_file(source, i, offset, out, bytes, out_error);
            ((uint8_t *)out)[bytes - 1] ^= wire.is_other && offset > 0;
            return err;
        }
    }
    return ep_error_set(out_error, EP_ERR_NOT_FOUND, "%s: no such file", name);
}

static void list_files(void)
{
    files_count = ep_checkpoint_files_count(source);
    cr_assert_leq(files_count, FILES);
    all_bytes = 0;
    for (size_t i = 0; i < files_count; i++) {
        const char *name;
        ep_checkpoint_file(source, i, &name, &entries[i].bytes);
        snprintf(entries[i].name, sizeof(entries[i].name), "%s", name);
        all_bytes += entries[i].bytes;
    }
    memset(&wire, 0, sizeof(wire));
}

static void make_source(uint32_t hidden, uint32_t inner)
{
    ep_fixture_config config = ep_fixture_default();
    config.layers = LAYERS;
    config.experts = EXPERTS;
    config.hidden = hidden;
    config.inner = inner;
    config.shards = 3;
    ep_log_start(EP_LOG_OFF, EP_LOG_TEXT);
    ep_fixture_new(&config, source_path);
    ep_fixture_temp_dir(mirror_path);
    ASSERT_OK(ep_checkpoint_open(source_path, &source, &error), error);
    list_files();
    cr_assert_eq(files_count, FILES);
}

static void setup(void)
{
    make_source(256, 512);
}

static void setup_small(void)
{
    piece_bytes = 4096;
    make_source(64, 128);
}

static void teardown(void)
{
    ep_checkpoint_close(source);
    ep_fixture_remove(source_path);
    ep_fixture_remove(mirror_path);
}

TestSuite(mirror, .init = setup, .fini = teardown, .timeout = 120);
TestSuite(mirror_disk, .init = setup_small, .fini = teardown, .timeout = 120);

static void create(void)
{
    ASSERT_OK(ep_mirror_create(mirror_path, ep_checkpoint_info(source)->version, entries,
                               files_count, &error),
              error);
}

static const char *path_of(const char *name, const char *end)
{
    static char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s/%s%s", mirror_path, name, end);
    return path;
}

static bool is_there(const char *name, const char *end)
{
    return access(path_of(name, end), F_OK) == 0;
}

static const char *largest(void)
{
    const ep_mirror_entry *most = &entries[0];
    for (size_t i = 1; i < FILES; i++) {
        most = entries[i].bytes > most->bytes ? &entries[i] : most;
    }
    return most->name;
}

typedef struct mirrored {
    ep_mirror *mirror;
    ep_checkpoint *checkpoint;
} mirrored;

static ep_err open_mirrored(mirrored *out, ep_error *out_error)
{
    *out = (mirrored){NULL, NULL};
    ep_err err = ep_mirror_open(mirror_path, piece_bytes, fetch, NULL, &out->mirror, out_error);
    return err == EP_OK ? ep_checkpoint_open_mirror(out->mirror, &out->checkpoint, out_error) : err;
}

static void close_mirrored(mirrored *m)
{
    ep_checkpoint_close(m->checkpoint);
    ep_mirror_close(m->mirror);
}

static ep_err read_expert(const ep_checkpoint *checkpoint, uint32_t layer, uint32_t expert,
                          uint8_t *out_sha256, ep_error *out_error)
{
    ep_expert_data data = {0};
    const ep_err err = ep_checkpoint_read_expert(checkpoint, layer, expert, &data, out_error);
    if (err == EP_OK) {
        memcpy(out_sha256, data.sha256, EP_SHA256_BYTES);
        ep_expert_data_free(&data);
    }
    return err;
}

static void expect_expert(const mirrored *m, uint32_t layer, uint32_t expert)
{
    uint8_t got[EP_SHA256_BYTES], want[EP_SHA256_BYTES];
    ASSERT_OK(read_expert(source, layer, expert, want, &error), error);
    ASSERT_OK(read_expert(m->checkpoint, layer, expert, got, &error), error);
    cr_assert_arr_eq(got, want, EP_SHA256_BYTES, "layer %u expert %u has other bytes", layer,
                     expert);
}

static void expect_layer(const mirrored *m, uint32_t layer)
{
    for (uint32_t e = 0; e < EXPERTS; e++) {
        expect_expert(m, layer, e);
    }
}

/* Opens it, reads the experts of its first layers, and compares them. */
static void expect_layers(uint32_t count)
{
    mirrored m;
    ASSERT_OK(open_mirrored(&m, &error), error);
    cr_assert_str_eq(ep_checkpoint_info(m.checkpoint)->version,
                     ep_checkpoint_info(source)->version);
    for (uint32_t layer = 0; layer < count; layer++) {
        expect_layer(&m, layer);
    }
    close_mirrored(&m);
}

Test(mirror, reads_fetch_what_they_need_and_no_more_and_a_restart_goes_on)
{
    mirrored m;
    create();
    expect_layers(1);
    const uint64_t first = wire.bytes;
    cr_expect_lt(first, all_bytes);
    ASSERT_OK(open_mirrored(&m, &error), error);
    expect_layer(&m, 0);
    cr_expect_eq(wire.bytes, first, "what was here was fetched again");
    expect_layer(&m, 1);
    cr_expect_leq(wire.bytes, all_bytes, "something was fetched twice");
    close_mirrored(&m);
}

/* Whoever does not know of mirrors finds no file whose holes would be zeros. */
Test(mirror, no_other_way_opens_it_before_it_is_whole)
{
    mirrored m;
    ep_checkpoint *plain = NULL;
    create();
    ASSERT_OK(open_mirrored(&m, &error), error);
    cr_expect(is_there(largest(), ".part"));
    cr_expect_not(is_there(largest(), ""));
    cr_expect_neq(ep_checkpoint_open(mirror_path, &plain, &error), EP_OK);
    close_mirrored(&m);
    cr_expect_neq(ep_checkpoint_open(mirror_path, &plain, &error), EP_OK);
}

Test(mirror, a_whole_one_is_a_checkpoint_like_any)
{
    mirrored m;
    ep_checkpoint *plain = NULL;
    uint8_t byte;
    ep_model_file file;
    create();
    ASSERT_OK(open_mirrored(&m, &error), error);
    for (size_t i = 0; i < FILES; i++) {
        ASSERT_OK(ep_mirror_open_file(m.mirror, entries[i].name, &file, &error), error);
        for (uint64_t at = 0; at < entries[i].bytes; at += PIECE_BYTES) {
            ASSERT_OK(ep_model_file_read(&file, at, &byte, 1, &error), error);
        }
        ep_model_file_close(&file);
        cr_expect(is_there(entries[i].name, ""));
        cr_expect_not(is_there(entries[i].name, ".part"));
        cr_expect_not(is_there(entries[i].name, ".pieces"));
    }
    cr_expect_eq(wire.bytes, all_bytes);
    expect_layer(&m, 1);
    close_mirrored(&m);
    wire.fails = true;
    expect_layers(LAYERS);
    ASSERT_OK(ep_checkpoint_open(mirror_path, &plain, &error), error);
    expect_expert(&(mirrored){.checkpoint = plain}, 1, EXPERTS - 1);
    cr_expect_str_eq(ep_checkpoint_info(plain)->version, ep_checkpoint_info(source)->version);
    ep_checkpoint_close(plain);
}

/* Killed at every fetch in turn, the next process goes on from there: all attempts together fetch a
 * little more than once. */
Test(mirror, a_process_killed_at_any_fetch_costs_only_what_it_had_not_noted)
{
    uint32_t deaths = 0;
    create();
    for (uint32_t n = 1;; n = (n + 19) % 64) { /* pieces are noted 16 at a time */
        mirrored m;
        const pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            wire.dies_at = n + 1;
            if (open_mirrored(&m, &error) == EP_OK) {
                for (uint32_t e = 0; e < LAYERS * EXPERTS; e++) {
                    uint8_t sha256[EP_SHA256_BYTES];
                    read_expert(m.checkpoint, e / EXPERTS, e % EXPERTS, sha256, &error);
                }
            }
            _exit(1); /* nothing is left to fetch */
        }
        int status = 0;
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert(WIFEXITED(status));
        if (WEXITSTATUS(status) == 1) {
            break;
        }
        cr_assert_lt(++deaths, 1000, "no progress from one to the next");
    }
    cr_expect_gt(deaths, 3);
    wire.fails = true; /* all is here */
    expect_layers(LAYERS);
}

static long size_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (long)st.st_size : -1;
}

static void write_at(const char *path, long at, const void *bytes, size_t count)
{
    const int fd = open(path, O_WRONLY);
    cr_assert_geq(fd, 0);
    cr_assert_eq(pwrite(fd, bytes, count, at), (ssize_t)count);
    close(fd);
}

/* A mirror with layer 0 in it, closed. */
static void fill(void)
{
    create();
    expect_layers(1);
}

/* Of a file that is not whole; there is one after fill. */
static const char *torn_name(void)
{
    for (size_t i = 0; i < FILES; i++) {
        if (is_there(entries[i].name, ".pieces") &&
            size_of(path_of(entries[i].name, ".pieces")) > 24) {
            return entries[i].name;
        }
    }
    cr_assert_fail("no file is in parts");
    return "";
}

Test(mirror, a_torn_journal_ends_at_its_last_whole_record)
{
    fill();
    const char *name = torn_name();
    for (int cut = 1; cut <= 60; cut += 7) {
        char path[PATH_BYTES];
        snprintf(path, sizeof(path), "%s", path_of(name, ".pieces"));
        const long size = size_of(path);
        if (size < 0) {
            return; /* whole by now */
        }
        cr_assert_eq(truncate(path, size > cut ? size - cut : 0), 0);
        expect_layers(1);
    }
}

Test(mirror, any_damaged_byte_of_a_journal_is_noticed)
{
    fill();
    char path[PATH_BYTES];
    const char *name = torn_name();
    snprintf(path, sizeof(path), "%s", path_of(name, ".pieces"));
    const long size = size_of(path);
    for (long at = 0; at < size && is_there(name, ".pieces"); at += 1 + size / 40) {
        mirrored m;
        uint8_t byte;
        const int fd = open(path, O_RDWR);
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        byte ^= 0x41;
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
        close(fd);
        cr_assert_eq(open_mirrored(&m, &error), EP_OK, "byte %ld: %s", at, error.text);
        expect_layer(&m, 0);
        close_mirrored(&m);
    }
}

/* What a disk may lose that said it was written: noted pieces are zeros, or other bytes. */
Test(mirror, lost_and_damaged_data_is_fetched_again)
{
    static const char zeros[4096];
    char path[PATH_BYTES];
    fill();
    snprintf(path, sizeof(path), "%s", path_of(torn_name(), ".part"));
    const long size = size_of(path);
    const uint64_t before = wire.bytes;
    for (long at = 0; at + 8192 < size; at += (long)PIECE_BYTES) {
        write_at(path, at + 64, zeros, sizeof(zeros));
    }
    expect_layers(LAYERS);
    cr_expect_gt(wire.bytes, before);
}

Test(mirror, a_short_or_missing_data_file_is_fetched_again)
{
    char path[PATH_BYTES];
    fill();
    snprintf(path, sizeof(path), "%s", path_of(torn_name(), ".part"));
    cr_assert_eq(truncate(path, size_of(path) / 2), 0);
    expect_layers(1);
    cr_assert_eq(unlink(path), 0);
    expect_layers(LAYERS);
}

Test(mirror, what_cannot_be_fetched_is_an_error_and_comes_later)
{
    mirrored m;
    uint8_t sha256[EP_SHA256_BYTES], bytes[16];
    fill();
    ASSERT_OK(open_mirrored(&m, &error), error);
    wire.fails = true;
    uint32_t failed = 0;
    /* the first of them may share a piece with what is here */
    for (uint32_t e = 0; e < EXPERTS; e++) {
        ep_error_clear(&error);
        const ep_err err = read_expert(m.checkpoint, 1, e, sha256, &error);
        failed += err == EP_ERR_UNAVAILABLE && strstr(error.text, "no node gives it") != NULL &&
                  error.layer == 1;
        cr_expect(err == EP_OK || err == EP_ERR_UNAVAILABLE, "%s", error.text);
    }
    cr_expect_gt(failed, 0);
    uint32_t absent = 0;
    const uint32_t calls = wire.calls;
    for (size_t i = 0; i < FILES; i++) {
        for (uint64_t at = 0; at + sizeof(bytes) <= entries[i].bytes; at += PIECE_BYTES / 2) {
            uint8_t want[sizeof(bytes)];
            const char *name;
            uint64_t size;
            size_t place = 0;
            while (ep_checkpoint_file(m.checkpoint, place, &name, &size),
                   strcmp(name, entries[i].name) != 0) {
                place++;
            }
            const ep_err err =
                ep_checkpoint_read_file(m.checkpoint, place, at, bytes, sizeof(bytes), &error);
            cr_assert_eq(ep_checkpoint_read_file(source, i, at, want, sizeof(want), NULL), EP_OK);
            cr_expect(err == EP_ERR_UNAVAILABLE ||
                          (err == EP_OK && memcmp(bytes, want, sizeof(bytes)) == 0),
                      "%s", error.text);
            absent += err == EP_ERR_UNAVAILABLE;
        }
    }
    cr_expect_gt(absent, 0);
    cr_expect_eq(wire.calls, calls, "what others ask for fetches nothing");
    wire.fails = false;
    expect_layer(&m, 1);
    close_mirrored(&m);
}

typedef enum disk_step { DISK_CREATE, DISK_OPEN, DISK_READ } disk_step;

/* From here on the disk may fail. */
static void arm(disk_step step, disk_step of, uint32_t at)
{
    disk.calls = 0;
    disk.fails_at = step == of ? at : 0;
}

/* The step is over: the disk works. True: it failed, and then the step said so by what the system
 * calls it. */
static bool disarm(ep_err err, const char *step)
{
    char text[EP_ERRNO_TEXT_BYTES];
    const bool has_failed = disk.fails_at != 0 && disk.calls >= disk.fails_at;
    disk.fails_at = 0;
    cr_assert(err == EP_OK || (has_failed && err == EP_ERR_IO &&
                               strstr(error.text, ep_errno_text(disk.error, text)) != NULL),
              "%s, call %u: %s: %s", step, disk.calls, ep_err_name(err), error.text);
    return has_failed;
}

/* Where the disk fails in a step from a call on, the step ends with the disk's error or is right;
 * once the disk works again all is right, in this process and in the next. False: the step has no
 * such call. */
static bool survives_disk(disk_step step, uint32_t at)
{
    mirrored m;
    uint8_t want[EP_SHA256_BYTES], got[EP_SHA256_BYTES];
    const char *version = ep_checkpoint_info(source)->version;
    ep_fixture_remove(mirror_path);
    ep_fixture_temp_dir(mirror_path);
    arm(step, DISK_CREATE, at);
    ep_err err = ep_mirror_create(mirror_path, version, entries, files_count, &error);
    bool has_failed = disarm(err, "create");
    if (!is_there(EP_MIRROR_LIST_NAME, "")) {
        create();
    }
    arm(step, DISK_OPEN, at);
    err = open_mirrored(&m, &error);
    has_failed |= disarm(err, "open");
    if (err != EP_OK) {
        close_mirrored(&m);
        ASSERT_OK(open_mirrored(&m, &error), error);
    }
    arm(step, DISK_READ, at);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        err = read_expert(m.checkpoint, 0, e, got, &error);
        const uint32_t fails_at = disk.fails_at;
        has_failed |= disarm(err, "read");
        cr_assert_eq(read_expert(source, 0, e, want, NULL), EP_OK);
        cr_assert(err != EP_OK || memcmp(got, want, EP_SHA256_BYTES) == 0,
                  "expert %u has other bytes", e);
        disk.fails_at = fails_at;
    }
    disk.fails_at = 0;
    expect_layer(&m, 0);
    close_mirrored(&m);
    wire.fails = true;
    expect_layers(1);
    wire.fails = false;
    return has_failed;
}

static void expect_survival(int number, bool fails_reads, disk_step step, uint32_t stride,
                            uint32_t calls_min)
{
    uint32_t at = 1;
    disk.error = number;
    disk.fails_reads = fails_reads;
    while (survives_disk(step, at)) {
        at += stride;
    }
    cr_assert_gt(at, calls_min);
}

Test(mirror_disk, one_that_is_full_or_fails_costs_reads_and_no_byte)
{
    expect_survival(ENOSPC, false, DISK_CREATE, 1, 2);
    expect_survival(ENOSPC, false, DISK_OPEN, 23, 100);
    expect_survival(ENOSPC, false, DISK_READ, 1, 20);
    expect_survival(EIO, true, DISK_OPEN, 31, 100);
    expect_survival(EIO, true, DISK_READ, 31, 100);
}

Test(mirror, bytes_of_another_version_are_refused)
{
    mirrored m;
    create();
    wire.is_other = true;
    EXPECT_FAILS(open_mirrored(&m, &error), EP_ERR_BAD_FILE, error, "were said to be");
    close_mirrored(&m);
}

Test(mirror, somebody_else_who_writes_to_it_is_noticed)
{
    mirrored m;
    uint8_t sha256[EP_SHA256_BYTES];
    fill();
    ASSERT_OK(open_mirrored(&m, &error), error);
    for (size_t i = 0; i < FILES; i++) {
        if (is_there(entries[i].name, ".part")) {
            write_at(path_of(entries[i].name, ".part"), 0, "x", 1);
        }
    }
    uint32_t refused = 0;
    for (uint32_t e = 0; e < LAYERS * EXPERTS; e++) {
        refused += read_expert(m.checkpoint, e / EXPERTS, e % EXPERTS, sha256, &error) ==
                       EP_ERR_BAD_FILE &&
                   strstr(error.text, "somebody else") != NULL;
    }
    cr_expect_gt(refused, 0);
    close_mirrored(&m);
    expect_layers(LAYERS);
}

static void expect_list(ep_mirror_entry *list, size_t count, const char *version,
                        const char *reason)
{
    ep_mirror *mirror = NULL;
    cr_expect_eq(ep_mirror_create(mirror_path, version, list, count, &error), EP_ERR_BAD_FILE, "%s",
                 reason);
    EXPECT_TEXT(error, reason);
    cr_expect_eq(ep_mirror_open(mirror_path, PIECE_BYTES, fetch, NULL, &mirror, &error),
                 EP_ERR_NOT_FOUND);
}

Test(mirror, a_hostile_list_writes_nothing)
{
    static const char *const names[] = {"",       ".",           "..",
                                        "../x",   "/etc/passwd", "a/b",
                                        "a\nb",   "a\x01",       EP_MIRROR_LIST_NAME,
                                        "x.part", "x.pieces"};
    static ep_mirror_entry many[EP_MIRROR_FILES_MAX + 1];
    const char *version = "0123456789abcdef";
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        ep_mirror_entry list[2] = {{"good", 1}, {"", 1}};
        snprintf(list[1].name, sizeof(list[1].name), "%s", names[i]);
        expect_list(list, 2, version, "a file called '");
    }
    ep_mirror_entry list[2] = {{"good", 1}, {"good", 1}};
    expect_list(list, 2, version, "listed twice");
    memset(list[1].name, 'n', sizeof(list[1].name)); /* no end */
    expect_list(list, 2, version, "a file called '");
    list[1] = (ep_mirror_entry){"huge", EP_MIRROR_FILE_BYTES_MAX + 1};
    expect_list(list, 2, version, "allowed 0..");
    expect_list(list, 0, version, "a model of 0 files");
    expect_list(many, EP_MIRROR_FILES_MAX + 1, version, "a model of 10001 files");
    expect_list(list, 1, "../../etc", "16 hexadecimal digits");
    expect_list(list, 1, "", "16 hexadecimal digits");
}

Test(mirror, it_is_made_in_an_empty_directory_and_opened_by_one)
{
    ep_mirror *first = NULL, *second = NULL;
    const char *version = ep_checkpoint_info(source)->version;
    EXPECT_FAILS(ep_mirror_create(source_path, version, entries, FILES, &error), EP_ERR_BAD_FILE,
                 error, "allowed: an empty directory");
    cr_assert_eq(mkdir(path_of("lost+found", ""), 0700), 0);
    const int dir = open(mirror_path, O_RDONLY | O_DIRECTORY);
    cr_assert_eq(flock(dir, LOCK_EX | LOCK_NB), 0); /* as one that makes it a mirror just now */
    cr_expect_eq(ep_mirror_create(mirror_path, version, entries, FILES, &error),
                 EP_ERR_FAILED_PRECONDITION);
    cr_expect_not(is_there(EP_MIRROR_LIST_NAME, ""));
    close(dir);
    create();
    cr_expect_eq(ep_mirror_create(mirror_path, version, entries, FILES, &error), EP_ERR_BAD_FILE);
    ASSERT_OK(ep_mirror_open(mirror_path, PIECE_BYTES, fetch, NULL, &first, &error), error);
    EXPECT_FAILS(ep_mirror_open(mirror_path, PIECE_BYTES, fetch, NULL, &second, &error),
                 EP_ERR_FAILED_PRECONDITION, error, "another process");
    ep_mirror_close(first);
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s", path_of(EP_MIRROR_LIST_NAME, ""));
    for (long at = 0; at < size_of(path); at++) {
        char byte;
        const int fd = open(path, O_RDWR);
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        const char changed = (char)(byte ^ 0x10);
        cr_assert_eq(pwrite(fd, &changed, 1, at), 1);
        cr_expect_eq(ep_mirror_open(mirror_path, PIECE_BYTES, fetch, NULL, &second, &error),
                     EP_ERR_BAD_FILE, "byte %ld", at);
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
        close(fd);
    }
    ASSERT_OK(ep_mirror_open(mirror_path, PIECE_BYTES, fetch, NULL, &second, &error), error);
    ep_mirror_close(second);
}

/* Every format, GGUF in one file and in several too. */
Test(formats_mirror, every_format_has_the_version_and_the_experts_of_its_source, .timeout = 120)
{
    ep_log_start(EP_LOG_OFF, EP_LOG_TEXT);
    for (size_t i = 0; i < ep_format_cases_count; i++) {
        ep_format_model *model = ep_format_model_make(&ep_format_cases[i], 7);
        mirrored m;
        ep_fixture_temp_dir(source_path);
        ep_fixture_temp_dir(mirror_path);
        ASSERT_OK(ep_format_model_write(model, source_path, &error), error);
        ASSERT_OK(ep_checkpoint_open(source_path, &source, &error), error);
        list_files();
        create();
        cr_assert_eq(open_mirrored(&m, &error), EP_OK, "%s: %s", ep_format_cases[i].name,
                     error.text);
        cr_expect_str_eq(ep_checkpoint_info(m.checkpoint)->version,
                         ep_checkpoint_info(source)->version);
        for (uint32_t e = 0; e < EP_FORMAT_EXPERTS; e++) {
            expect_expert(&m, EP_FORMAT_LAYER, e);
        }
        close_mirrored(&m);
        teardown();
        ep_format_model_free(model);
    }
}
