/* SPDX-License-Identifier: Apache-2.0 */
/* A safetensors file. Its frame is checked here, its header in safetensors_header.c. Reads go
 * straight to the caller's memory. */
#include "model/safetensors.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "base/check.h"
#include "model/gguf.h"

#define LENGTH_BYTES 8
/* Samples of the data that go into a file's identity, since fine-tunes of a model have equal
 * headers. */
#define SAMPLES 16u
#define SAMPLE_BYTES 4096u
#define SAMPLE_DIGEST_BYTES 16

/* What is known about the file since it was opened. */
typedef struct seen_state {
    /* guards the fields below; held during fstat, so that an old result is no change */
    pthread_mutex_t lock;
    bool is_refused;
    /* ctime, which nobody can set. It also changes with names and permissions, so a change of it
     * alone only makes us compare the samples. */
    struct timespec changed;
    /* The first state in which the file was shorter. Only that state is read: a file that changes
     * again is being written. */
    bool is_cut;
    uint64_t bytes;
    struct timespec modified;
} seen_state;

struct ep_safetensors {
    ep_model_file file;
    seen_state *seen;    /* the only part that readers change */
    uint64_t data_begin; /* offset in the file */
    ep_safetensors_header header;
    json_t *keys; /* for GGUF */
    uint8_t identity_digest[EP_SAFETENSORS_DIGEST_BYTES];
    uint8_t head_digest[SAMPLE_DIGEST_BYTES]; /* of the first bytes of the file */
    uint8_t sample_digests[SAMPLES][SAMPLE_DIGEST_BYTES];
};

static ep_err read_header_length(const ep_model_file *file, size_t *out_bytes, ep_error *out_error)
{
    uint8_t raw[LENGTH_BYTES];
    uint64_t length = 0;
    if (file->bytes < LENGTH_BYTES) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: has %" PRIu64 " bytes, allowed at least %d", file->name,
                            file->bytes, LENGTH_BYTES);
    }
    ep_err err = ep_model_file_read(file, 0, raw, sizeof(raw), out_error);
    if (err != EP_OK) {
        return err;
    }
    for (int i = LENGTH_BYTES; i-- > 0;) {
        length = length << 8 | raw[i];
    }
    uint64_t most = file->bytes - LENGTH_BYTES;
    if (length > EP_SAFETENSORS_HEADER_BYTES_MAX) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: is no safetensors file: header length %" PRIu64
                            ", allowed 2..%zu (the limit)",
                            file->name, length, EP_SAFETENSORS_HEADER_BYTES_MAX);
    }
    if (length < 2 || length > most) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: is cut short, or no safetensors file: header length %" PRIu64
                            ", allowed 2..%" PRIu64 " (the file has %" PRIu64 " bytes)",
                            file->name, length, most, file->bytes);
    }
    *out_bytes = (size_t)length;
    return EP_OK;
}

/* The offset of sample i of the data in the file; returns its size. */
static size_t place_sample(const ep_safetensors *self, uint32_t i, uint64_t *out_offset)
{
    const uint64_t data_bytes = self->file.bytes - self->data_begin;
    const size_t piece = data_bytes < SAMPLE_BYTES ? (size_t)data_bytes : SAMPLE_BYTES;
    *out_offset = self->data_begin + (data_bytes - piece) / (SAMPLES - 1) * i;
    return piece;
}

static size_t head_bytes(const ep_safetensors *self)
{
    return self->data_begin < SAMPLE_BYTES ? (size_t)self->data_begin : SAMPLE_BYTES;
}

static ep_err no_sha256(const ep_safetensors *self, ep_error *out_error)
{
    return ep_error_set(out_error, EP_ERR_INTERNAL, "%s: SHA-256 is not available from libcrypto",
                        self->file.name);
}

/* Reads bytes from offset into out_bytes and digests them. */
static ep_err digest_piece(const ep_safetensors *self, uint64_t offset, uint8_t *out_bytes,
                           size_t bytes, uint8_t out_digest[SAMPLE_DIGEST_BYTES],
                           ep_error *out_error)
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    const ep_err err = ep_model_file_read(&self->file, offset, out_bytes, bytes, out_error);
    if (err != EP_OK) {
        return err;
    }
    if (EVP_Digest(out_bytes, bytes, digest, NULL, EVP_sha256(), NULL) != 1) {
        return no_sha256(self, out_error);
    }
    memcpy(out_digest, digest, SAMPLE_DIGEST_BYTES);
    return EP_OK;
}

