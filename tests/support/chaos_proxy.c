/* SPDX-License-Identifier: Apache-2.0 */
/* The chaos proxy's thread: connections, their two directions, and the faults that change no
 * bytes. */
#include "support/chaos_proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "support/chaos_frames.h"

#define CONNECTIONS_MAX 512
#define READ_BYTES 65536
#define QUEUE_BYTES_MAX (8u << 20) /* reading stops while more is queued */
#define HELD_MS_MAX 300            /* latest time at which a held frame is sent */

typedef struct chaos_chunk {
    struct chaos_chunk *next;
    uint64_t due_ns;
    size_t bytes;
    size_t sent;
    size_t piece; /* most bytes per write; 0: all */
    bool ends;    /* the connection ends after it */
    uint8_t data[];
} chaos_chunk;

typedef struct chaos_way { /* one direction */
    int from;
    int to;
    uint32_t direction;
    uint64_t random;
    uint32_t frames;
    uint8_t *in; /* a frame's bytes so far */
    size_t in_bytes;
    size_t in_capacity;
    chaos_chunk *first;
    chaos_chunk **last;
    size_t queued;
    chaos_chunk *held;
    uint32_t held_for; /* frames still to pass the held one */
    uint64_t stalled_until_ns;
    bool cut;
    bool raw;   /* the bytes are not frames */
    bool ended; /* the sender has closed */
} chaos_way;

typedef struct chaos_pair {
    chaos_way ways[2]; /* to the server, to the client */
    chaos_calls calls;
    bool reset;
    bool dead;
} chaos_pair;

struct ep_chaos_proxy {
    pthread_t thread;
    pthread_mutex_t lock; /* guards the next five */
    char upstream[128];
    ep_chaos_rule rules[EP_CHAOS_RULES_MAX];
    uint64_t rules_done[EP_CHAOS_RULES_MAX];
    uint32_t rules_count;
    ep_chaos_counts counts;
    bool stopping; /* atomic */
    int listen_fd;
    int wake_fds[2];
    char url[64];
    uint64_t seed;
    chaos_pair *pairs[CONNECTIONS_MAX]; /* this and the rest belong to the thread */
    uint32_t pairs_count;
    bool calm; /* no rules */
};

const char *ep_chaos_fault_name(ep_chaos_fault fault)
{
    static const char *const names[] = {
#define X(upper, lower) #lower,
        EP_CHAOS_FAULTS(X)
#undef X
    };
    return fault < EP_CHAOS_FAULTS_COUNT ? names[fault] : "unknown";
}

/* ---- what is drawn for a frame ---- */

static uint32_t amount(const ep_chaos_rule *rule, uint64_t *random)
{
    uint32_t span =
        rule->amount_max > rule->amount_min ? rule->amount_max - rule->amount_min + 1 : 1;
    return rule->amount_min + (uint32_t)((ep_splitmix64(random) >> 20) % span);
}

/* Picks a frame's rule; EP_CHAOS_RULES_MAX: none. Lock held. Draws once per rule that fits. */
static uint32_t draw_rule_locked(const ep_chaos_proxy *proxy, chaos_way *way, uint8_t kind)
{
    for (uint32_t i = 0; i < proxy->rules_count; i++) {
        const ep_chaos_rule *rule = &proxy->rules[i];
        if ((rule->directions & way->direction) == 0 ||
            (rule->kinds != 0 && (rule->kinds & 1u << kind) == 0) ||
            (rule->limit != 0 && proxy->rules_done[i] >= rule->limit)) {
            continue;
        }
        bool drawn = rule->number != 0 ? rule->number == way->frames
                                       : (ep_splitmix64(&way->random) >> 20) % 10000 < rule->rate;
        if (drawn) {
            return i;
        }
    }
    return EP_CHAOS_RULES_MAX;
}

static void count_fault(ep_chaos_proxy *proxy, uint32_t index, ep_chaos_fault fault)
{
    pthread_mutex_lock(&proxy->lock);
    /* else the rules were replaced meanwhile */
    if (index < proxy->rules_count && proxy->rules[index].fault == fault) {
        proxy->rules_done[index]++;
    }
    proxy->counts.faults[fault]++;
    pthread_mutex_unlock(&proxy->lock);
}

/* ---- queues ---- */

static chaos_chunk *make_chunk(const uint8_t *data, size_t bytes)
{
    chaos_chunk *chunk = malloc(sizeof(*chunk) + bytes);
    if (chunk != NULL) {
        *chunk = (chaos_chunk){.bytes = bytes};
        memcpy(chunk->data, data, bytes);
    }
    return chunk;
}

