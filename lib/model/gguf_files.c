/* SPDX-License-Identifier: Apache-2.0 */
/* Finds a directory's files of a GGUF model: NAME.gguf, or NAME-00001-of-0000N.gguf up to N. */
#include "model/gguf.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/json_reader.h"
#include "model/mirror.h"
#include "model/model_config.h"

#define END ".gguf"
#define PARTS_MAX 10000u
#define PART "-00001-of-00001" END
#define DIGITS 5

static bool ends_with(const char *name, const char *end)
{
    const size_t length = strlen(name);
    return length > strlen(end) && strcmp(name + length - strlen(end), end) == 0;
}

static bool take_digits(const char *at, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < DIGITS; i++) {
        if (at[i] < '0' || at[i] > '9') {
            return false;
        }
        *out = 10 * *out + (uint32_t)(at[i] - '0');
    }
    return true;
}

/* NAME-<part>-of-<count>.gguf; any other name is a single file. */
static void read_part(const char *name, uint32_t *out_part, uint32_t *out_count)
{
    const size_t length = strlen(name);
    const char *at = length > strlen(PART) ? name + length - strlen(PART) : name;
    const bool is_part = length > strlen(PART) && at[0] == '-' && take_digits(at + 1, out_part) &&
                         memcmp(at + 6, "-of-", 4) == 0 && take_digits(at + 10, out_count) &&
                         *out_count > 0 && *out_count < PARTS_MAX;
    if (!is_part) {
        *out_part = 1;
        *out_count = 1;
    }
}

void ep_gguf_files_name(const ep_gguf_files *files, uint32_t index,
                        char out_name[EP_MODEL_FILE_NAME_BYTES])
{
    if (files->count < 2) {
        memcpy(out_name, files->first, sizeof(files->first));
        return;
    }
    const int stem = (int)(strlen(files->first) - strlen(PART));
    snprintf(out_name, EP_MODEL_FILE_NAME_BYTES, "%.*s-%05u-of-%05u" END, stem, files->first,
             index + 1, files->count);
}

/* A file's keys name its part and the number of parts. A single file has none; a merged one has 0
 * parts. */
ep_err ep_gguf_files_check(const ep_gguf_files *files, uint32_t index, const json_t *keys,
                           ep_error *out_error)
{
    const struct {
        const char *key;
        json_int_t wanted;
    } numbers[] = {{"split.count", files->count}, {"split.no", index}};
    const json_t *count = json_object_get(keys, "split.count");
    const bool is_alone =
        count == NULL || (json_is_integer(count) && json_integer_value(count) == 0);
    char name[EP_MODEL_FILE_NAME_BYTES];
    char text[EP_JSON_TEXT_BYTES];
    ep_gguf_files_name(files, index, name);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]) && !is_alone; i++) {
        const json_t *value = json_object_get(keys, numbers[i].key);
        if (!json_is_integer(value) || json_integer_value(value) != numbers[i].wanted) {
            return ep_error_set(
                out_error, EP_ERR_BAD_FILE,
                "%s: %s is %s, allowed %lld: parts are named NAME-00001-of-0000N" END " and so on",
                name, numbers[i].key, value == NULL ? "missing" : ep_json_describe(value, text),
                (long long)numbers[i].wanted);
        }
    }
    return EP_OK;
}

static ep_err take_file(const char *name, ep_gguf_files *out_files, ep_error *out_error)
{
    uint32_t part = 0;
    ep_gguf_files files = {.count = 0};
    read_part(name, &part, &files.count);
    if (part != 1) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%.200s: is part %u of %u, allowed: the first part or its directory",
                            name, part, files.count);
    }
    if (!ep_model_file_name_ok(name)) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%.200s: is no name this build reads, allowed 1 to %zu printable ASCII "
                            "characters: rename the file",
                            name, sizeof(files.first) - 1);
    }
    memcpy(files.first, name, strlen(name) + 1);
    *out_files = files;
    return EP_OK;
}

static ep_err take_part(const ep_model_dir *dir, const char *name, ep_gguf_files *files,
                        ep_error *out_error)
{
    uint32_t part = 0, count = 0;
    if (!ends_with(name, END)) {
        return EP_OK;
    }
    read_part(name, &part, &count);
    if (part == 1 && files->count > 0) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%.200s: has %.100s and %.100s, allowed one GGUF model: name the file",
                            dir->path, files->first, name);
    }
    return part == 1 ? take_file(name, files, out_error) : EP_OK;
}

/* Finds the only model of a directory; if there is none, *files is unchanged. */
static ep_err scan(const ep_model_dir *dir, ep_gguf_files *files, ep_error *out_error)
{
    ep_err err = EP_OK;
    if (dir->mirror != NULL) {
        const ep_mirror_entry *file;
        for (size_t i = 0; err == EP_OK && (file = ep_mirror_entry_at(dir->mirror, i)) != NULL;
             i++) {
            err = take_part(dir, file->name, files, out_error);
        }
        return err;
    }
    const int fd = dup(dir->fd);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (list == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        return ep_error_set(out_error, EP_ERR_IO, "%.300s: cannot be listed", dir->path);
    }
    rewinddir(list);
    const struct dirent *entry;
    while (err == EP_OK && (entry = readdir(list)) != NULL) {
        err = take_part(dir, entry->d_name, files, out_error);
    }
    closedir(list);
    return err;
}

ep_err ep_gguf_files_find_in(const ep_model_dir *dir, ep_gguf_files *files, ep_error *out_error)
{
    ep_model_file config;
    ep_error ignored;
    if (ep_model_file_open(dir, EP_MODEL_CONFIG_NAME, &config, &ignored) == EP_OK) {
        ep_model_file_close(&config);
        return EP_OK;
    }
    return ignored.code == EP_ERR_NOT_FOUND ? scan(dir, files, out_error) : EP_OK;
}

ep_err ep_gguf_files_find(const char *path, ep_model_dir *out_dir, ep_gguf_files *out_files,
                          ep_error *out_error)
{
    ep_gguf_files files = {.count = 0};
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    if (!ends_with(name, END)) {
        ep_err err = ep_model_dir_open(path, out_dir, out_error);
        if (err == EP_OK) {
            err = ep_gguf_files_find_in(out_dir, &files, out_error);
            if (err != EP_OK) {
                ep_model_dir_close(out_dir);
            }
        }
        *out_files = files;
        return err;
    }
    char *folder =
        slash == NULL ? strdup(".") : strndup(path, slash == path ? 1 : (size_t)(slash - path));
    if (folder == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: allocation failed", path);
    }
    ep_err err = take_file(name, out_files, out_error);
    err = err == EP_OK ? ep_model_dir_open(folder, out_dir, out_error) : err;
    free(folder);
    return err;
}
