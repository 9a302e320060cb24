/* SPDX-License-Identifier: Apache-2.0 */
/* Packed experts on disk: written, found, checked, limited, and never in the way. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "expertd/weight_cache.h"
#include "support/checkpoint_fixture.h"
#include "support/expect.h"

#define EXPERTS 8

static char dir[EP_FIXTURE_PATH_BYTES], cache_dir[EP_FIXTURE_PATH_BYTES];
static ep_checkpoint *checkpoint;
static ep_backend *backend;
static ep_weight_cache *cache;
static char numerics[EP_NUMERICS_ID_BYTES];

static void open_cache(uint64_t bytes_max)
{
    ep_error e;
    cr_assert_eq(ep_weight_cache_open(cache_dir, bytes_max, backend, &cache, &e), EP_OK);
    cr_assert_not_null(cache);
}

static void setup(void)
{
    ep_error e;
    ep_fixture_config fixture = ep_fixture_default();
    const ep_backend_config config = {.threads = 1};
    ep_fixture_new(&fixture, dir);
    ep_fixture_temp_dir(cache_dir);
    ASSERT_OK(ep_checkpoint_open(dir, &checkpoint, &e), e);
    ASSERT_OK(ep_backend_by_name("cpu")->open(&config, &backend, &e), e);
    cr_assert_eq(backend->ops->numerics_id(backend, ep_checkpoint_info(checkpoint)->format, false,
                                           0, numerics),
                 EP_OK);
}

static void teardown(void)
{
    ep_weight_cache_close(cache);
    backend->ops->close(backend);
    ep_checkpoint_close(checkpoint);
    ep_fixture_remove(dir);
    ep_fixture_remove(cache_dir);
}

TestSuite(weight_cache, .init = setup, .fini = teardown, .timeout = 60);

static ep_weight_cache_key key_of(uint32_t expert)
{
    ep_weight_cache_key key = {.numerics = numerics, .layer = 0, .expert = expert};
    ep_error e;
    ASSERT_OK(ep_checkpoint_identity(checkpoint, key.identity, &e), e);
    return key;
}

static ep_backend_weights *pack(uint32_t expert, uint8_t sha256[EP_SHA256_BYTES])
{
    ep_expert_data data;
    ep_backend_weights *weights = NULL;
    ep_error e;
    ASSERT_OK(ep_checkpoint_read_expert(checkpoint, 0, expert, &data, &e), e);
    ASSERT_OK(backend->ops->weights_load(backend, &data.source, &weights, &e), e);
    memcpy(sha256, data.sha256, EP_SHA256_BYTES);
    ep_expert_data_free(&data);
    return weights;
}

static bool write_expert(uint32_t expert)
{
    uint8_t sha256[EP_SHA256_BYTES];
    const ep_weight_cache_key key = key_of(expert);
    ep_backend_weights *weights = pack(expert, sha256);
    const bool is_written = ep_weight_cache_write(cache, &key, weights, sha256);
    backend->ops->weights_unload(backend, weights);
    return is_written;
}

/* Whether the cache gives the expert, with the bytes that packing gives. */
static bool has_expert(uint32_t expert)
{
    uint8_t sha256[EP_SHA256_BYTES];
    ep_weight_cache_file file;
    ep_backend_weights *weights;
    ep_packed_view got, wanted;
    ep_error e;
    const ep_weight_cache_key key = key_of(expert);
    if (!ep_weight_cache_find(cache, &key, &file)) {
        return false;
    }
    const ep_err err = ep_weight_cache_read(cache, &file, &weights, &e);
    ep_weight_cache_forget(&file);
    if (err != EP_OK) {
        return false;
    }
    ep_backend_weights *plain = pack(expert, sha256);
    backend->ops->weights_export(backend, weights, &got);
    backend->ops->weights_export(backend, plain, &wanted);
    cr_assert_eq(got.body_bytes, wanted.body_bytes);
    cr_assert_arr_eq(got.body, wanted.body, wanted.body_bytes);
    cr_assert_arr_eq(file.sha256, sha256, sizeof(sha256));
    backend->ops->weights_unload(backend, weights);
    backend->ops->weights_unload(backend, plain);
    return true;
}

