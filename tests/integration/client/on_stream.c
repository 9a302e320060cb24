/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls on tensors of the emulated device, whose streams are slow at random: every row is right, in
 * the order of the streams' other work, and every failure is told.
 *     well HOME FIRST COUNT    with COUNT seeds of delays
 *     find HOME COUNT [TEXT]   for a mutant: within COUNT seeds the scene ends otherwise, saying
 *                              TEXT
 *     faults HOME FIRST COUNT  a task fails, or the device is lost from there on, at COUNT places:
 *                              no wrong row, and no run that does not end
 * Each scene is a process of its own.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/random.h"
#include "harness.h"
#include "support/caller_device.h"

enum { TOP_K = 3, FLIGHT = 6, UNWRITTEN = 0x5a };

typedef struct job {
    batch b;
    void *x;
    void *ids;
    void *scales;
    void *out;
    ep_call *call;
    const uint8_t *got; /* what a stream found in out */
} job;

static harness h;
static uint64_t random_state;
static int failures;
static unsigned seconds_max = 100;
static bool is_faults;
static ep_error error;
static ep_moe_result result;

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "scene: %s: %s\n", what, why);
    failures++;
}

static void expect(bool good, const char *what, const char *why)
{
    if (!good) {
        fail(what, why);
    }
}

static ep_acl_stream any_stream(void)
{
    return device_streams[ep_splitmix64(&random_state) % 2];
}

/* ---- one call ---- */

static void job_open(job *j, uint32_t tokens, ep_moe_mode mode)
{
    batch_make(&j->b, &h, tokens, TOP_K, ep_splitmix64(&random_state));
    j->x = device_alloc(j->b.out_bytes);
    j->ids = device_alloc((size_t)tokens * TOP_K * sizeof(*j->b.ids));
    j->scales = device_alloc((size_t)tokens * TOP_K * sizeof(*j->b.scales));
    j->out = device_alloc(j->b.out_bytes);
    ep_moe_args args = j->b.args;
    args.mode = mode;
    args.x = device_tensor(&args.x, j->x, NULL);
    args.expert_ids = device_tensor(&args.expert_ids, j->ids, NULL);
    args.expert_scales = device_tensor(&args.expert_scales, j->scales, NULL);
    const ep_tensor out = device_tensor(&j->b.out_tensor, j->out, NULL);
    if (ep_call_create(h.client, &args, &out, &j->call, &error) != EP_OK) {
        fprintf(stderr, "scene: create: %s\n", error.text);
        exit(1);
    }
}

static void job_close(job *j)
{
    ep_call_destroy(j->call);
    batch_free(&j->b);
}

/* The stream makes what the call reads, and clears what it writes. */
static void put_inputs(const job *j, ep_acl_stream stream)
{
    uint8_t *unwritten = malloc(j->b.out_bytes + 1);
    memset(unwritten, UNWRITTEN, j->b.out_bytes);
    device_put(stream, j->out, unwritten, j->b.out_bytes);
    device_put(stream, j->x, j->b.x, j->b.out_bytes);
    device_put(stream, j->scales, j->b.scales, (size_t)j->b.tokens * TOP_K * sizeof(*j->b.scales));
    device_put(stream, j->ids, j->b.ids, (size_t)j->b.tokens * TOP_K * sizeof(*j->b.ids));
    free(unwritten);
}

/* What comes behind the call in the stream takes its buffers for something else. */
static void spoil_inputs(const job *j, ep_acl_stream stream)
{
    uint8_t *other = malloc(j->b.out_bytes + (size_t)j->b.tokens * TOP_K * sizeof(*j->b.ids));
    memset(other, 0x7f,
           j->b.out_bytes + (size_t)j->b.tokens * TOP_K * sizeof(*j->b.ids)); /* no expert has such
                                                                                 a number */
    device_put(stream, j->x, other, j->b.out_bytes);
    device_put(stream, j->ids, other, (size_t)j->b.tokens * TOP_K * sizeof(*j->b.ids));
    device_put(stream, j->out, other, j->b.out_bytes);
    free(other);
}