static void push(chaos_way *way, chaos_chunk *chunk)
{
    if (chunk != NULL) {
        chunk->next = NULL;
        *way->last = chunk;
        way->last = &chunk->next;
        way->queued += chunk->bytes;
    }
}

static void release_held(chaos_way *way)
{
    chaos_chunk *held = way->held;
    way->held = NULL;
    if (held != NULL) {
        held->due_ns = 0;
        push(way, held);
    }
}

static void hold(chaos_way *way, chaos_chunk *chunk, uint32_t frames)
{
    release_held(way);
    if (chunk != NULL) {
        chunk->due_ns = ep_clock_now_ns() + HELD_MS_MAX * EP_NS_PER_MS;
    }
    way->held = chunk;
    way->held_for = frames;
}

/* Queues the frame with the fault in it. False: the fault does not fit this frame. */
static bool do_fault(chaos_pair *pair, chaos_way *way, const ep_chaos_rule *rule,
                     const uint8_t *data, size_t bytes)
{
    uint64_t now_ns = ep_clock_now_ns();
    chaos_chunk *chunk;
    switch (rule->fault) {
    case EP_CHAOS_DROP:
        return true;
    case EP_CHAOS_CUT:
        way->cut = true;
        return true;
    case EP_CHAOS_RESET:
        pair->reset = pair->dead = true;
        return true;
    case EP_CHAOS_HOLD:
    case EP_CHAOS_SWAP:
        hold(way, make_chunk(data, bytes),
             rule->fault == EP_CHAOS_SWAP ? 1 : amount(rule, &way->random));
        return true;
    case EP_CHAOS_STALL:
        way->stalled_until_ns = now_ns + amount(rule, &way->random) * EP_NS_PER_MS;
        push(way, make_chunk(data, bytes));
        return true;
    case EP_CHAOS_DUPLICATE:
        push(way, make_chunk(data, bytes));
        push(way, make_chunk(data, bytes));
        return true;
    default:
        break;
    }
    if (rule->fault >= EP_CHAOS_FLIP_FIXED) {
        size_t changed_bytes;
        uint8_t *changed = chaos_frame_change(rule->fault, data, bytes, &pair->calls, &way->random,
                                              &changed_bytes);
        if (changed != NULL) {
            push(way, make_chunk(changed, changed_bytes));
        }
        free(changed);
        return changed != NULL;
    }
    chunk = make_chunk(data, bytes);
    if (chunk == NULL) {
        return false;
    }
    if (rule->fault == EP_CHAOS_DELAY) {
        chunk->due_ns = now_ns + amount(rule, &way->random) * EP_NS_PER_MS;
    } else if (rule->fault == EP_CHAOS_SPLIT) {
        chunk->piece = 1 + amount(rule, &way->random);
    } else { /* EP_CHAOS_TRUNCATE */
        chunk->bytes = 1 + (ep_splitmix64(&way->random) >> 20) % (bytes - 1);
        chunk->ends = true;
    }
    push(way, chunk);
    return true;
}

static void take_frame(ep_chaos_proxy *proxy, chaos_pair *pair, chaos_way *way, const uint8_t *data,
                       size_t bytes)
{
    ep_chaos_rule rule = {.fault = EP_CHAOS_FAULTS_COUNT};
    uint8_t kind = data[5];
    if (way->cut) {
        return;
    }
    way->frames++;
    pthread_mutex_lock(&proxy->lock);
    proxy->counts.frames++;
    uint32_t index = draw_rule_locked(proxy, way, kind < 32 ? kind : 0);
    if (index < EP_CHAOS_RULES_MAX) {
        rule = proxy->rules[index];
    }
    pthread_mutex_unlock(&proxy->lock);
    if (way->direction == EP_CHAOS_TO_SERVER) {
        chaos_calls_note(&pair->calls, data, bytes);
    }
    bool had_held = way->held != NULL;
    if (index < EP_CHAOS_RULES_MAX && do_fault(pair, way, &rule, data, bytes)) {
        count_fault(proxy, index, rule.fault);
    } else {
        push(way, make_chunk(data, bytes));
    }
    if (way->direction == EP_CHAOS_TO_CLIENT) {
        chaos_calls_note(&pair->calls, data, bytes);
    }
    if (had_held && way->held != NULL && rule.fault != EP_CHAOS_HOLD &&
        rule.fault != EP_CHAOS_SWAP && --way->held_for == 0) {
        release_held(way);
    }
}

