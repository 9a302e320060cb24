/* SPDX-License-Identifier: Apache-2.0 */
/* Damaged files as files: lengths, truncation at every byte, every bit of the header flipped,
 * changes after open. */
#include "unit/model/model_test.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "model/safetensors.h"
#include "model/safetensors_writer.h"

static ep_safetensors *file;
static ep_error error;

static void close_file(void)
{
    ep_safetensors_close(file);
    file = NULL;
}

static void close_and_remove(void)
{
    close_file();
    remove_test_dir();
}

TestSuite(safetensors_damage, .init = make_test_dir, .fini = close_and_remove);

#define NAME "d.safetensors"

static uint8_t values[48];

static void write_small(void)
{
    for (size_t i = 0; i < sizeof(values); i++) {
        values[i] = (uint8_t)(i * 37 + 11);
    }
    ep_named_tensor tensors[] = {
        {"alpha", ep_tensor_2d(values, EP_DTYPE_BF16, 2, 4)},
        {"beta", ep_tensor_1d(values + 16, EP_DTYPE_F32, 4)},
        {"gamma", ep_tensor_1d(values + 32, EP_DTYPE_U8, 16)},
    };
    ep_metadata_pair metadata = {"format", "pt"};
    ASSERT_OK(ep_safetensors_write(test_path(NAME), tensors, 3, &metadata, 1, &error), error);
}

static ep_err open_small(void)
{
    return ep_safetensors_open_path(test_path(NAME), &file, &error);
}

/* A tensor of the same name, type and shape as before must have the same bytes. */
static void expect_same(const char *name, ep_dtype dtype, uint32_t rank, uint64_t rows,
                        const uint8_t *bytes, size_t count, const char *what, size_t at)
{
    const ep_safetensors_tensor *t = ep_safetensors_find(file, name);
    uint8_t read[64];
    if (t == NULL || t->dtype != dtype || t->rank != rank || t->shape[0] != rows ||
        ep_safetensors_tensor_bytes(t) != count) {
        return;
    }
    ASSERT_OK(ep_safetensors_read(file, t, 0, read, count, &error), error);
    cr_assert(memcmp(read, bytes, count) == 0, "%s %zu: %s has other bytes", what, at, name);
}

Test(safetensors_damage, a_flipped_bit_in_the_header_is_an_error_or_harmless)
{
    size_t count = 0;
    size_t refused = 0;
    write_small();
    char *bytes = read_raw(NAME, &count);
    size_t header = 8 + (unsigned char)bytes[0] + 256u * (unsigned char)bytes[1];
    for (size_t i = 0; i < header * 8; i++) {
        bytes[i / 8] ^= (char)(1 << (i % 8));
        write_raw(NAME, bytes, count);
        bytes[i / 8] ^= (char)(1 << (i % 8));
        ep_err err = open_small();
        if (err != EP_OK) {
            cr_assert_eq(err, EP_ERR_BAD_FILE, "bit %zu: %s", i, error.text);
            cr_assert(strstr(error.text, "/" NAME ": ") != NULL, "bit %zu: %s", i, error.text);
            refused++;
            continue;
        }
        expect_same("alpha", EP_DTYPE_BF16, 2, 2, values, 16, "bit", i);
        expect_same("beta", EP_DTYPE_F32, 1, 4, values + 16, 16, "bit", i);
        expect_same("gamma", EP_DTYPE_U8, 1, 16, values + 32, 16, "bit", i);
        close_file();
    }
    free(bytes);
    cr_assert_gt(refused, header * 8 / 2, "only %zu of %zu flips were refused", refused,
                 header * 8);
}

Test(safetensors_damage, every_header_byte_replaced_by_every_kind_of_byte)
{
    static const unsigned char others[] = {0x00, 0xff, '"', '{', '}', '[',  ']', ',',
                                           ':',  '0',  '9', '-', 'e', '\\', ' ', '\n'};
    size_t count = 0;
    write_small();
    char *bytes = read_raw(NAME, &count);
    size_t header = 8 + (unsigned char)bytes[0] + 256u * (unsigned char)bytes[1];
    for (size_t i = 0; i < header; i++) {
        char was = bytes[i];
        for (size_t k = 0; k < sizeof(others); k++) {
            bytes[i] = (char)others[k];
            write_raw(NAME, bytes, count);
            if (open_small() == EP_OK) {
                expect_same("alpha", EP_DTYPE_BF16, 2, 2, values, 16, "byte", i);
                expect_same("beta", EP_DTYPE_F32, 1, 4, values + 16, 16, "byte", i);
                expect_same("gamma", EP_DTYPE_U8, 1, 16, values + 32, 16, "byte", i);
                close_file();
            }
        }
        bytes[i] = was;
    }
    free(bytes);
}