static void begin(job *j, uint32_t n_active, ep_acl_stream stream)
{
    if (ep_moe_begin_on_stream(j->call, n_active, stream, &error) != EP_OK) {
        fail("begin", error.text);
    }
}

static void finish(job *j, ep_acl_stream stream)
{
    if (ep_moe_finish_on_stream(j->call, stream, &error) != EP_OK) {
        fail("finish", error.text);
    }
    j->got = device_get(stream, j->out, j->b.out_bytes);
}

static void collect(const job *j, ep_err wanted, const char *text)
{
    const ep_err err = ep_call_finish(j->call, &result);
    if (err != wanted || strstr(result.error.text, text) == NULL) {
        fprintf(stderr, "scene: a run ended with %s, not %s: '%s', not '%s'\n", ep_err_name(err),
                ep_err_name(wanted), result.error.text, text);
        failures++;
    }
}

/* The streams have passed the call. */
static void check(const job *j, uint32_t n_active, const char *what)
{
    const size_t row = j->b.out_bytes / j->b.tokens;
    expect(memcmp(j->got, j->b.expected, n_active * row) == 0, what,
           "rows differ from the plain loop's");
    for (size_t i = n_active * row; i < j->b.out_bytes; i++) {
        if (j->got[i] != UNWRITTEN) {
            fail(what, "a row after n_active is written");
            return;
        }
    }
}

static void check_nan(const job *j, const char *what)
{
    for (size_t i = 0; i < j->b.out_bytes; i++) {
        if (j->got[i] != 0xff) {
            fail(what, "the rows of a run that failed are not NaN");
            return;
        }
    }
}

static void set_fault(fake_fault fault, ep_err code)
{
    for (uint32_t n = 0; n < h.nodes_count; n++) {
        fake_node_set_fault(h.nodes[n], fault, code, 0);
    }
}

static void release(void)
{
    set_fault(FAKE_OK, EP_OK);
    for (uint32_t n = 0; n < h.nodes_count; n++) {
        fake_node_release(h.nodes[n]);
    }
}

/* ---- scenes ---- */

static void rows(void)
{
    static const uint32_t tokens[] = {1, 7, 64, 150};
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        job j;
        job_open(&j, tokens[i], i % 2 == 0 ? EP_MOE_AUTO : EP_MOE_PREFILL);
        for (uint32_t n = tokens[i]; n > 0; n /= 3) {
            ep_acl_stream stream = any_stream();
            put_inputs(&j, stream);
            begin(&j, n, stream);
            finish(&j, stream);
            collect(&j, EP_OK, "");
            device_sync(stream);
            check(&j, n, "rows");
        }
        job_close(&j);
    }
}

/* The host waits for nothing but the run: inputs are made in front of the call and spoilt behind
 * it, by the streams. */
static void order(void)
{
    job j;
    enum { ROUNDS = 8 };
    const uint8_t *got[ROUNDS];
    job_open(&j, 20, EP_MOE_AUTO);
    ep_acl_stream last = device_streams[0];
    for (int i = 0; i < ROUNDS; i++) {
        ep_acl_stream first = any_stream();
        device_order(first, last);
        last = any_stream();
        put_inputs(&j, first);
        begin(&j, j.b.tokens, first);
        finish(&j, last);
        got[i] = j.got;
        spoil_inputs(&j, last);
        collect(&j, EP_OK, "");
    }
    device_sync(last);
    for (int i = 0; i < ROUNDS; i++) {
        j.got = got[i];
        check(&j, j.b.tokens, "order");
    }
    job_close(&j);
}