/* Path of the only file of the expert; false: there is none. */
static bool file_of(uint32_t expert, char out_path[EP_FIXTURE_PATH_BYTES + 256])
{
    char end[32];
    bool found = false;
    DIR *d = opendir(cache_dir);
    snprintf(end, sizeof(end), "-e%u.pack", expert);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        const size_t length = strlen(e->d_name);
        if (length > strlen(end) && strcmp(e->d_name + length - strlen(end), end) == 0) {
            snprintf(out_path, EP_FIXTURE_PATH_BYTES + 256, "%s/%s", cache_dir, e->d_name);
            found = true;
        }
    }
    closedir(d);
    return found;
}

static ep_weight_cache_stats stats(void)
{
    ep_weight_cache_stats s;
    ep_weight_cache_read_stats(cache, &s);
    return s;
}

Test(weight_cache, what_is_written_is_found_by_the_next_process)
{
    open_cache(0);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        cr_expect_not(has_expert(e));
        cr_expect(write_expert(e));
    }
    const uint64_t bytes = stats().bytes;
    ep_weight_cache_close(cache);
    open_cache(0);
    cr_expect_eq(stats().bytes, bytes, "counted anew");
    for (uint32_t e = 0; e < EXPERTS; e++) {
        cr_expect(has_expert(e));
    }
    cr_expect_eq(stats().read_total, EXPERTS);
    cr_expect_eq(stats().dropped_total, 0);
}

static const ep_backend_ops *plain_ops;

static ep_err
import_refused(ep_backend *base, const void *head, size_t head_bytes, size_t body_bytes,
               ep_err (*fill)(void *arg, void *body, size_t body_bytes, ep_error *out_error),
               void *arg, ep_backend_weights **out_weights, ep_error *out_error)
{
    (void)head, (void)head_bytes, (void)body_bytes, (void)fill, (void)arg, (void)out_weights;
    base->ops = plain_ops;
    return ep_error_set(out_error, EP_ERR_NO_MEMORY, "made up");
}

Test(weight_cache, a_file_for_which_memory_was_refused_is_read_again)
{
    ep_weight_cache_file file;
    ep_backend_weights *weights;
    ep_error e;
    open_cache(0);
    cr_assert(write_expert(0));
    const ep_weight_cache_key key = key_of(0);
    cr_assert(ep_weight_cache_find(cache, &key, &file));
    plain_ops = backend->ops;
    ep_backend_ops ops = *plain_ops;
    ops.weights_import = import_refused;
    backend->ops = &ops;
    cr_expect_eq(ep_weight_cache_read(cache, &file, &weights, &e), EP_ERR_NO_MEMORY);
    cr_expect_eq(stats().dropped_total, 0);
    ASSERT_OK(ep_weight_cache_read(cache, &file, &weights, &e), e);
    ep_weight_cache_forget(&file);
    backend->ops->weights_unload(backend, weights);
    cr_expect_eq(stats().read_total, 1);
    cr_expect(has_expert(0));
}

Test(weight_cache, another_numerics_id_or_touched_file_is_another_expert)
{
    open_cache(0);
    cr_expect(write_expert(2));
    ep_weight_cache_file file;
    ep_weight_cache_key key = key_of(2);
    key.numerics = "portable/bf16/rne/00000000";
    cr_expect_not(ep_weight_cache_find(cache, &key, &file));
    key = key_of(2);
    key.layer = 1;
    cr_expect_not(ep_weight_cache_find(cache, &key, &file));
    const struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    char path[EP_FIXTURE_PATH_BYTES + 32];
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    cr_assert_eq(utimensat(AT_FDCWD, path, times, 0), 0);
    key = key_of(2);
    cr_expect_not(ep_weight_cache_find(cache, &key, &file));
    cr_expect_eq(stats().dropped_total, 0, "they are only not asked for");
}

