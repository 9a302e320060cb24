/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/status_page.h"

#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/printable.h"
#include "coordinator/status_json.h"

#define STATUS_AGE_MS 500 /* bounds how often readers take the service's lock */
#define HASH_BYTES 64     /* "sha256-" and a SHA-256 in base64 */
#define POLICY_BYTES 512
#define REASON_BYTES 1024

extern const char ep_coordinator_status_page_html[];
extern const char ep_coordinator_status_page_js[];

/* One status, shared by concurrent readers. */
typedef struct shared_text {
    uint32_t refs;
    char *text;
} shared_text;

struct ep_status_page {
    ep_coordinator_service *service;
    char *html;
    char policy[POLICY_BYTES];
    shared_text *status; /* NULL: not requested yet */
    uint64_t status_ns;
};

static void shared_unref(void *arg)
{
    shared_text *shared = arg;
    if (shared != NULL && --shared->refs == 0) {
        free(shared->text);
        free(shared);
    }
}

static bool hash(const char *text, size_t bytes, char out_hash[HASH_BYTES])
{
    uint8_t digest[EVP_MAX_MD_SIZE];
    unsigned digest_bytes = 0;
    if (EVP_Digest(text, bytes, digest, &digest_bytes, EVP_sha256(), NULL) != 1) {
        return false;
    }
    int used = snprintf(out_hash, HASH_BYTES, "sha256-");
    EVP_EncodeBlock((unsigned char *)out_hash + used, digest, (int)digest_bytes);
    return true;
}

/* The content security policy: only the page's own script and style, by hash, and data only from
 * this port. */
static bool make_policy(const char *html, const char *script, char out_policy[POLICY_BYTES])
{
    char script_hash[HASH_BYTES];
    char style_hash[HASH_BYTES];
    const char *style = strstr(html, "<style>");
    const char *style_end = strstr(html, "</style>");
    EP_ASSERT(style != NULL && style_end != NULL);
    style += strlen("<style>");
    if (!hash(script, strlen(script), script_hash) ||
        !hash(style, (size_t)(style_end - style), style_hash)) {
        return false;
    }
    snprintf(
        out_policy, POLICY_BYTES,
        "default-src 'none'; script-src '%s'; style-src '%s'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; "
        "frame-ancestors 'none'",
        script_hash, style_hash);
    return true;
}