/* A result that a slow stream has not taken yet outlives the next run's beginning. */
static void two_results(void)
{
    batch b;
    batch_make(&b, &h, 9, TOP_K, ep_splitmix64(&random_state));
    void *x = device_alloc(b.out_bytes);
    void *out = device_alloc(b.out_bytes);
    void *other = device_alloc(2);
    ep_moe_args args = b.args; /* ids and scales are the host's */
    ep_call *call = NULL;
    args.x = device_tensor(&args.x, x, NULL);
    const ep_tensor out_tensor = device_tensor(&b.out_tensor, out, NULL);
    if (ep_call_create(h.client, &args, &out_tensor, &call, &error) != EP_OK) {
        fprintf(stderr, "scene: create: %s\n", error.text);
        exit(1);
    }
    job j = {.b = b, .x = x, .out = out, .call = call};
    device_put(device_streams[0], x, b.x, b.out_bytes);
    begin(&j, b.tokens, device_streams[0]);
    device_close_gate(device_streams[1]);
    finish(&j, device_streams[1]);
    collect(&j, EP_OK, "");
    const uint8_t *first = j.got;
    uint8_t *first_expected = malloc(b.out_bytes);
    memcpy(first_expected, b.expected, b.out_bytes);
    for (uint32_t i = 0; i < b.tokens * TOP_K; i++) {
        b.scales[i] = 2.0f;
    }
    batch_expect(&b, &h);
    begin(&j, b.tokens, device_streams[0]);
    for (int i = 0; i < 40; i++) { /* time for the run, if it does not wait */
        device_put(device_streams[2], other, b.x, 2);
    }
    device_open_gate(device_streams[2]);
    finish(&j, device_streams[1]);
    collect(&j, EP_OK, "");
    device_sync(device_streams[1]);
    expect(memcmp(first, first_expected, b.out_bytes) == 0, "two results",
           "the first is not what it was");
    check(&j, b.tokens, "two results");
    free(first_expected);
    job_close(&j);
}

/* Nobody waits for a run that takes long: neither the host nor the stream's work that is not behind
 * it. */
static void hang(void)
{
    job j;
    job_open(&j, 12, EP_MOE_AUTO);
    for (int i = 0; i < 2; i++) { /* runs whose result no stream waits for */
        put_inputs(&j, device_streams[0]);
        begin(&j, j.b.tokens, device_streams[0]);
        collect(&j, EP_OK, "");
    }
    set_fault(FAKE_HANG, EP_OK);
    put_inputs(&j, device_streams[0]);
    begin(&j, j.b.tokens, device_streams[0]);
    ep_acl_event between = device_mark(device_streams[0]);
    finish(&j, device_streams[0]);
    ep_acl_event behind = device_mark(device_streams[0]);
    fake_node_wait_held(h.nodes[0]);
    DEVICE_MUST(device_acl.aclrtSynchronizeEventWithTimeout(between, -1));
    device_put(device_streams[1], j.scales, j.b.scales, 4);
    device_sync(device_streams[1]);
    expect(!device_has_passed(behind), "hang", "the stream has passed a result that is not there");
    release();
    device_sync(device_streams[0]);
    check(&j, j.b.tokens, "hang");
    collect(&j, EP_OK, "");
    job_close(&j);
}

static void flight(void)
{
    static job jobs[FLIGHT];
    set_fault(FAKE_HANG, EP_OK);
    for (int i = 0; i < FLIGHT; i++) {
        job_open(&jobs[i], 3 + 4 * (uint32_t)i, EP_MOE_AUTO);
        put_inputs(&jobs[i], device_streams[i % 2]);
        begin(&jobs[i], jobs[i].b.tokens, device_streams[i % 2]);
    }
    for (int i = FLIGHT; i-- > 0;) { /* the last first */
        finish(&jobs[i], device_streams[i % 2]);
        spoil_inputs(&jobs[i], device_streams[i % 2]);
    }
    fake_node_wait_held(h.nodes[0]);
    release();
    for (int i = 0; i < FLIGHT; i++) {
        collect(&jobs[i], EP_OK, "");
    }
    device_sync(device_streams[0]);
    device_sync(device_streams[1]);
    for (int i = 0; i < FLIGHT; i++) {
        check(&jobs[i], jobs[i].b.tokens, "flight");
        job_close(&jobs[i]);
    }
}