/* Adds samples spread over the data to the digest, and keeps a digest of each. */
static ep_err hash_samples(ep_safetensors *self, EVP_MD_CTX *context, ep_error *out_error)
{
    uint8_t sample[SAMPLE_BYTES];
    uint64_t offset;
    ep_err err = digest_piece(self, 0, sample, head_bytes(self), self->head_digest, out_error);
    for (uint32_t i = 0; err == EP_OK && i < SAMPLES; i++) {
        const size_t bytes = place_sample(self, i, &offset);
        err = bytes == 0
                  ? EP_OK
                  : digest_piece(self, offset, sample, bytes, self->sample_digests[i], out_error);
        if (err == EP_OK && bytes > 0 && EVP_DigestUpdate(context, sample, bytes) != 1) {
            err = no_sha256(self, out_error);
        }
    }
    return err;
}

/* SHA-256 of the header and the samples. */
static ep_err hash_identity(ep_safetensors *self, const char *text, size_t bytes,
                            ep_error *out_error)
{
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool good = context != NULL && EVP_DigestInit_ex(context, EVP_sha256(), NULL) == 1 &&
                EVP_DigestUpdate(context, text, bytes) == 1;
    ep_err err = good ? hash_samples(self, context, out_error) : no_sha256(self, out_error);
    if (err == EP_OK && EVP_DigestFinal_ex(context, self->identity_digest, NULL) != 1) {
        err = no_sha256(self, out_error);
    }
    EVP_MD_CTX_free(context);
    return err;
}

/* The head of a GGUF file does not state its length, so ever larger parts from the file's beginning
 * are read until it is complete. */
static ep_err read_gguf(ep_safetensors *self, ep_error *out_error)
{
    const uint64_t all = self->file.bytes;
    size_t bytes = (size_t)1 << 20;
    bool is_short = true;
    ep_err err = EP_ERR_BAD_FILE;
    while (is_short) {
        ep_gguf_head head = {0};
        bytes = all < bytes ? (size_t)all : bytes;
        char *text = malloc(bytes);
        if (text == NULL) {
            return ep_error_set(out_error, EP_ERR_NO_MEMORY,
                                "%s: no memory for a head of %zu bytes", self->file.name, bytes);
        }
        is_short = false;
        err = ep_model_file_read(&self->file, 0, text, bytes, out_error);
        if (err == EP_OK) {
            err = ep_gguf_head_parse(self->file.name, (const uint8_t *)text, bytes, all,
                                     EP_SAFETENSORS_TENSORS_MAX, &head, &is_short, out_error);
        }
        if (err == EP_OK) {
            self->header = head.header;
            self->keys = head.keys;
            self->data_begin = head.data_begin;
            err = hash_identity(
                self, text, head.data_begin < bytes ? (size_t)head.data_begin : bytes, out_error);
        }
        free(text);
        is_short = is_short && bytes < EP_GGUF_HEAD_BYTES_MAX;
        bytes *= 4;
    }
    return err;
}

static ep_err is_gguf(const ep_model_file *file, bool *out_is, ep_error *out_error)
{
    char magic[4] = "";
    const ep_err err = file->bytes < sizeof(magic)
                           ? EP_OK
                           : ep_model_file_read(file, 0, magic, sizeof(magic), out_error);
    *out_is = memcmp(magic, EP_GGUF_MAGIC, sizeof(magic)) == 0;
    return err;
}

static ep_err read_header(ep_safetensors *self, ep_error *out_error)
{
    size_t bytes = 0;
    bool has_gguf = false;
    ep_err err = is_gguf(&self->file, &has_gguf, out_error);
    if (err == EP_OK && has_gguf) {
        return read_gguf(self, out_error);
    }
    err = err == EP_OK ? read_header_length(&self->file, &bytes, out_error) : err;
    if (err != EP_OK) {
        return err;
    }
    char *text = malloc(bytes);
    if (text == NULL) {
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: no memory for a header of %zu bytes",
                            self->file.name, bytes);
    }
    err = ep_model_file_read(&self->file, LENGTH_BYTES, text, bytes, out_error);
    if (err == EP_OK) {
        self->data_begin = LENGTH_BYTES + (uint64_t)bytes;
        err = ep_safetensors_header_parse(self->file.name, text, bytes,
                                          self->file.bytes - self->data_begin,
                                          EP_SAFETENSORS_TENSORS_MAX, &self->header, out_error);
    }
    if (err == EP_OK) {
        err = hash_identity(self, text, bytes, out_error);
    }
    free(text);
    return err;
}