static const char *next_layout(ep_backend *base)
{
    (void)base;
    return "panel64-next";
}

/* A build that packs otherwise finds nothing of the one before, and packs anew beside it. */
Test(weight_cache, another_packed_layout_is_another_file)
{
    const ep_backend_ops *usual = backend->ops;
    ep_backend_ops ops = *usual;
    ep_weight_cache_file file;
    ops.packed_layout = next_layout;
    open_cache(0);
    cr_expect(write_expert(2));
    ep_weight_cache_close(cache);
    backend->ops = &ops;
    open_cache(0);
    const ep_weight_cache_key key = key_of(2);
    cr_expect_not(ep_weight_cache_find(cache, &key, &file));
    cr_expect(write_expert(2));
    cr_expect(has_expert(2));
    ep_weight_cache_close(cache);
    backend->ops = usual;
    open_cache(0);
    cr_expect(has_expert(2), "the one before is still there");
    cr_expect_eq(stats().dropped_total, 0);
}

/* Every kind of damage at every part: dropped once, written anew, right bits. */
Test(weight_cache, a_damaged_file_is_dropped_and_written_anew)
{
    static const off_t flips[] = {0, 8, 40, 100, 230, 300, 4096, 5000, -1};
    char path[EP_FIXTURE_PATH_BYTES + 256];
    uint64_t dropped = 0;
    open_cache(0);
    cr_expect(write_expert(1));
    for (size_t i = 0; i < sizeof(flips) / sizeof(flips[0]); i++) {
        struct stat st;
        uint8_t byte;
        cr_assert(file_of(1, path));
        const int fd = open(path, O_RDWR);
        cr_assert_eq(fstat(fd, &st), 0);
        const off_t at = flips[i] >= 0 ? flips[i] : st.st_size - 1;
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        byte ^= 0x10;
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
        close(fd);
        cr_expect_not(has_expert(1), "byte %ld", (long)at);
        cr_expect_not(file_of(1, path));
        cr_expect_eq(stats().dropped_total, ++dropped);
        cr_expect(write_expert(1));
        cr_expect(has_expert(1));
    }
    for (off_t size = 0; size < 9000; size += 700) {
        cr_assert(file_of(1, path));
        cr_assert_eq(truncate(path, size), 0);
        cr_expect_not(has_expert(1), "cut to %ld", (long)size);
        cr_expect_eq(stats().dropped_total, ++dropped);
        cr_expect(write_expert(1));
    }
    cr_expect(has_expert(1));
}

/* A closed cache of two files of equal size: expert 0 and, at `old`, one of another model. Returns
 * the bytes of each. */
static uint64_t leave_two_files(char *old, size_t size)
{
    open_cache(0);
    cr_expect(write_expert(0));
    const uint64_t each = stats().bytes;
    ep_weight_cache_close(cache);
    snprintf(old, size, "%s/0123456789abcdef-l0-e0.pack", cache_dir);
    const int fd = open(old, O_WRONLY | O_CREAT, 0600);
    cr_assert_eq(ftruncate(fd, (off_t)each), 0);
    close(fd);
    return each;
}

Test(weight_cache, the_limit_removes_other_models_first_and_then_stops)
{
    char old[EP_FIXTURE_PATH_BYTES + 64];
    const uint64_t each = leave_two_files(old, sizeof(old));
    open_cache(each * 3);
    cr_expect_eq(stats().bytes, each * 2);
    cr_expect(write_expert(1));
    cr_expect_eq(access(old, F_OK), 0);
    cr_expect(write_expert(2));
    cr_expect_neq(access(old, F_OK), 0, "it made room");
    cr_expect_not(write_expert(3));
    cr_expect_eq(stats().bytes, each * 3);
    for (uint32_t e = 0; e < 3; e++) {
        cr_expect(has_expert(e));
    }
}