Test(safetensors_damage, a_file_cut_anywhere_is_refused)
{
    size_t count = 0;
    write_small();
    char *bytes = read_raw(NAME, &count);
    for (size_t keep = 0; keep < count; keep++) {
        write_raw(NAME, bytes, keep);
        cr_assert_eq(open_small(), EP_ERR_BAD_FILE, "cut at %zu was accepted", keep);
        ASSERT_TEXT(error, "/" NAME ": ");
    }
    char *longer = calloc(1, count + 1);
    memcpy(longer, bytes, count);
    write_raw(NAME, longer, count + 1);
    ASSERT_FAILS(open_small(), EP_ERR_BAD_FILE, error,
                 "its tensors end at 48, the data has 49 bytes");
    free(longer);
    free(bytes);
}

static const struct {
    uint8_t bytes[16];
    size_t count;
    const char *text;
} length_cases[] = {
    {{0}, 0, "has 0 bytes, allowed at least 8"},
    {{2, 0, 0, 0, 0, 0, 0}, 7, "has 7 bytes, allowed at least 8"},
    {{0}, 8, "header length 0, allowed 2..0 (the file has 8 bytes)"},
    {{1, 0, 0, 0, 0, 0, 0, 0, '{'}, 9, "header length 1, allowed 2..1"},
    {{3, 0, 0, 0, 0, 0, 0, 0, '{', '}'},
     10,
     "header length 3, allowed 2..2 (the file has 10 bytes)"},
    {{1, 0, 0, 1, 0, 0, 0, 0, '{', '}'},
     10,
     "header length 16777217, allowed 2..16777216 (the limit)"},
    {{0, 0, 0, 0, 0, 0, 0, 0x80, '{', '}'},
     10,
     "header length 9223372036854775808, allowed 2..16777216"},
    {{255, 255, 255, 255, 255, 255, 255, 255, '{', '}'},
     10,
     "header length 18446744073709551615, allowed 2..16777216"},
    {{248, 255, 255, 255, 255, 255, 255, 255, '{', '}'},
     10,
     "header length 18446744073709551608, allowed 2..16777216"},
};

Test(safetensors_damage, header_lengths)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(length_cases); i++) {
        write_raw(NAME, length_cases[i].bytes, length_cases[i].count);
        ASSERT_FAILS(open_small(), EP_ERR_BAD_FILE, error, length_cases[i].text);
    }
}

Test(safetensors_damage, a_file_cut_after_open_gives_an_error_not_a_signal)
{
    uint8_t read[16];
    write_small();
    ASSERT_OK(open_small(), error);
    const ep_safetensors_tensor *t = ep_safetensors_find(file, "gamma");
    cr_assert_eq(truncate(test_path(NAME), 20), 0);
    ASSERT_FAILS(ep_safetensors_read(file, t, 0, read, sizeof(read), &error), EP_ERR_BAD_FILE,
                 error, NAME ": has 20 bytes, had ");
}

Test(safetensors_damage, a_file_rewritten_after_open_is_noticed)
{
    uint8_t read[16];
    struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    write_small();
    ASSERT_OK(open_small(), error);
    cr_assert_eq(utimensat(AT_FDCWD, test_path(NAME), times, 0), 0);
    ASSERT_FAILS(ep_safetensors_read(file, ep_safetensors_at(file, 0), 0, read, 4, &error),
                 EP_ERR_BAD_FILE, error, NAME ": was modified after it was opened");
}

#define LARGE_BYTES ((size_t)1 << 20)
#define SAMPLE_STEP ((LARGE_BYTES - 4096) / 15)
#define KNOWN_BYTES (4 * SAMPLE_STEP + 4096) /* up to the end of the fifth sample */

static uint8_t large[LARGE_BYTES];
static const ep_safetensors_tensor *large_tensor;

/* One tensor of LARGE_BYTES; returns where it begins in the file. */
static off_t open_large(void)
{
    struct stat st;
    for (size_t i = 0; i < LARGE_BYTES; i++) {
        large[i] = (uint8_t)(i * 37 + i / 251);
    }
    const ep_named_tensor tensor = {"large", ep_tensor_1d(large, EP_DTYPE_U8, LARGE_BYTES)};
    ASSERT_OK(ep_safetensors_write(test_path(NAME), &tensor, 1, NULL, 0, &error), error);
    ASSERT_OK(open_small(), error);
    large_tensor = ep_safetensors_find(file, "large");
    cr_assert_eq(stat(test_path(NAME), &st), 0);
    return st.st_size - (off_t)LARGE_BYTES;
}

