/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/store_loads.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/host.h"
#include "base/random.h"
#include "support/checkpoint_fixture.h"
#include "support/gguf_writer.h"
#include "support/store_watch.h"

#define HIDDEN 2048
#define INNER 768
#define EXPERTS 128
#define ROUNDS 3
#define PIECE_BYTES ((size_t)1 << 20)
#define BLOCK_COLUMNS 32
#define BLOCK_BYTES 18 /* of Q4_0 */
#define GGUF_Q4_0 2

typedef struct form {
    const char *name;
    ep_weight_format expert_format; /* as the fixture takes it */
    const char *quant;
    bool is_gguf;
} form;

static const form forms[] = {{.name = "bf16"},
                             {.name = "bf16, weight_quant int4-g32", .quant = "int4-g32"},
                             {.name = "mxfp4", .expert_format = EP_WEIGHTS_MXFP4},
                             {.name = "GGUF Q4_0", .is_gguf = true}};

static void put_count(gguf_writer *w, const char *name, uint32_t value)
{
    gguf_put_key(w, name, GGUF_U32, 4, value);
}

static void put_head(gguf_writer *w)
{
    static const char *const tensors[] = {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight",
                                          "blk.0.ffn_down_exps.weight"};
    w->count = 0;
    gguf_put_head(w, 3, EP_ARRAY_COUNT(tensors), 6);
    gguf_put_text(w, "general.architecture");
    gguf_put(w, 4, GGUF_TEXT);
    gguf_put_text(w, "qwen3moe");
    put_count(w, "qwen3moe.embedding_length", HIDDEN);
    put_count(w, "qwen3moe.expert_feed_forward_length", INNER);
    put_count(w, "qwen3moe.block_count", 1);
    put_count(w, "qwen3moe.expert_count", EXPERTS);
    put_count(w, "qwen3moe.expert_used_count", 2);
    for (uint32_t i = 0; i < EP_ARRAY_COUNT(tensors); i++) {
        const bool is_down = i == 2;
        const uint64_t dims[3] = {is_down ? INNER : HIDDEN, is_down ? HIDDEN : INNER, EXPERTS};
        gguf_put_tensor(w, tensors[i], 3, dims, GGUF_Q4_0,
                        i * (uint64_t)EXPERTS * HIDDEN * INNER / BLOCK_COLUMNS * BLOCK_BYTES);
    }
    while (w->count % 32 != 0) {
        gguf_put(w, 1, 0);
    }
}

/* Any codes, scales of f16 between 1/64 and 1/32. */
static void write_gguf(const char *path)
{
    static gguf_writer w;
    static uint8_t row[HIDDEN / BLOCK_COLUMNS * BLOCK_BYTES];
    const size_t rows = 3ull * EXPERTS * INNER;
    uint64_t state = 1;
    FILE *file = fopen(path, "we");
    EP_ASSERT(file != NULL);
    put_head(&w);
    EP_ASSERT(fwrite(w.bytes, 1, w.count, file) == w.count);
    for (size_t r = 0; r < rows; r++) {
        for (size_t at = 0; at < sizeof(row); at++) {
            row[at] = at % BLOCK_BYTES == 1 ? 0x24 : (uint8_t)(ep_splitmix64(&state) >> 56);
        }
        EP_ASSERT(fwrite(row, 1, sizeof(row), file) == sizeof(row));
    }
    EP_ASSERT(fclose(file) == 0);
}

static void write_model(const form *f, const char *dir, char *path, size_t path_bytes)
{
    ep_error e;
    ep_fixture_config fixture = ep_fixture_layer(HIDDEN, INNER, EXPERTS, 2);
    fixture.distinct_experts = 2;
    fixture.expert_format = f->expert_format;
    ep_fixture_remove(dir);
    EP_ASSERT(mkdir(dir, 0700) == 0);
    snprintf(path, path_bytes, "%s/%s", dir, f->is_gguf ? "model.gguf" : "model.safetensors");
    if (f->is_gguf) {
        write_gguf(path);
    } else if (ep_fixture_write(&fixture, dir, &e) != EP_OK) {
        bench_fail("writing a checkpoint", e.text);
    }
}