ep_err ep_status_page_create(ep_coordinator_service *service, ep_status_page **out_page)
{
    ep_status_page *page = calloc(1, sizeof(*page));
    if (page == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    page->service = service;
    if (asprintf(&page->html, "%s<script>%s</script>\n</body>\n</html>\n",
                 ep_coordinator_status_page_html, ep_coordinator_status_page_js) < 0) {
        page->html = NULL;
    }
    if (page->html == NULL || !make_policy(ep_coordinator_status_page_html,
                                           ep_coordinator_status_page_js, page->policy)) {
        ep_status_page_destroy(page);
        return EP_ERR_NO_MEMORY;
    }
    *out_page = page;
    return EP_OK;
}

void ep_status_page_destroy(ep_status_page *page)
{
    if (page != NULL) {
        shared_unref(page->status);
        free(page->html);
        free(page);
    }
}

/* ---- answers ---- */

static void answer_json(char *taken_text, void (*release)(void *arg), void *release_arg,
                        ep_probe_page *out)
{
    *out = (ep_probe_page){.status = 200,
                           .type = "application/json",
                           .body = taken_text,
                           .bytes = strlen(taken_text),
                           .release = release,
                           .release_arg = release_arg};
}

static void answer_error(unsigned status, const char *reason, ep_probe_page *out)
{
    char *text = NULL;
    if (asprintf(&text, "%s\n", reason) < 0) {
        text = NULL;
    }
    *out = (ep_probe_page){.status = text != NULL ? status : 503,
                           .type = "text/plain; charset=utf-8",
                           .body = text != NULL ? text : "out of memory\n",
                           .bytes = strlen(text != NULL ? text : "out of memory\n"),
                           .release = text != NULL ? free : NULL,
                           .release_arg = text};
}

static void renew_status(ep_status_page *page, bool stopping, uint64_t now_ns)
{
    ep_routing_table *table = NULL;
    Expertd__V1__ClusterStatusReply *cluster = ep_coordinator_service_status(page->service, &table);
    char *text =
        cluster != NULL ? ep_status_json(cluster, table, stopping, (uint64_t)time(NULL)) : NULL;
    shared_text *shared = text != NULL ? malloc(sizeof(*shared)) : NULL;
    if (cluster != NULL) {
        protobuf_c_message_free_unpacked(&cluster->base, NULL);
    }
    ep_routing_table_unref(table);
    shared_unref(page->status);
    page->status = shared;
    page->status_ns = now_ns;
    if (shared == NULL) {
        free(text);
        return;
    }
    *shared = (shared_text){.refs = 1, .text = text};
}

static void answer_status(ep_status_page *page, bool stopping, ep_probe_page *out)
{
    const uint64_t now_ns = ep_clock_now_ns();
    if (page->status == NULL || now_ns - page->status_ns >= STATUS_AGE_MS * EP_NS_PER_MS) {
        renew_status(page, stopping, now_ns);
    }
    if (page->status == NULL) {
        answer_error(503, "out of memory", out);
        return;
    }
    page->status->refs++;
    answer_json(page->status->text, shared_unref, page->status, out);
}

/* The named version; without a name the default one, or the only one. */
static const ep_routing_model *find_model(const ep_routing_table *table, const char *name,
                                          const char *version, uint32_t *out_index)
{
    const ep_routing_model *found = NULL;
    uint32_t count = 0;
    for (uint32_t m = 0; table != NULL && m < table->models_count; m++) {
        const ep_routing_model *model = &table->models[m];
        bool fits = strcmp(model->name, name) == 0 &&
                    (version[0] == 0 || strcmp(model->version, version) == 0);
        if (fits && (found == NULL || model->is_default)) {
            found = model;
            *out_index = m;
        }
        count += fits;
    }
    return count <= 1 || (found != NULL && found->is_default) ? found : NULL;
}

static void describe_models(const ep_routing_table *table, char *out, size_t bytes)
{
    size_t used = 0;
    snprintf(out, bytes, "none yet");
    for (uint32_t m = 0; table != NULL && m < table->models_count && used < bytes; m++) {
        used += (size_t)snprintf(out + used, bytes - used, "%s%s %s", m > 0 ? ", " : "",
                                 table->models[m].name, table->models[m].version);
    }
}

/* Finds the requested layer. NULL: out has the answer with the reason. */
static const ep_routing_layer *find_layer(const ep_routing_table *table,
                                          const ep_probe_query *query, ep_probe_page *out)
{
    char reason[REASON_BYTES];
    char known[REASON_BYTES / 2];
    char said[EP_TEXT_ESCAPED_BYTES(EP_MODEL_NAME_BYTES)];
    const char *name = ep_probe_query_value(query, "model");
    const char *version = ep_probe_query_value(query, "version");
    const char *number = ep_probe_query_value(query, "layer");
    char *end = NULL;
    const unsigned long long layer =
        number != NULL && number[0] >= '0' && number[0] <= '9' ? strtoull(number, &end, 10) : 0;
    uint32_t index = 0;
    if (name == NULL || name[0] == 0 || end == NULL || *end != 0 || layer > UINT32_MAX) {
        answer_error(400,
                     "give ?model=NAME&layer=N, and &version=V where a model has several; "
                     "/status.json lists them",
                     out);
        return NULL;
    }
    const ep_routing_model *model = find_model(table, name, version != NULL ? version : "", &index);
    if (model == NULL) {
        describe_models(table, known, sizeof(known));
        snprintf(reason, sizeof(reason),
                 "no model '%.120s' in version '%.40s' is in the table, or its version is not "
                 "said; there are: %s",
                 ep_text_escape(name, said, sizeof(said)),
                 version != NULL && ep_text_printable_bytes(version, false) == strlen(version)
                     ? version
                     : "",
                 known);
        answer_error(404, reason, out);
        return NULL;
    }
    const ep_routing_layer *found = ep_routing_table_find_layer(table, index, (uint32_t)layer);
    if (found == NULL) {
        snprintf(reason, sizeof(reason),
                 "model %s %s has no layer %llu with experts; /status.json lists its layers",
                 model->name, model->version, layer);
        answer_error(404, reason, out);
    }
    return found;
}

static const ep_load_layer *find_load(const ep_load_layer *layers, size_t count,
                                      const ep_routing_model *model, uint32_t layer)
{
    for (size_t l = 0; l < count; l++) {
        if (layers[l].layer == layer && strcmp(layers[l].model, model->name) == 0 &&
            strcmp(layers[l].version, model->version) == 0) {
            return &layers[l];
        }
    }
    return NULL;
}

static void answer_layer(ep_status_page *page, const ep_routing_table *table,
                         const ep_routing_layer *layer, ep_probe_page *out)
{
    const ep_routing_model *model = &table->models[layer->model_index];
    ep_coordinator_layer_view *view = calloc(1, sizeof(*view));
    ep_load_layer *loads = NULL;
    size_t loads_count = 0;
    char *text = NULL;
    if (view != NULL &&
        ep_load_sums_read(ep_coordinator_service_loads(page->service), &loads, &loads_count) ==
            EP_OK &&
        ep_coordinator_service_layer(page->service, model->name, model->version, layer->shape.layer,
                                     view)) {
        text = ep_placement_json(table, layer, view,
                                 find_load(loads, loads_count, model, layer->shape.layer));
    }
    ep_load_layers_free(loads, loads_count);
    if (view != NULL) {
        free(view->heat);
    }
    free(view);
    if (text != NULL) {
        answer_json(text, free, text, out);
    } else {
        answer_error(503, "out of memory", out);
    }
}

bool ep_status_page_answer(ep_status_page *page, bool stopping, const char *path,
                           const ep_probe_query *query, ep_probe_page *out_answer)
{
    if (strcmp(path, "/status") == 0) {
        *out_answer = (ep_probe_page){.status = 200,
                                      .type = "text/html; charset=utf-8",
                                      .policy = page->policy,
                                      .body = page->html,
                                      .bytes = strlen(page->html)};
        return true;
    }
    if (strcmp(path, "/status.json") == 0) {
        answer_status(page, stopping, out_answer);
        return true;
    }
    if (strcmp(path, "/placement.json") == 0) {
        ep_routing_table *table = ep_coordinator_service_table(page->service);
        const ep_routing_layer *layer = find_layer(table, query, out_answer);
        if (layer != NULL) {
            answer_layer(page, table, layer, out_answer);
        }
        ep_routing_table_unref(table);
        return true;
    }
    return false;
}