static void cancel(void)
{
    job j;
    job_open(&j, 5, EP_MOE_AUTO);
    const uint64_t before = fake_node_requests(h.nodes[0]) + fake_node_requests(h.nodes[1]);
    put_inputs(&j, device_streams[0]);
    device_close_gate(device_streams[0]); /* its inputs do not come before it is cancelled */
    begin(&j, j.b.tokens, device_streams[0]);
    finish(&j, device_streams[0]);
    ep_call_cancel(j.call);
    device_open_gate(device_streams[1]);
    collect(&j, EP_ERR_CANCELLED, "before its inputs");
    device_sync(device_streams[0]);
    check_nan(&j, "cancelled early");
    expect(fake_node_requests(h.nodes[0]) + fake_node_requests(h.nodes[1]) == before, "cancel",
           "a cancelled run was sent");

    set_fault(FAKE_HANG, EP_OK);
    put_inputs(&j, device_streams[0]);
    begin(&j, j.b.tokens, device_streams[0]);
    finish(&j, device_streams[0]);
    fake_node_wait_held(h.nodes[0]);
    ep_call_cancel(j.call);
    collect(&j, EP_ERR_CANCELLED, "");
    device_sync(device_streams[0]);
    check_nan(&j, "cancelled late");
    release();

    for (int i = 0; i < 10; i++) { /* at any time */
        put_inputs(&j, device_streams[0]);
        begin(&j, j.b.tokens, device_streams[0]);
        finish(&j, device_streams[0]);
        ep_call_cancel(j.call);
        const ep_err err = ep_call_finish(j.call, &result);
        device_sync(device_streams[0]);
        if (err == EP_OK) {
            check(&j, j.b.tokens, "cancelled too late");
        } else {
            expect(err == EP_ERR_CANCELLED, "cancel", result.error.text);
            check_nan(&j, "cancelled some time");
        }
    }
    job_close(&j);
}

static void run_all(job *j, ep_err wanted, const char *text, const char *what)
{
    begin(j, j->b.tokens, device_streams[0]);
    finish(j, device_streams[0]);
    collect(j, wanted, text);
    device_sync(device_streams[0]);
    if (wanted == EP_OK) {
        check(j, j->b.tokens, what);
    } else {
        check_nan(j, what);
    }
}

static void fail_and_go_on(void)
{
    job j;
    job_open(&j, 6, EP_MOE_AUTO);
    put_inputs(&j, device_streams[0]);
    run_all(&j, EP_OK, "", "before errors");
    put_inputs(&j, device_streams[0]);
    spoil_inputs(&j, device_streams[0]);
    run_all(&j, EP_ERR_INVALID_ARGUMENT, "2139062143", "bad ids");
    set_fault(FAKE_ERROR, EP_ERR_UNIMPLEMENTED);
    put_inputs(&j, device_streams[0]);
    run_all(&j, EP_ERR_UNIMPLEMENTED, "", "a node's error");
    set_fault(FAKE_OK, EP_OK);
    put_inputs(&j, device_streams[0]);
    run_all(&j, EP_OK, "", "after errors");
    job_close(&j);
}

/* With a run at any stage, and a client that goes first. */
static void destroy(void)
{
    for (int i = 0; i < 6; i++) {
        job j;
        job_open(&j, 8, EP_MOE_AUTO);
        put_inputs(&j, device_streams[0]);
        begin(&j, j.b.tokens, device_streams[0]);
        if (i % 2 == 0) {
            finish(&j, device_streams[0]);
        }
        job_close(&j);
    }
    job j;
    job unfinished;
    job_open(&unfinished, 8, EP_MOE_AUTO);
    put_inputs(&unfinished, device_streams[1]);
    begin(&unfinished, 8, device_streams[1]);
    job_open(&j, 8, EP_MOE_AUTO);
    put_inputs(&j, device_streams[0]);
    begin(&j, j.b.tokens, device_streams[0]);
    finish(&j, device_streams[0]);
    harness_close(&h);
    job_close(&unfinished);
    const ep_err err = ep_call_finish(j.call, &result);
    expect(err == EP_OK || err == EP_ERR_CANCELLED || err == EP_ERR_CLOSED, "a client that is gone",
           result.error.text);
    device_sync(device_streams[0]);
    job_close(&j);
}