static uint64_t read_file(const char *path)
{
    static uint8_t piece[PIECE_BYTES];
    uint64_t bytes = 0;
    ssize_t n;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    EP_ASSERT(fd >= 0);
    while ((n = read(fd, piece, sizeof(piece))) > 0) {
        bytes += (uint64_t)n;
    }
    EP_ASSERT(n == 0);
    close(fd);
    return bytes;
}

static double cpu_us(void)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1e6 +
           (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

/* Until all experts are there. */
static double load_us(const form *f, const char *dir, double *out_cpu_us)
{
    ep_error e;
    ep_checkpoint *checkpoint;
    ep_backend *backend;
    ep_weight_store *store;
    uint32_t slot;
    uint8_t wanted[EXPERTS];
    const ep_backend_config config = {.numerics = EP_NUMERICS_AUTO};
    if (ep_checkpoint_open(dir, &checkpoint, &e) != EP_OK) {
        bench_fail("opening a checkpoint", e.text);
    }
    EP_ASSERT(f->quant == NULL ||
              ep_checkpoint_quantize(checkpoint, ep_weight_quant_find(f->quant), &e) == EP_OK);
    EP_ASSERT(ep_backend_by_name("cpu")->open(&config, &backend, &e) == EP_OK);
    const ep_model_info *info = ep_checkpoint_info(checkpoint);
    const ep_weight_layer layer = {.model = "bench",
                                   .checkpoint = checkpoint,
                                   .format = info->format,
                                   .shape = info->moe_layers[0]};
    const ep_weight_store_config sc = {.backends = &backend,
                                       .backends_count = 1,
                                       .load_threads = ep_host_cpus(),
                                       .on_change = store_on_change};
    EP_ASSERT(ep_weight_store_create(&sc, &store, &e) == EP_OK);
    EP_ASSERT(ep_weight_store_add_layer(store, &layer, &slot, &e) == EP_OK);
    memset(wanted, 1, sizeof(wanted));
    const double cpu = cpu_us();
    const double begin = bench_now_us();
    EP_ASSERT(ep_weight_store_start(store, &e) == EP_OK);
    ep_weight_store_want(store, 0, wanted);
    EP_ASSERT(store_settle(store).resident_count == EXPERTS);
    const double us = bench_now_us() - begin;
    *out_cpu_us = cpu_us() - cpu;
    ep_weight_store_destroy(store);
    backend->ops->close(backend);
    ep_checkpoint_close(checkpoint);
    return us;
}

void store_bench_loads(bench_report *report, const char *dir)
{
    for (size_t i = 0; i < EP_ARRAY_COUNT(forms); i++) {
        const form *f = &forms[i];
        double loads[ROUNDS], reads[ROUNDS], shares[ROUNDS], cpu[ROUNDS];
        char path[EP_FIXTURE_PATH_BYTES + 32];
        write_model(f, dir, path, sizeof(path));
        const double gigabytes = (double)read_file(path) * 1e-9;
        for (uint32_t r = 0; r < ROUNDS; r++) {
            const double begin = bench_now_us();
            (void)read_file(path);
            reads[r] = bench_now_us() - begin;
            loads[r] = load_us(f, dir, &cpu[r]);
            shares[r] = reads[r] / loads[r];
            cpu[r] /= gigabytes * 1e6;
            printf(
                "%s: %.2f GB loaded in %.0f ms, %.2f CPU seconds for each GB; reading alone %.0f "
                "ms\n",
                f->name, gigabytes, loads[r] / 1e3, cpu[r], reads[r] / 1e3);
            fflush(stdout);
        }
        bench_row row =
            bench_value(bench_quantile(loads, ROUNDS, 0.5) / 1e3, "ms", BENCH_HIGHER, (double)NAN);
        row.limit = bench_quantile(reads, ROUNDS, 0.5) / 1e3;
        row.ratio = bench_quantile(shares, ROUNDS, 0.5);
        bench_report_add(report, &row, "first start, %s: part of reading the file alone", f->name);
        row = bench_value(bench_quantile(cpu, ROUNDS, 0.5), "s/GB", BENCH_LOWER, (double)NAN);
        bench_report_add(report, &row, "first start, %s: CPU time", f->name);
    }
}