/* Takes file: keeps it, or closes it on failure. */
static ep_err open_file(ep_model_file *file, ep_safetensors **out_file, ep_error *out_error)
{
    ep_safetensors *self = calloc(1, sizeof(*self));
    seen_state *seen = calloc(1, sizeof(*seen));
    if (self == NULL || seen == NULL) {
        free(self);
        free(seen);
        ep_model_file_close(file);
        return ep_error_set(out_error, EP_ERR_NO_MEMORY, "%s: allocation failed", file->name);
    }
    self->file = *file;
    self->seen = seen;
    seen->changed = file->changed;
    pthread_mutex_init(&seen->lock, NULL);
    const ep_err err = read_header(self, out_error);
    if (err != EP_OK) {
        ep_safetensors_close(self);
        return err;
    }
    *out_file = self;
    return EP_OK;
}

ep_err ep_safetensors_open(const ep_model_dir *dir, const char *name, ep_safetensors **out_file,
                           ep_error *out_error)
{
    ep_model_file file;
    ep_err err = ep_model_file_open(dir, name, &file, out_error);
    return err == EP_OK ? open_file(&file, out_file, out_error) : err;
}

ep_err ep_safetensors_open_path(const char *path, ep_safetensors **out_file, ep_error *out_error)
{
    ep_model_file file;
    ep_err err = ep_model_file_open_path(path, &file, out_error);
    return err == EP_OK ? open_file(&file, out_file, out_error) : err;
}

void ep_safetensors_close(ep_safetensors *file)
{
    if (file == NULL) {
        return;
    }
    ep_safetensors_header_fini(&file->header);
    json_decref(file->keys);
    ep_model_file_close(&file->file);
    pthread_mutex_destroy(&file->seen->lock);
    free(file->seen);
    free(file);
}

const char *ep_safetensors_name(const ep_safetensors *file)
{
    return file->file.name;
}

const json_t *ep_safetensors_keys(const ep_safetensors *file)
{
    return file->keys;
}

bool ep_safetensors_stat(const ep_safetensors *file, struct stat *out_status)
{
    return fstat(file->file.fd, out_status) == 0;
}

uint64_t ep_safetensors_bytes(const ep_safetensors *file)
{
    return file->file.bytes;
}

const uint8_t *ep_safetensors_identity_digest(const ep_safetensors *file)
{
    return file->identity_digest;
}

size_t ep_safetensors_count(const ep_safetensors *file)
{
    return file->header.tensors_count;
}

const ep_safetensors_tensor *ep_safetensors_at(const ep_safetensors *file, size_t index)
{
    EP_ASSERT(index < file->header.tensors_count);
    return &file->header.tensors[index];
}

const ep_safetensors_tensor *ep_safetensors_find(const ep_safetensors *file, const char *name)
{
    return ep_safetensors_header_find(&file->header, name);
}

/*
 * For a file that now has only bytes_left: up to *out_end it is known to be as it was at open. That
 * is the end of the last remaining sample, provided the head and all remaining samples are
 * unchanged. What follows may belong to another file that is being written. 0: nothing is known. An
 * error only means that the file could not be read.
 */
static ep_err find_known_end(const ep_safetensors *self, uint64_t bytes_left, uint64_t *out_end,
                             ep_error *out_error)
{
    uint8_t sample[SAMPLE_BYTES], digest[SAMPLE_DIGEST_BYTES];
    uint64_t offset, end = 0;
    *out_end = 0;
    if (bytes_left <= self->data_begin) {
        return EP_OK;
    }
    ep_err err = digest_piece(self, 0, sample, head_bytes(self), digest, out_error);
    if (err != EP_OK || memcmp(digest, self->head_digest, sizeof(digest)) != 0) {
        return err;
    }
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const size_t bytes = place_sample(self, i, &offset);
        if (offset + bytes > bytes_left) {
            break;
        }
        err = digest_piece(self, offset, sample, bytes, digest, out_error);
        if (err != EP_OK || memcmp(digest, self->sample_digests[i], sizeof(digest)) != 0) {
            return err;
        }
        end = offset + bytes;
    }
    *out_end = end;
    return EP_OK;
}

