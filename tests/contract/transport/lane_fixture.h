/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the transport contract's cases share: frames that prove themselves, both ends of connections
 * with everything their callbacks saw, one listener per test, and waiting without sleeping. Not
 * tied to a test framework: CHECK ends the process.
 */
#ifndef EP_TESTS_LANE_FIXTURE_H
#define EP_TESTS_LANE_FIXTURE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#include "support/check.h"
#include "transport/transport.h"

#define WAIT_S 60 /* a wait that long means the event never comes */
#define FRAME_BYTES_MAX ((size_t)4 << 20)

/* A row of the table of lanes. */
typedef struct lane_kind {
    const char *name; /* for world_open: a scheme, or tcp/ with the stream lane to use */
    const char *url;  /* to listen on; NULL: a socket in a new folder */
    bool is_named;    /* peers are called by the URL, not by address and port */
    bool is_trusted;
} lane_kind;
extern const lane_kind lane_kinds[]; /* up to one without a name */

typedef struct side side;

/* One end of a connection. */
struct side {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_conn *conn;
    /* instead of checking and unref; takes the buffer */
    void (*on_frame)(side *s, ep_buffer *frame);
    void (*on_closed)(side *s); /* instead of releasing the connection */
    void *arg;
    uint64_t frames; /* received and right, in order from 0 */
    uint64_t done_ok;
    uint64_t done_failed;
    unsigned closed; /* calls of on_closed */
    ep_error end;
    const char *fault; /* first thing a callback found wrong */
    bool in_frame;     /* on_frame runs */
};

/* A frame to send that owns its bytes. */
typedef struct message {
    ep_send send;
    side *from;
    uint8_t *bytes;
    unsigned done_calls;
    ep_err result;
    void (*on_done)(struct message *m);
} message;

/* Certificates for host "localhost" and for "client", in one file with their key as nng wants them,
 * and the CA that signed them; a CA that signed neither. */
enum { TLS_CA, TLS_OTHER_CA, TLS_SERVER, TLS_CLIENT, TLS_FILES };

typedef struct lane_world {
    const lane_kind *kind;
    const ep_lane_ops *ops;
    char url[EP_ADDRESS_BYTES];      /* to listen on */
    char dial_url[EP_ADDRESS_BYTES]; /* with the real port */
    ep_tls_config server_tls;
    ep_tls_config client_tls;
    char tls_files[TLS_FILES][64];
    char folder[64]; /* of shm's socket */
    ep_buffer_pool *pool;
    ep_lane_limits limits; /* of both ends; change before world_listen */
    ep_listener *listener;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ep_conn *accepted; /* the newest one, not yet taken */
    unsigned accepts;
} lane_world;

/* name: of lane_kinds. */
void world_open(lane_world *w, const char *name);
void world_listen(lane_world *w);
/* Closes the listener, ends the lane's threads, and checks that every buffer came back. All sides
 * must have closed. */
void world_close(lane_world *w);
bool world_is(const lane_world *w, const char *scheme);
void world_address(lane_world *w, bool for_listen, ep_lane_address *out_address);

/* Dials and accepts; neither end is started. What the sides were before is forgotten. */
void pair_open(lane_world *w, side *client, side *server);
/* The same with both ends started. */
void pair_start(lane_world *w, side *client, side *server);
/* Starts with the fixture's handler. */
void side_start(side *s);
void side_close(side *s);
/* Waits for on_closed of both, and checks that it came once and that no callback found a fault. */
void pair_wait_closed(side *client, side *server);
void pair_close(side *client, side *server);
void side_wait_closed(side *s);
void side_wait_frames(side *s, uint64_t frames);
void side_init(side *s);
/* Takes the newest connection that was accepted, and starts it. */
void side_accept(lane_world *w, side *s);
ep_conn *world_dial(lane_world *w, ep_error *out_error);
ep_conn *world_take_accepted(lane_world *w);

/* A frame of `bytes` with this sequence number, as one part. */
message *message_create(side *from, uint64_t sequence, size_t bytes);
/* Splits its bytes into `parts` parts, every third one empty when there is room for that. */
void message_split(message *m, uint32_t parts);
ep_err message_send(message *m);
void message_wait(message *m);
/* Only after done, or when never sent. */
void message_free(message *m);
/* Sends and frees itself when done. Retries nothing: returns what ep_conn_send said. */
ep_err send_and_forget(side *from, uint64_t sequence, size_t bytes);

/* Total length from a fixture prefix; PROTOCOL when it is not one. */
ep_err fixture_frame_bytes(const uint8_t prefix[EP_FRAME_PREFIX_BYTES], size_t *out_frame_bytes,
                           ep_error *out_error);
/* Fills a whole frame. */
void fixture_fill(uint8_t *frame, uint64_t sequence, size_t bytes);
/* NULL when the frame is whole and right. */
const char *fixture_verify(const ep_buffer *frame, uint64_t sequence);
uint64_t fixture_sequence(const ep_buffer *frame);
unsigned open_descriptors(void);
/* Like fork; the child dies with the process that forked it, whatever ends that one, and never
 * lives for ever. */
pid_t fork_child(void);
/* Waits for a child, which must exit with 0. */
void expect_child_exits(pid_t child);

/* Set while this thread is inside a lane call made through the fixture: no callback may see it. */
extern __thread bool inside_lane_call;

#endif