static bool others_remove; /* each file just before we do */
static uint32_t removals;

/* In place of the C library's. */
int unlinkat(int dir_fd, const char *name, int flags)
{
    removals++;
    if (others_remove) {
        (void)syscall(SYS_unlinkat, dir_fd, name, flags);
    }
    return (int)syscall(SYS_unlinkat, dir_fd, name, flags);
}

Test(weight_cache, a_file_that_somebody_else_removed_made_room_too)
{
    char old[EP_FIXTURE_PATH_BYTES + 64];
    const uint64_t each = leave_two_files(old, sizeof(old));
    open_cache(each * 2);
    others_remove = true;
    cr_expect(write_expert(1));
    others_remove = false;
    cr_expect_neq(access(old, F_OK), 0);
    cr_expect_eq(stats().bytes, each * 2);
    cr_expect(has_expert(1));
}

/* of another process, that writes the same expert just before we name ours */
static ep_weight_cache *other;
static uint32_t renames;

/* In place of the C library's. */
int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    renames++;
    if (other != NULL) {
        ep_weight_cache *mine = cache;
        cache = other;
        other = NULL;
        cr_expect(write_expert(3));
        cache = mine;
    }
    return (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, 0);
}

/* Of the same number, too: in containers every service is process 1. */
Test(weight_cache, two_processes_write_the_same_expert)
{
    open_cache(0);
    ep_weight_cache *second = cache;
    open_cache(0);
    other = second;
    cr_expect(write_expert(3));
    cr_expect_null(other);
    cr_expect(has_expert(3));
    cr_expect(write_expert(4), "it has not given up");
    cr_expect_eq(stats().dropped_total, 0);
    ep_weight_cache_close(second);
}

static bool locks_writers_only;

/* In place of the C library's: network file systems lock no file that is open for reading only. */
int flock(int fd, int operation)
{
    if (locks_writers_only && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
        errno = EBADF;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}

/* What one that was killed left is removed at once; what one that lives is writing stays. */
static void expect_left_is_removed(void)
{
    char left[EP_FIXTURE_PATH_BYTES + 32], written[EP_FIXTURE_PATH_BYTES + 32];
    snprintf(left, sizeof(left), "%s/.tmp-0123456789abcdef", cache_dir);
    snprintf(written, sizeof(written), "%s/.tmp-123456789abcdef0", cache_dir);
    close(open(left, O_WRONLY | O_CREAT, 0600));
    const int fd = open(written, O_WRONLY | O_CREAT, 0600);
    cr_assert_eq(flock(fd, LOCK_EX), 0);
    open_cache(0);
    cr_expect_neq(access(left, F_OK), 0);
    cr_expect_eq(access(written, F_OK), 0);
    close(fd);
}

Test(weight_cache, half_written_files_of_the_dead_are_removed)
{
    expect_left_is_removed();
}

Test(weight_cache, half_written_files_of_the_dead_are_removed_from_network_file_systems_too)
{
    locks_writers_only = true;
    expect_left_is_removed();
    cr_expect(write_expert(1));
    cr_expect(has_expert(1));
}

/* Two find it damaged at once. */
Test(weight_cache, a_damaged_file_that_somebody_else_removed_is_gone)
{
    char path[EP_FIXTURE_PATH_BYTES + 256];
    open_cache(0);
    cr_expect(write_expert(1));
    cr_assert(file_of(1, path));
    cr_assert_eq(truncate(path, 4500), 0);
    others_remove = true;
    cr_expect_not(has_expert(1));
    others_remove = false;
    cr_expect_eq(stats().dropped_total, 1);
    cr_expect(write_expert(1));
    cr_expect(has_expert(1), "the one that was written since is read");
}

/* A pipe that nobody writes to would keep its reader for ever. */
Test(weight_cache, what_is_no_file_is_dropped)
{
    char path[EP_FIXTURE_PATH_BYTES + 256];
    open_cache(0);
    cr_expect(write_expert(1));
    cr_assert(file_of(1, path));
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkfifo(path, 0600), 0);
    cr_expect_not(has_expert(1));
    cr_expect_neq(access(path, F_OK), 0);
    cr_expect(write_expert(1));
    cr_expect(has_expert(1));
}

