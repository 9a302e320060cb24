/* SPDX-License-Identifier: Apache-2.0 */
#include "raw_rank.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static bool write_all(int fd, const void *data, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = send(fd, (const char *)data + done, bytes - done, MSG_NOSIGNAL);
        if (n <= 0) {
            return false;
        }
        done += (size_t)n;
    }
    return true;
}

static bool read_all(int fd, void *out, size_t bytes)
{
    return bytes == 0 || recv(fd, out, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

bool raw_read(int fd, raw_frame *out)
{
    memset(out, 0, sizeof(*out));
    if (!read_all(fd, out->bytes, EP_GROUP_FRAME_FIXED_BYTES) ||
        ep_group_frame_decode(out->bytes, &out->head, NULL) != EP_OK) {
        return false;
    }
    out->size = EP_GROUP_FRAME_FIXED_BYTES + (size_t)out->head.payload_bytes;
    return out->size <= RAW_FRAME_MAX &&
           read_all(fd, out->bytes + EP_GROUP_FRAME_FIXED_BYTES, (size_t)out->head.payload_bytes);
}

bool raw_write(int fd, raw_frame *f)
{
    if (!f->raw) {
        f->head.payload_bytes = f->size - EP_GROUP_FRAME_FIXED_BYTES;
        if (!f->keep_crc) {
            f->head.flags &= EP_GROUP_FRAME_FLAG_PASSED_ON;
            f->head.payload_crc = 0;
        }
        ep_group_frame_encode(&f->head, f->bytes);
    }
    bool good = write_all(fd, f->bytes, f->cut ? f->size / 2 : f->size);
    return f->cut ? shutdown(fd, SHUT_WR) == 0 : good;
}

int raw_join(const char *url, const ep_group_hello *hello, uint64_t membership)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)atoi(strrchr(url, ':') + 1))};
    raw_frame *f = calloc(1, sizeof(*f));
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    ep_group_hello_encode(hello, f->bytes + EP_GROUP_FRAME_FIXED_BYTES);
    f->size = EP_GROUP_FRAME_FIXED_BYTES + EP_GROUP_HELLO_BYTES;
    f->head = (ep_group_frame){
        .kind = EP_GROUP_FRAME_HELLO, .rank = hello->rank, .membership = membership};
    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) != 0 || !raw_write(fd, f)) {
        close(fd);
        fd = -1;
    }
    free(f);
    return fd;
}

static void publish(void *arg, const char *url)
{
    raw_place *place = arg;
    pthread_mutex_lock(&place->lock);
    snprintf(place->url, sizeof(place->url), "%s", url);
    pthread_cond_broadcast(&place->changed);
    pthread_mutex_unlock(&place->lock);
}

void raw_listen_config(ep_group_config *config, const char *name, uint32_t world_size,
                       raw_place *place)
{
    static const char *const urls[] = {"tcp://127.0.0.1:0"};
    ep_group_config_init(config);
    config->name = name;
    config->world_size = world_size;
    config->urls = urls;
    config->urls_count = 1;
    config->listen_url = urls[0];
    config->on_listening = publish;
    config->on_listening_arg = place;
}

const char *raw_place_url(raw_place *place)
{
    pthread_mutex_lock(&place->lock);
    while (place->url[0] == 0) {
        pthread_cond_wait(&place->changed, &place->lock);
    }
    pthread_mutex_unlock(&place->lock);
    return place->url;
}