static void take_bytes(ep_chaos_proxy *proxy, chaos_pair *pair, chaos_way *way)
{
    size_t used = 0;
    while (!way->raw && way->in_bytes - used >= EP_FRAME_FIXED_BYTES && !pair->dead) {
        size_t bytes;
        if (ep_frame_read_bytes(way->in + used, &bytes, NULL) != EP_OK) {
            way->raw = true;
        } else if (way->in_bytes - used < bytes) {
            break;
        } else {
            take_frame(proxy, pair, way, way->in + used, bytes);
            used += bytes;
        }
    }
    if (way->raw) {
        pthread_mutex_lock(&proxy->lock);
        proxy->counts.raw_bytes += way->in_bytes - used;
        pthread_mutex_unlock(&proxy->lock);
        push(way, make_chunk(way->in + used, way->in_bytes - used));
        used = way->in_bytes;
    }
    memmove(way->in, way->in + used, way->in_bytes - used);
    way->in_bytes -= used;
}

static void read_way(ep_chaos_proxy *proxy, chaos_pair *pair, chaos_way *way)
{
    if (way->in_capacity - way->in_bytes < READ_BYTES) {
        uint8_t *in = realloc(way->in, way->in_bytes + 2 * READ_BYTES);
        if (in == NULL) {
            pair->dead = true;
            return;
        }
        way->in = in;
        way->in_capacity = way->in_bytes + 2 * READ_BYTES;
    }
    ssize_t n = read(way->from, way->in + way->in_bytes, READ_BYTES);
    if (n > 0) {
        way->in_bytes += (size_t)n;
        take_bytes(proxy, pair, way);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        way->ended = true;
    }
}

/* Sends the chunks that are due; of a split frame one piece at a time. */
static void write_way(chaos_pair *pair, chaos_way *way, uint64_t now_ns)
{
    while (way->first != NULL && way->first->due_ns <= now_ns && !pair->dead) {
        chaos_chunk *chunk = way->first;
        size_t left = chunk->bytes - chunk->sent;
        size_t piece = chunk->piece > 0 && chunk->piece < left ? chunk->piece : left;
        ssize_t n = send(way->to, chunk->data + chunk->sent, piece, MSG_NOSIGNAL);
        if (n < 0) {
            pair->dead = pair->dead || (errno != EAGAIN && errno != EINTR);
            return;
        }
        chunk->sent += (size_t)n;
        if (chunk->sent < chunk->bytes) {
            return;
        }
        pair->dead = pair->dead || chunk->ends;
        way->queued -= chunk->bytes < way->queued ? chunk->bytes : way->queued;
        way->first = chunk->next;
        if (way->first == NULL) {
            way->last = &way->first;
            way->queued = 0;
        }
        free(chunk);
    }
}

/* ---- connections ---- */

static int url_port(const char *url)
{
    const char *colon = strrchr(url, ':');
    return colon != NULL ? atoi(colon + 1) : 0;
}

static int connect_to(const char *url)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)url_port(url))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = url[0] != 0 ? socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static void set_socket(int fd)
{
    int on = 1;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)); /* sends each piece on its own */
}

static void way_init(chaos_way *way, int from, int to, uint32_t direction, uint64_t seed)
{
    *way = (chaos_way){
        .from = from, .to = to, .direction = direction, .random = seed * 31 + direction};
    way->last = &way->first;
}

static void accept_one(ep_chaos_proxy *proxy)
{
    char upstream[sizeof(proxy->upstream)];
    int client = accept4(proxy->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0) {
        return;
    }
    pthread_mutex_lock(&proxy->lock);
    memcpy(upstream, proxy->upstream, sizeof(upstream));
    uint64_t number = ++proxy->counts.connections;
    pthread_mutex_unlock(&proxy->lock);
    int server = proxy->pairs_count < CONNECTIONS_MAX ? connect_to(upstream) : -1;
    chaos_pair *pair = server >= 0 ? calloc(1, sizeof(*pair)) : NULL;
    if (pair == NULL) {
        close(client);
        if (server >= 0) {
            close(server);
        }
        return;
    }
    set_socket(client);
    set_socket(server);
    way_init(&pair->ways[0], client, server, EP_CHAOS_TO_SERVER, proxy->seed + number * 1000003);
    way_init(&pair->ways[1], server, client, EP_CHAOS_TO_CLIENT, proxy->seed + number * 1000003);
    proxy->pairs[proxy->pairs_count++] = pair;
}