static uint32_t count_temporary(void)
{
    uint32_t count = 0;
    DIR *d = opendir(cache_dir);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        count += strncmp(e->d_name, ".tmp-", 5) == 0;
    }
    closedir(d);
    return count;
}

/* Neither can be removed nor written over. */
Test(weight_cache, a_directory_in_the_place_of_a_file_costs_that_expert_only)
{
    char paths[2][EP_FIXTURE_PATH_BYTES + 256];
    open_cache(0);
    for (uint32_t e = 0; e < 2; e++) {
        cr_expect(write_expert(e));
        cr_assert(file_of(e, paths[e]));
        cr_assert_eq(unlink(paths[e]), 0);
        cr_assert_eq(mkdir(paths[e], 0700), 0);
    }
    cr_expect_not(has_expert(0));
    renames = 0;
    for (uint32_t round = 0; round < 2; round++) { /* that 1 is one shows when it is written */
        cr_expect(write_expert(0), "nobody gives up");
        cr_expect(write_expert(1), "nobody gives up");
        cr_expect_not(has_expert(0));
        cr_expect_not(has_expert(1));
    }
    cr_expect_eq(renames, 1, "what shall not be is not written again");
    cr_expect_eq(count_temporary(), 0);
    cr_expect(write_expert(2));
    cr_expect(has_expert(2));
    cr_expect_eq(stats().dropped_total, 0);
    cr_expect_eq(stats().written_total, 3);
}

/* Only files of other models make room. */
Test(weight_cache, a_directory_named_as_a_file_does_not_keep_others_from_making_room)
{
    char old[EP_FIXTURE_PATH_BYTES + 64], path[EP_FIXTURE_PATH_BYTES + 64];
    const uint64_t each = leave_two_files(old, sizeof(old));
    const struct timespec times[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
    snprintf(path, sizeof(path), "%s/0123456789abcdef-l0-e1.pack", cache_dir);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_assert_eq(utimensat(AT_FDCWD, path, times, 0), 0); /* older than the other */
    open_cache(each * 2);
    cr_expect(write_expert(1));
    cr_expect_neq(access(old, F_OK), 0);
    cr_expect(has_expert(1));
}

Test(weight_cache, a_directory_that_cannot_be_used_is_no_failure)
{
    ep_error e;
    char path[EP_FIXTURE_PATH_BYTES + 32];
    snprintf(path, sizeof(path), "%s/model.safetensors/cache", dir);
    cr_expect_eq(ep_weight_cache_open(path, 0, backend, &cache, &e), EP_OK);
    cr_expect_null(cache);
    open_cache(0);
    cr_expect(write_expert(0));
    ep_fixture_remove(cache_dir); /* gone under us */
    cr_expect_not(write_expert(1));
    cr_expect_not(write_expert(2));
    cr_expect_not(has_expert(0));
    cr_assert_eq(mkdir(cache_dir, 0700), 0);
}

/* A packed file of another's hand would change results: neither its directory nor the file itself
 * is believed. */
Test(weight_cache, what_others_may_write_is_not_believed)
{
    ep_error e;
    char path[EP_FIXTURE_PATH_BYTES + 256];
    open_cache(0);
    cr_expect(write_expert(1) && write_expert(2));
    cr_assert(file_of(1, path));
    cr_assert_eq(chmod(path, 0622), 0);
    cr_expect_not(has_expert(1));
    cr_expect_neq(access(path, F_OK), 0, "it is removed");
    cr_assert(file_of(2, path));
    if (geteuid() == 0) {
        cr_assert_eq(chown(path, 12345, 0), 0);
        cr_expect_not(has_expert(2));
    }
    ep_weight_cache_close(cache);
    cr_assert_eq(chmod(cache_dir, 0770), 0);
    EXPECT_FAILS(ep_weight_cache_open(cache_dir, 0, backend, &cache, &e),
                 EP_ERR_FAILED_PRECONDITION, e, "mode 0770");
    cr_expect_null(cache);
    cr_assert_eq(chmod(cache_dir, 0755), 0);
    if (geteuid() == 0) {
        cr_assert_eq(chown(cache_dir, 12345, 0), 0);
        EXPECT_FAILS(ep_weight_cache_open(cache_dir, 0, backend, &cache, &e),
                     EP_ERR_FAILED_PRECONDITION, e, "user 12345");
        cr_assert_eq(chown(cache_dir, 0, 0), 0);
    }
    open_cache(0);
}

/* The cache's directory on a file system of its own, seen by this process alone. False: the system
 * does not allow it. */
static bool mount_small(const char *options)
{
    return (geteuid() == 0 ? unshare(CLONE_NEWNS) : unshare(CLONE_NEWUSER | CLONE_NEWNS)) == 0 &&
           mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("none", cache_dir, "tmpfs", 0, options) == 0;
}

/* What fits is kept and read; the rest is not written, and said so once; nothing half written is
 * left. */
static void expect_full_after(uint32_t fits)
{
    uint32_t written = 0;
    while (written < EXPERTS && write_expert(written)) {
        written++;
    }
    cr_expect_leq(written, fits);
    cr_expect_lt(written, EXPERTS);
    cr_expect_not(write_expert(EXPERTS - 1), "nor is it tried again");
    cr_expect_eq(stats().written_total, written);
    cr_expect_eq(count_temporary(), 0);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        cr_expect_eq(has_expert(e), e < written);
    }
    cr_expect_eq(stats().dropped_total, 0);
}