static void append_other_bytes(size_t bytes)
{
    static const uint8_t other[64 << 10];
    const int fd = open(test_path(NAME), O_WRONLY | O_APPEND);
    cr_assert_eq(write(fd, other, bytes), (ssize_t)bytes);
    close(fd);
}

static ep_err read_large(size_t offset, size_t bytes)
{
    static uint8_t read[LARGE_BYTES];
    const ep_err err = ep_safetensors_read(file, large_tensor, offset, read, bytes, &error);
    cr_expect(err != EP_OK || memcmp(read, large + offset, bytes) == 0, "other bytes at %zu",
              offset);
    return err;
}

Test(safetensors_damage, of_a_cut_file_only_what_lies_before_a_sample_is_read)
{
    const off_t begin = open_large();
    cr_assert_eq(truncate(test_path(NAME), begin + (off_t)KNOWN_BYTES + 9000), 0);
    cr_expect_eq(read_large(0, KNOWN_BYTES), EP_OK);
    cr_expect_eq(read_large(KNOWN_BYTES - 100, 100), EP_OK);
    cr_expect_eq(read_large(KNOWN_BYTES - 100, 101), EP_ERR_BAD_FILE);
    cr_expect_eq(read_large(KNOWN_BYTES + 1000, 1000), EP_ERR_BAD_FILE, "nothing vouches for it");
}

Test(safetensors_damage, bytes_that_another_writes_into_a_cut_file_are_not_read)
{
    const off_t begin = open_large();
    cr_assert_eq(truncate(test_path(NAME), begin + (off_t)KNOWN_BYTES + 1000), 0);
    append_other_bytes(50000); /* between two samples */
    cr_expect_eq(read_large(KNOWN_BYTES + 20000, 1000), EP_ERR_BAD_FILE);
    cr_expect_eq(read_large(0, 1000), EP_OK, "as it was at open");
}

Test(safetensors_damage, a_cut_file_that_changes_again_is_refused_for_good)
{
    struct stat st;
    const off_t begin = open_large();
    cr_assert_eq(truncate(test_path(NAME), begin + (off_t)KNOWN_BYTES + 1000), 0);
    cr_expect_eq(read_large(0, 1000), EP_OK);
    cr_assert_eq(stat(test_path(NAME), &st), 0);
    append_other_bytes(1);
    cr_expect_eq(read_large(0, 1000), EP_ERR_BAD_FILE);
    const struct timespec times[2] = {st.st_atim, st.st_mtim};
    cr_assert_eq(truncate(test_path(NAME), st.st_size), 0);
    cr_assert_eq(utimensat(AT_FDCWD, test_path(NAME), times, 0), 0);
    cr_expect_eq(read_large(0, 1000), EP_ERR_BAD_FILE, "whatever it looks like");
}

/* As cp -p does, between files that were unpacked with one fixed time. */
Test(safetensors_damage, other_bytes_under_the_old_time_are_not_read)
{
    struct stat st;
    const off_t begin = open_large();
    cr_assert_eq(stat(test_path(NAME), &st), 0);
    const struct timespec times[2] = {st.st_atim, st.st_mtim};
    cr_assert_eq(chmod(test_path(NAME), 0400), 0);
    cr_expect_eq(read_large(0, LARGE_BYTES), EP_OK, "only its rights changed");
    cr_assert_eq(chmod(test_path(NAME), 0600), 0);
    const int fd = open(test_path(NAME), O_WRONLY);
    cr_assert_eq(pwrite(fd, "other bytes", 11, begin + (off_t)(3 * SAMPLE_STEP)), 11);
    close(fd);
    cr_assert_eq(utimensat(AT_FDCWD, test_path(NAME), times, 0), 0);
    cr_expect_eq(read_large(100, 1000), EP_ERR_BAD_FILE);
    cr_expect_eq(read_large(100, 1000), EP_ERR_BAD_FILE, "and stays so");
    cr_assert_eq(unlink(test_path(NAME)), 0);
    close_file();
    (void)open_large();
    cr_assert_eq(unlink(test_path(NAME)), 0);
    cr_expect_eq(read_large(0, LARGE_BYTES), EP_OK, "another took its name");
}

static bool fails_next;
static uint32_t reads;

/* What somebody else does to the file just after its bytes were read, before anybody looks at it
 * again. */
static void (*meanwhile)(void);

ep_err __real_ep_model_file_read(const ep_model_file *of, uint64_t offset, void *out, size_t bytes,
                                 ep_error *out_error);
ep_err __wrap_ep_model_file_read(const ep_model_file *of, uint64_t offset, void *out, size_t bytes,
                                 ep_error *out_error);