static void end_pair(chaos_pair *pair)
{
    for (int w = 0; w < 2; w++) {
        chaos_way *way = &pair->ways[w];
        struct linger now = {.l_onoff = 1};
        if (pair->reset) {
            setsockopt(way->from, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
        }
        close(way->from);
        free(way->in);
        free(way->held);
        for (chaos_chunk *chunk = way->first, *next; chunk != NULL; chunk = next) {
            next = chunk->next;
            free(chunk);
        }
    }
    free(pair);
}

/* There are no rules any more: nothing may wait. */
static void calm_down(chaos_way *way)
{
    way->stalled_until_ns = 0;
    release_held(way);
    for (chaos_chunk *chunk = way->first; chunk != NULL; chunk = chunk->next) {
        chunk->due_ns = 0;
    }
}

/* Finds the poll events of this direction, and when to wake. */
static void plan_way(chaos_way *way, uint64_t now_ns, struct pollfd *from, struct pollfd *to,
                     uint64_t *wake_ns)
{
    if (way->held != NULL && way->held->due_ns <= now_ns) {
        release_held(way);
    }
    uint64_t due_ns = way->held != NULL ? way->held->due_ns : EP_TIME_NEVER;
    if (way->stalled_until_ns > now_ns) {
        due_ns = way->stalled_until_ns < due_ns ? way->stalled_until_ns : due_ns;
    } else if (!way->ended && way->queued < QUEUE_BYTES_MAX) {
        from->events |= POLLIN;
    }
    if (way->first != NULL && way->first->due_ns <= now_ns) {
        to->events |= POLLOUT;
    } else if (way->first != NULL && way->first->due_ns < due_ns) {
        due_ns = way->first->due_ns;
    }
    *wake_ns = due_ns < *wake_ns ? due_ns : *wake_ns;
}

static void serve_pair(ep_chaos_proxy *proxy, chaos_pair *pair, const struct pollfd fds[2])
{
    for (int w = 0; w < 2 && !pair->dead; w++) {
        chaos_way *way = &pair->ways[w];
        const struct pollfd *from = &fds[w];
        const struct pollfd *to = &fds[1 - w];
        if ((from->events & POLLIN) != 0 && (from->revents & (POLLIN | POLLHUP | POLLERR)) != 0 &&
            way->stalled_until_ns <= ep_clock_now_ns() && !way->ended &&
            way->queued < QUEUE_BYTES_MAX) {
            read_way(proxy, pair, way);
        }
        if ((to->revents & POLLOUT) != 0 || way->first != NULL) {
            write_way(pair, way, ep_clock_now_ns());
        }
        if ((from->revents & POLLERR) != 0 ||
            (way->ended && way->first == NULL && way->held == NULL)) {
            pair->dead = true;
        }
    }
}

static void poll_once(ep_chaos_proxy *proxy, struct pollfd *fds)
{
    uint64_t now_ns = ep_clock_now_ns();
    uint64_t wake_ns = EP_TIME_NEVER;
    fds[0] = (struct pollfd){.fd = proxy->listen_fd, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = proxy->wake_fds[0], .events = POLLIN};
    for (uint32_t i = 0; i < proxy->pairs_count; i++) {
        chaos_pair *pair = proxy->pairs[i];
        struct pollfd *client = &fds[2 + 2 * i];
        struct pollfd *server = &fds[3 + 2 * i];
        *client = (struct pollfd){.fd = pair->ways[0].from};
        *server = (struct pollfd){.fd = pair->ways[1].from};
        if (proxy->calm) {
            calm_down(&pair->ways[0]);
            calm_down(&pair->ways[1]);
        }
        plan_way(&pair->ways[0], now_ns, client, server, &wake_ns);
        plan_way(&pair->ways[1], now_ns, server, client, &wake_ns);
    }
    uint32_t count = proxy->pairs_count;
    int timeout_ms = wake_ns == EP_TIME_NEVER ? -1
                     : wake_ns <= now_ns      ? 0
                                              : (int)((wake_ns - now_ns) / EP_NS_PER_MS) + 1;
    if (poll(fds, 2 + 2 * count, timeout_ms) < 0) {
        return;
    }
    if (fds[1].revents != 0) {
        char bytes[64];
        pthread_mutex_lock(&proxy->lock);
        proxy->calm = proxy->rules_count == 0;
        pthread_mutex_unlock(&proxy->lock);
        (void)!read(proxy->wake_fds[0], bytes, sizeof(bytes));
    }
    for (uint32_t i = 0; i < count; i++) {
        serve_pair(proxy, proxy->pairs[i], &fds[2 + 2 * i]);
    }
    for (uint32_t i = count; i-- > 0;) {
        if (proxy->pairs[i]->dead) {
            end_pair(proxy->pairs[i]);
            proxy->pairs[i] = proxy->pairs[--proxy->pairs_count];
        }
    }
    if (fds[0].revents != 0) {
        accept_one(proxy);
    }
}

static void *run(void *arg)
{
    ep_chaos_proxy *proxy = arg;
    struct pollfd *fds = calloc(2 + 2 * CONNECTIONS_MAX, sizeof(*fds));
    while (fds != NULL && !__atomic_load_n(&proxy->stopping, __ATOMIC_ACQUIRE)) {
        poll_once(proxy, fds);
    }
    while (proxy->pairs_count > 0) {
        end_pair(proxy->pairs[--proxy->pairs_count]);
    }
    free(fds);
    return NULL;
}

/* ---- life ---- */

static bool listen_any(ep_chaos_proxy *proxy)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t bytes = sizeof(address);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    proxy->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (proxy->listen_fd < 0 ||
        bind(proxy->listen_fd, (struct sockaddr *)&address, sizeof(address)) != 0 ||
        listen(proxy->listen_fd, 128) != 0 ||
        getsockname(proxy->listen_fd, (struct sockaddr *)&address, &bytes) != 0) {
        return false;
    }
    snprintf(proxy->url, sizeof(proxy->url), "tcp://127.0.0.1:%u", ntohs(address.sin_port));
    return true;
}

