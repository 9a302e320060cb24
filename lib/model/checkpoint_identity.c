/* SPDX-License-Identifier: Apache-2.0 */
/* Tells which files a checkpoint was opened from. */
#include <string.h>
#include <sys/stat.h>

#include <openssl/evp.h>

#include "model/checkpoint_private.h"

/* Strings are hashed with their zero byte, so that other pairs of strings give other input. */
ep_err ep_checkpoint_identity(const ep_checkpoint *checkpoint,
                              uint8_t out_identity[EP_SHA256_BYTES], ep_error *out_error)
{
    const ep_model_info *info = &checkpoint->config.info;
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool is_good = hash != NULL && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) == 1 &&
                   EVP_DigestUpdate(hash, info->version, sizeof(info->version)) == 1 &&
                   EVP_DigestUpdate(hash, info->config_hash, sizeof(info->config_hash)) == 1;
    for (size_t i = 0; is_good && i < checkpoint->shards_count; i++) {
        struct stat st;
        const char *name = ep_safetensors_name(checkpoint->shards[i]);
        if (!ep_safetensors_stat(checkpoint->shards[i], &st)) {
            EVP_MD_CTX_free(hash);
            return ep_error_set(out_error, EP_ERR_IO, "%s: cannot be looked at", name);
        }
        const int64_t facts[] = {(int64_t)st.st_dev,          (int64_t)st.st_ino,
                                 (int64_t)st.st_size,         (int64_t)st.st_mtim.tv_sec,
                                 (int64_t)st.st_mtim.tv_nsec, (int64_t)st.st_ctim.tv_sec,
                                 (int64_t)st.st_ctim.tv_nsec};
        is_good = EVP_DigestUpdate(hash, name, strlen(name) + 1) == 1 &&
                  EVP_DigestUpdate(hash, facts, sizeof(facts)) == 1;
    }
    is_good = is_good && EVP_DigestFinal_ex(hash, out_identity, NULL) == 1;
    EVP_MD_CTX_free(hash);
    return is_good ? EP_OK
                   : ep_error_set(out_error, EP_ERR_INTERNAL, "SHA-256 failed in libcrypto");
}