Test(weight_cache, a_full_disk_costs_the_files_that_do_not_fit)
{
    if (!mount_small("mode=0700,size=24k")) { /* six pages; an expert takes two */
        cr_skip_test("mounting is not allowed here");
    }
    open_cache(0);
    expect_full_after(3);
    umount(cache_dir);
}

/* The same where a process may not write more: it needs no rights to be tried. */
Test(weight_cache, a_limit_on_file_sizes_is_as_a_full_disk)
{
    const struct rlimit small = {.rlim_cur = 5000, .rlim_max = 5000};
    open_cache(0);
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    expect_full_after(0);
}

Test(weight_cache, a_directory_that_cannot_be_written_is_still_read)
{
    char path[EP_FIXTURE_PATH_BYTES + 256];
    const bool is_mounted = mount_small("mode=0700,size=1m");
    if (!is_mounted && geteuid() == 0) {
        cr_skip_test("root writes where nobody may, and mounting is not allowed here");
    }
    open_cache(0);
    cr_expect(write_expert(0));
    cr_expect(write_expert(1));
    cr_assert(file_of(1, path));
    cr_assert_eq(truncate(path, 4500), 0);
    ep_weight_cache_close(cache);
    cr_assert_eq(is_mounted ? mount("none", cache_dir, NULL, MS_REMOUNT | MS_RDONLY, NULL)
                            : chmod(cache_dir, 0500),
                 0);
    open_cache(0);
    cr_expect(has_expert(0));
    removals = 0;
    cr_expect_not(has_expert(1), "it is damaged");
    cr_expect_not(has_expert(1), "and stays so");
    cr_expect_eq(removals, 1, "it is not read again only to be found damaged");
    cr_expect_eq(stats().dropped_total, 0, "it cannot be removed");
    cr_expect_not(write_expert(2));
    cr_expect_not(has_expert(2));
    cr_expect(has_expert(0));
    ep_weight_cache_close(cache);
    cache = NULL;
    cr_assert_eq(is_mounted ? umount2(cache_dir, MNT_DETACH) : chmod(cache_dir, 0700), 0);
}
