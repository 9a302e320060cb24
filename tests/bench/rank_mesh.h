/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that exchange plain arrays over the product's stream lane, each with each: what the usual
 * collective forms are built of in the benchmarks. An exchange has no chunks of a call, no credits,
 * no overlap: post, then wait.
 *
 * Threads    one per mesh.
 */
#ifndef EP_BENCH_RANK_MESH_H
#define EP_BENCH_RANK_MESH_H

#include <stddef.h>
#include <stdint.h>

#define RANK_MESH_MAX 16

typedef struct rank_mesh rank_mesh;

/* Listens at addresses[rank]:port and connects to the ranks below. Returns when all are connected;
 * ends the program when that fails. recv_bytes: most that one rank may have sent and not been
 * waited for; 0: rank_mesh_receive_at comes first. */
rank_mesh *rank_mesh_open(uint32_t rank, uint32_t ranks, const char *const *addresses,
                          uint16_t port, size_t recv_bytes);
/* Closes and frees; the others must have waited for what was posted to them. */
void rank_mesh_close(rank_mesh *mesh);
/*
 * From now on rank i is received at places + i * each, for `each` bytes at most; the caller's,
 * until the next call or close. Everything that was sent has been waited for, and nobody sends
 * before all ranks have called it.
 */
void rank_mesh_receive_at(rank_mesh *mesh, void *places, size_t each);
/* Queues bytes to a rank, in frames of 1 MiB at most; data is left alone until rank_mesh_flush. */
void rank_mesh_post(rank_mesh *mesh, uint32_t to, const void *data, size_t bytes);
/* Until the network has taken all that was posted. Ends every exchange: what was waited for makes
 * room for what comes. */
void rank_mesh_flush(rank_mesh *mesh);
/* Until `bytes` more have come from a rank; they stay there until the next wait for it or the next
 * flush. */
const void *rank_mesh_wait(rank_mesh *mesh, uint32_t from, size_t bytes);

#endif