ep_err __wrap_ep_model_file_read(const ep_model_file *of, uint64_t offset, void *out, size_t bytes,
                                 ep_error *out_error)
{
    reads++;
    if (fails_next) {
        fails_next = false;
        return ep_error_set(out_error, EP_ERR_IO, "made up");
    }
    const ep_err err = __real_ep_model_file_read(of, offset, out, bytes, out_error);
    void (*act)(void) = meanwhile;
    meanwhile = NULL;
    if (act != NULL) {
        act();
    }
    return err;
}

/* Only what was seen refuses a file for good. */
Test(safetensors_damage, an_error_while_a_file_is_looked_at_again_may_pass)
{
    const off_t begin = open_large();
    cr_assert_eq(chmod(test_path(NAME), 0400), 0);
    fails_next = true;
    cr_expect_eq(read_large(0, 1000), EP_ERR_IO);
    cr_expect_eq(read_large(0, 1000), EP_OK);
    reads = 0;
    cr_expect_eq(read_large(0, 1000), EP_OK);
    cr_expect_eq(reads, 1, "it was looked at already");
    cr_assert_eq(truncate(test_path(NAME), begin + (off_t)KNOWN_BYTES + 9000), 0);
    fails_next = true;
    cr_expect_eq(read_large(0, 1000), EP_ERR_IO);
    cr_expect_eq(read_large(0, 1000), EP_OK);
}

static off_t cut_to;

static void overwrite(void)
{
    const struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    const int fd = open(test_path(NAME), O_WRONLY);
    cr_assert_eq(pwrite(fd, "other bytes", 11, cut_to), 11);
    close(fd);
    cr_assert_eq(utimensat(AT_FDCWD, test_path(NAME), times, 0), 0);
}

static void cut(void)
{
    cr_assert_eq(truncate(test_path(NAME), cut_to), 0);
}

Test(safetensors_damage, a_file_overwritten_while_it_is_read_is_refused)
{
    cut_to = open_large() + 2000;
    meanwhile = overwrite;
    cr_expect_eq(read_large(0, 1000), EP_ERR_BAD_FILE,
                 "whether these bytes are the old ones, nobody can tell");
    cr_expect_null(meanwhile);
}

Test(safetensors_damage, of_a_file_cut_while_it_is_read_only_what_is_vouched_for_is_taken)
{
    cut_to = open_large() + (off_t)KNOWN_BYTES + 9000;
    meanwhile = cut;
    cr_expect_eq(read_large(KNOWN_BYTES, 1000), EP_ERR_BAD_FILE, "it was whole when it was read");
    cr_expect_eq(read_large(KNOWN_BYTES - 1000, 1000), EP_OK);
}

Test(safetensors_damage, only_regular_files_are_opened)
{
    ep_model_dir dir;
    ASSERT_OK(ep_model_dir_open(test_dir, &dir, &error), error);
    mkdir(test_path("dir.safetensors"), 0700);
    cr_assert_eq(mkfifo(test_path("pipe.safetensors"), 0600), 0);
    cr_assert_eq(symlink("/dev/zero", test_path("zero.safetensors")), 0);
    cr_assert_eq(symlink("pipe.safetensors", test_path("linked-pipe.safetensors")), 0);
    cr_assert_eq(symlink("loop.safetensors", test_path("loop.safetensors")), 0);
    static const struct {
        const char *name;
        ep_err err;
        const char *text;
    } cases[] = {
        {"dir.safetensors", EP_ERR_BAD_FILE,
         "dir.safetensors: is a directory, allowed: a regular file"},
        {"pipe.safetensors", EP_ERR_BAD_FILE,
         "pipe.safetensors: is a pipe, allowed: a regular file"},
        {"zero.safetensors", EP_ERR_BAD_FILE,
         "zero.safetensors: is a symbolic link to /dev/zero, allowed: a target below "},
        {"linked-pipe.safetensors", EP_ERR_BAD_FILE,
         "linked-pipe.safetensors: is a pipe, allowed: a regular file"},
        {"loop.safetensors", EP_ERR_BAD_FILE, "loop.safetensors: cannot follow the symbolic link"},
        {"none.safetensors", EP_ERR_NOT_FOUND, "none.safetensors: there is no such file in "},
    };
    for (size_t i = 0; i < EP_ARRAY_COUNT(cases); i++) {
        cr_expect_eq(ep_safetensors_open(&dir, cases[i].name, &file, &error), cases[i].err, "%s",
                     error.text);
        ASSERT_TEXT(error, cases[i].text);
    }
    ASSERT_FAILS(ep_safetensors_open_path(test_path("pipe.safetensors"), &file, &error),
                 EP_ERR_BAD_FILE, error, "is a pipe, allowed: a regular file");
    ep_model_dir_close(&dir);
}