static void open_service(void)
{
    HARNESS_OPEN(&h, .scheme = "loopback", .nodes_count = 2, .copies = 1, .shared_experts = 1,
                 .chunk_bytes_max = 16384, .window_tokens = 50);
}

static void run_well_scene(void)
{
    open_service();
    rows();
    order();
    two_results();
    hang();
    flight();
    cancel();
    fail_and_go_on();
    destroy();
    device_close();
}

/* ---- a device that is lost ---- */

/* With the inputs under way, or with the run; another call finds it so. Nothing of the device is
 * given back. */
static void run_lost_scene(uint64_t seed, const char *file)
{
    job j;
    job other;
    const bool is_early = seed % 2 == 0;
    open_service();
    job_open(&j, 5, EP_MOE_AUTO);
    job_open(&other, 5, EP_MOE_AUTO);
    put_inputs(&j, device_streams[0]);
    if (is_early) {
        device_close_gate(device_streams[0]);
    } else {
        set_fault(FAKE_HANG, EP_OK);
    }
    begin(&j, j.b.tokens, device_streams[0]);
    if (seed % 4 < 2) {
        finish(&j, device_streams[0]);
    }
    if (!is_early) {
        fake_node_wait_held(h.nodes[0]);
    }
    FILE *mark = fopen(file, "w");
    fclose(mark);
    release();
    collect(&j, EP_ERR_DEVICE_LOST, "device 0: ");
    expect(strstr(result.error.text, "507010") != NULL, "lost", result.error.text);
    const ep_err err = ep_moe_begin_on_stream(other.call, 5, device_streams[1], &error);
    expect(err == EP_ERR_DEVICE_LOST, "begin on a lost device", error.text);
    job_close(&j);
    job_close(&other);
    harness_close(&h);
    unlink(file);
}

/* The first copy of the inputs fails: nothing is sent. */
static void run_faulty_scene(void)
{
    job j;
    open_service();
    job_open(&j, 5, EP_MOE_AUTO);
    begin(&j, j.b.tokens, device_streams[0]);
    collect(&j, EP_ERR_DEVICE_LOST, "an exception in a core");
    expect(fake_node_requests(h.nodes[0]) + fake_node_requests(h.nodes[1]) == 0, "faulty",
           "inputs that did not come were sent");
    job_close(&j);
    harness_close(&h);
}

/* Something of the device fails, ours or the program's own: a run that is well, and whose stream
 * is, has its rows. */
static void run_fault_scene(const char *home, uint64_t at)
{
    job j;
    char number[32];
    snprintf(number, sizeof(number), "%llu", (unsigned long long)(at / 2 + 1));
    setenv(at % 2 == 0 ? "EP_CANN_FAULT_AT" : "EP_CANN_LOST_AT", number, 1);
    alarm(seconds_max);
    device_open(home, at, "100");
    open_service();
    job_open(&j, 6, EP_MOE_AUTO);
    device_tolerates = true;
    for (int i = 0; i < 3; i++) {
        put_inputs(&j, device_streams[0]);
        ep_err err = ep_moe_begin_on_stream(j.call, 6, device_streams[0], &error);
        expect(err == EP_OK || error.text[0] != '\0', "faults", "begin failed without a word");
        if (err != EP_OK) {
            break;
        }
        const bool is_taken = ep_moe_finish_on_stream(j.call, device_streams[0], &error) == EP_OK;
        j.got = device_get(device_streams[0], j.out, j.b.out_bytes);
        err = ep_call_finish(j.call, &result);
        expect(err == EP_OK || result.error.text[0] != '\0', "faults",
               "a run failed without a word");
        device_sync(device_streams[0]);
        if (is_taken && !device_failed && err == EP_OK) {
            check(&j, 6, "faults");
        } else if (is_taken && !device_failed) {
            check_nan(&j, "faults");
        }
        device_failed = false;
    }
    job_close(&j);
    harness_close(&h);
    _exit(failures != 0);
}