/* Lock held. Checks a file whose size and modification time are as at open. */
static ep_err look_at_whole(const ep_safetensors *self, seen_state *seen, const struct stat *st,
                            ep_error *out_error)
{
    uint64_t end;
    if (ep_same_time(&st->st_ctim, &seen->changed)) {
        return EP_OK;
    }
    const ep_err err = find_known_end(self, self->file.bytes, &end, out_error);
    if (err != EP_OK) {
        return err; /* may be temporary: the next read checks again */
    }
    seen->is_refused = end == 0 && self->file.bytes > self->data_begin;
    seen->changed = st->st_ctim;
    return EP_OK;
}

/*
 * BAD_FILE unless the file is as at open (*out_bytes: its size) or as when it was first found
 * shorter (*out_bytes: what can be read). Once it was shorter, any other state refuses it for good,
 * since something writes to it. So do changed bytes with the modification time of the open.
 */
static ep_err check_state(const ep_safetensors *self, uint64_t *out_bytes, ep_error *out_error)
{
    struct stat st;
    seen_state *seen = self->seen;
    pthread_mutex_lock(&seen->lock);
    ep_err err = ep_model_file_check_unchanged(&self->file, out_error);
    const bool has_stat = ep_safetensors_stat(self, &st);
    if (has_stat && !seen->is_cut && (uint64_t)st.st_size < self->file.bytes) {
        seen->is_cut = true;
        seen->bytes = (uint64_t)st.st_size;
        seen->modified = st.st_mtim;
    } else if (has_stat && seen->is_cut &&
               ((uint64_t)st.st_size != seen->bytes ||
                !ep_same_time(&st.st_mtim, &seen->modified))) {
        seen->is_refused = true;
    } else if (has_stat && err == EP_OK) {
        err = look_at_whole(self, seen, &st, out_error);
    }
    const bool is_cut = seen->is_cut, is_refused = seen->is_refused;
    *out_bytes = is_cut ? seen->bytes : self->file.bytes;
    pthread_mutex_unlock(&seen->lock);
    if (is_refused && is_cut) {
        return ep_error_set(out_error, EP_ERR_BAD_FILE,
                            "%s: was cut to %" PRIu64 " bytes, had %" PRIu64
                            " when it was opened, and was changed again; open the model again",
                            self->file.name, *out_bytes, self->file.bytes);
    }
    if (is_refused) {
        return ep_error_set(
            out_error, EP_ERR_BAD_FILE,
            "%s: was modified after it was opened, and its time set back; open the model again",
            self->file.name);
    }
    return is_cut && has_stat ? EP_OK : err;
}

ep_err ep_safetensors_read(const ep_safetensors *file, const ep_safetensors_tensor *tensor,
                           size_t offset, void *out, size_t bytes, ep_error *out_error)
{
    EP_ASSERT(offset <= ep_safetensors_tensor_bytes(tensor));
    EP_ASSERT(bytes <= ep_safetensors_tensor_bytes(tensor) - offset);
    return ep_safetensors_read_raw(file, file->data_begin + tensor->begin + offset, out, bytes,
                                   out_error);
}

ep_err ep_safetensors_need(const ep_safetensors *file, const ep_safetensors_tensor *tensor,
                           size_t offset, size_t bytes, ep_error *out_error)
{
    return ep_model_file_need(&file->file, file->data_begin + tensor->begin + offset, bytes,
                              out_error);
}

bool ep_safetensors_has_raw(const ep_safetensors *file, uint64_t begin, size_t bytes)
{
    return ep_model_file_has(&file->file, begin, bytes);
}

ep_err ep_safetensors_read_raw(const ep_safetensors *file, uint64_t begin, void *out, size_t bytes,
                               ep_error *out_error)
{
    uint64_t bytes_before, bytes_after, end;
    ep_err err;
    EP_ASSERT(begin <= file->file.bytes && bytes <= file->file.bytes - begin);
    do { /* repeats at most once: when the file was truncated meanwhile */
        err = check_state(file, &bytes_before, out_error);
        const bool is_cut = err == EP_OK && bytes_before < file->file.bytes;
        err = is_cut ? find_known_end(file, bytes_before, &end, out_error) : err;
        if (err == EP_OK && is_cut && begin + bytes > end) {
            err = ep_error_set(out_error, EP_ERR_BAD_FILE,
                               "%s: has %" PRIu64 " bytes, had %" PRIu64 " when it was opened",
                               file->file.name, bytes_before, file->file.bytes);
        }
        if (err == EP_OK) {
            err = ep_model_file_read(&file->file, begin, out, bytes, out_error);
        }
        if (err == EP_OK) {
            err = check_state(file, &bytes_after, out_error);
        }
    } while (err == EP_OK && bytes_after != bytes_before);
    return err;
}