ep_chaos_proxy *ep_chaos_proxy_create(uint64_t seed)
{
    ep_chaos_proxy *proxy = calloc(1, sizeof(*proxy));
    if (proxy == NULL) {
        return NULL;
    }
    *proxy = (ep_chaos_proxy){.seed = seed, .listen_fd = -1, .wake_fds = {-1, -1}, .calm = true};
    pthread_mutex_init(&proxy->lock, NULL);
    if (!listen_any(proxy) || pipe2(proxy->wake_fds, O_CLOEXEC | O_NONBLOCK) != 0 ||
        pthread_create(&proxy->thread, NULL, run, proxy) != 0) {
        close(proxy->listen_fd);
        close(proxy->wake_fds[0]);
        close(proxy->wake_fds[1]);
        pthread_mutex_destroy(&proxy->lock);
        free(proxy);
        return NULL;
    }
    return proxy;
}

static void wake(ep_chaos_proxy *proxy)
{
    (void)!write(proxy->wake_fds[1], "", 1);
}

void ep_chaos_proxy_destroy(ep_chaos_proxy *proxy)
{
    if (proxy == NULL) {
        return;
    }
    __atomic_store_n(&proxy->stopping, true, __ATOMIC_RELEASE);
    wake(proxy);
    pthread_join(proxy->thread, NULL);
    close(proxy->listen_fd);
    close(proxy->wake_fds[0]);
    close(proxy->wake_fds[1]);
    pthread_mutex_destroy(&proxy->lock);
    free(proxy);
}

const char *ep_chaos_proxy_url(const ep_chaos_proxy *proxy)
{
    return proxy->url;
}

void ep_chaos_proxy_set_upstream(ep_chaos_proxy *proxy, const char *url)
{
    pthread_mutex_lock(&proxy->lock);
    snprintf(proxy->upstream, sizeof(proxy->upstream), "%s", url);
    pthread_mutex_unlock(&proxy->lock);
}

void ep_chaos_proxy_set_rules(ep_chaos_proxy *proxy, const ep_chaos_rule *rules, uint32_t count)
{
    pthread_mutex_lock(&proxy->lock);
    proxy->rules_count = count < EP_CHAOS_RULES_MAX ? count : EP_CHAOS_RULES_MAX;
    if (proxy->rules_count > 0) {
        memcpy(proxy->rules, rules, proxy->rules_count * sizeof(*rules));
    }
    memset(proxy->rules_done, 0, sizeof(proxy->rules_done));
    pthread_mutex_unlock(&proxy->lock);
    wake(proxy);
}

void ep_chaos_proxy_read(ep_chaos_proxy *proxy, ep_chaos_counts *out_counts)
{
    pthread_mutex_lock(&proxy->lock);
    *out_counts = proxy->counts;
    pthread_mutex_unlock(&proxy->lock);
}