/* A copy that never ends: what it may still write to is left, and nobody waits for it for ever. */
static void run_hung_scene(void)
{
    job j;
    open_service();
    job_open(&j, 5, EP_MOE_AUTO);
    begin(&j, j.b.tokens, device_streams[0]);
    job_close(&j);
    harness_close(&h);
}

static void run_scene(const char *home, uint64_t seed)
{
    char file[64];
    snprintf(file, sizeof(file), "/tmp/on_stream.%d", (int)getpid());
    alarm(seconds_max);
    random_state = seed;
    setenv("EP_CANN_LOST_FILE", file, 1);
    if (seed % 8 == 3) {
        /* behind the record and the wait */
        setenv(seed == 11 ? "EP_CANN_HANG_AT" : "EP_CANN_FAULT_AT", "3", 1);
    }
    device_open(home, seed, seed % 3 == 0 ? "2000" : "200");
    if (seed == 11) {
        run_hung_scene();
        _exit(failures != 0);
    }
    if (seed % 8 == 3) {
        run_faulty_scene();
        _exit(failures != 0);
    }
    if (seed % 8 >= 4) {
        run_lost_scene(seed, file);
        _exit(failures != 0);
    }
    run_well_scene();
    exit(failures != 0);
}

/* ---- processes ---- */

static bool scene_is_well(const char *home, uint64_t seed, char *out_text, size_t bytes)
{
    int ends[2];
    int status = 0;
    size_t used = 0;
    fflush(NULL);
    const bool piped = pipe(ends) == 0;
    const pid_t child = piped ? fork() : -1;
    if (child < 0) {
        exit(2);
    }
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        if (is_faults) {
            run_fault_scene(home, seed);
        }
        run_scene(home, seed);
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], out_text + used, bytes - 1 - used)) > 0;) {
        used += (size_t)n < bytes - 1 - used - 1 ? (size_t)n : 0;
    }
    out_text[used] = '\0';
    close(ends[0]);
    if (waitpid(child, &status, 0) != child) {
        exit(2);
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int argc, char **argv)
{
    static char text[65536];
    const bool find = (argc == 4 || argc == 5) && strcmp(argv[1], "find") == 0;
    is_faults = argc == 5 && strcmp(argv[1], "faults") == 0;
    if (!find && !is_faults && (argc != 5 || strcmp(argv[1], "well") != 0)) {
        fprintf(stderr, "usage: %s well|faults HOME FIRST COUNT | find HOME COUNT [TEXT]\n",
                argv[0]);
        return 2;
    }
    seconds_max = find ? 15 : seconds_max; /* some mutants hang */
    const uint64_t first = find ? 1 : strtoull(argv[3], NULL, 0);
    const uint64_t count = strtoull(argv[find ? 3 : 4], NULL, 0);
    for (uint64_t seed = first; seed < first + count; seed++) {
        if (!scene_is_well(argv[2], seed, text, sizeof(text))) {
            const bool found = find && (argc == 4 || strstr(text, argv[4]) != NULL);
            fprintf(stderr, "seed %llu: %s\n%.3000s\n", (unsigned long long)seed,
                    found ? "found" : "ended otherwise", text);
            return found ? 0 : 1;
        }
    }
    printf("%llu seeds: %s\n", (unsigned long long)count, find ? "not found" : "well");
    return find;
}
