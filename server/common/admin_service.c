/* SPDX-License-Identifier: Apache-2.0 */
/* The Admin service: a queue from lane threads to the loop, and the answers. */
#include "common/admin_service.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "options/options_internal.h"
#include "common/version.h"
#include "moe/routing_table.h"

/* A call that waits for the loop. */
typedef struct order {
    /* Carries it out and gives the reply; the caller ends the call. */
    ep_err (*run)(ep_admin_service *self, const struct order *asked, ep_error *out_error);
    ep_rpc_call *call;
    union {
        const Expertd__V1__DrainRequest *drain;
        const Expertd__V1__DefaultVersionRequest *set_default;
        const Expertd__V1__PolicyRequest *policy;
        const Expertd__V1__PlanRequest *plan;
    } request; /* valid until the call is finished */
    union {
        Expertd__V1__DrainReply_Closure drain;
        Expertd__V1__ReloadReply_Closure reload;
        Expertd__V1__ConfigReply_Closure config;
        Expertd__V1__DefaultVersionReply_Closure set_default;
        Expertd__V1__PolicyReply_Closure policy;
        Expertd__V1__PlanReply_Closure plan;
    } reply;
    struct order *next;
} order;

struct ep_admin_service {
    Expertd__V1__Admin_Service rpc; /* first: handlers get a pointer to it */
    ep_admin_config config;
    ep_loop_task task;
    pthread_mutex_t lock;
    order *first; /* in order of arrival */
    order **last;
    bool stopped;
};

static void fail(ep_rpc_call *call, ep_err code, const char *text)
{
    ep_error error;
    ep_error_set(&error, code, "%s", text);
    ep_rpc_call_finish(call, code, &error);
}

/* ---- on the loop's thread ---- */

static ep_err do_drain(ep_admin_service *self, const order *asked, ep_error *out_error)
{
    Expertd__V1__DrainReply reply = EXPERTD__V1__DRAIN_REPLY__INIT;
    ep_admin_drain drain = {.state = ""};
    ep_err err = self->config.drain(self->config.arg, asked->request.drain->node,
                                    asked->request.drain->undo, &drain, out_error);
    if (err == EP_OK) {
        reply.node = drain.node;
        reply.state = (char *)(uintptr_t)drain.state;
        reply.copies_to_move = drain.copies_to_move;
        reply.note = drain.note;
        asked->reply.drain(&reply, asked->call);
    }
    return err;
}

static ep_err do_set_default(ep_admin_service *self, const order *asked, ep_error *out_error)
{
    const Expertd__V1__DefaultVersionRequest *request = asked->request.set_default;
    Expertd__V1__DefaultVersionReply reply = EXPERTD__V1__DEFAULT_VERSION_REPLY__INIT;
    char before[EP_VERSION_BYTES] = "";
    if (self->config.set_default == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "a node has no default versions: ask the coordinator");
    }
    ep_err err = self->config.set_default(self->config.arg, request->model, request->version,
                                          before, out_error);
    if (err == EP_OK) {
        reply.before = before;
        asked->reply.set_default(&reply, asked->call);
    }
    return err;
}

static ep_err do_policy(ep_admin_service *self, const order *asked, ep_error *out_error)
{
    return self->config.policy != NULL
               ? self->config.policy(self->config.arg, asked->request.policy, asked->reply.policy,
                                     asked->call, out_error)
               : ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                              "a node has no policy of its own: ask the coordinator");
}

static ep_err do_plan(ep_admin_service *self, const order *asked, ep_error *out_error)
{
    const Expertd__V1__PlanRequest *request = asked->request.plan;
    Expertd__V1__PlanReply *reply = NULL;
    if (self->config.plan == NULL) {
        return ep_error_set(out_error, EP_ERR_UNIMPLEMENTED,
                            "a node places nothing: ask the coordinator");
    }
    ep_err err = self->config.plan(self->config.arg, request->apply, request->with_copies, &reply,
                                   out_error);
    if (err == EP_OK) {
        asked->reply.plan(reply, asked->call);
        expertd__v1__plan_reply__free_unpacked(reply, NULL);
    }
    return err;
}

static ep_err do_reload(ep_admin_service *self, const order *asked, ep_error *out_error)
{
    Expertd__V1__ReloadReply reply = EXPERTD__V1__RELOAD_REPLY__INIT;
    ep_reload_report report = {.changed_count = 0};
    ep_err err = self->config.run_reload(self->config.arg, &report, out_error);
    if (err == EP_OK) {
        reply.changed = (char **)(uintptr_t)report.changed;
        reply.n_changed = report.changed_count;
        reply.need_restart = (char **)(uintptr_t)report.need_restart;
        reply.n_need_restart = report.need_restart_count;
        asked->reply.reload(&reply, asked->call);
    }
    return err;
}

/* Shows the value in force, not one that waits for a restart. */
static bool fill_entry(const ep_admin_config *config, size_t index, ep_admin_override *override,
                       Expertd__V1__ConfigEntry *out_entry)
{
    const ep_reload *reload = config->reload;
    ep_options_entry entry;
    const ep_option *option = &reload->started->spec->options[index];
    if (ep_options_entry_read(ep_reload_in_force(reload, option), index, &entry) != EP_OK) {
        return false;
    }
    expertd__v1__config_entry__init(out_entry);
    out_entry->key = (char *)(uintptr_t)option->name;
    out_entry->value = entry.value;
    out_entry->origin = (char *)(uintptr_t)entry.origin;
    out_entry->reloadable = option->reloadable;
    if (config->overrides != NULL && config->overrides(config->arg, option->name, override)) {
        free(entry.value);
        out_entry->value = strdup(override->value);
        out_entry->origin = override->origin;
    }
    return out_entry->value != NULL;
}

static ep_err do_config(ep_admin_service *self, const order *asked, ep_error *out_error)
{
    Expertd__V1__ConfigReply reply = EXPERTD__V1__CONFIG_REPLY__INIT;
    const ep_reload *reload = self->config.reload;
    size_t count = ep_options_count(reload->started);
    Expertd__V1__ConfigEntry *entries = calloc(count, sizeof(*entries));
    ep_admin_override *overrides = calloc(count, sizeof(*overrides));
    reply.entries = calloc(count, sizeof(*reply.entries));
    bool good = entries != NULL && overrides != NULL && reply.entries != NULL;
    while (good && reply.n_entries < count) {
        Expertd__V1__ConfigEntry *entry = &entries[reply.n_entries];
        good = fill_entry(&self->config, reply.n_entries, &overrides[reply.n_entries], entry);
        reply.entries[reply.n_entries] = entry;
        reply.n_entries += good;
    }
    if (good) {
        reply.program = (char *)(uintptr_t)reload->started->spec->program;
        reply.software = (char *)(uintptr_t)ep_version_software();
        asked->reply.config(&reply, asked->call);
    }
    for (size_t i = 0; i < reply.n_entries; i++) {
        free(entries[i].value);
    }
    free(entries);
    free(overrides);
    free(reply.entries);
    return good ? EP_OK : ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the reply");
}

static order *take_all(ep_admin_service *self, bool stop)
{
    pthread_mutex_lock(&self->lock);
    order *list = self->first;
    self->first = NULL;
    self->last = &self->first;
    self->stopped |= stop;
    pthread_mutex_unlock(&self->lock);
    return list;
}

static void on_task(void *arg)
{
    ep_admin_service *self = arg;
    order *next = NULL;
    ep_error error;
    for (order *asked = take_all(self, false); asked != NULL; asked = next) {
        next = asked->next;
        ep_error_clear(&error);
        const ep_err err = asked->run(self, asked, &error);
        ep_rpc_call_finish(asked->call, err, err != EP_OK ? &error : NULL);
        free(asked);
    }
}

/* ---- on lane threads ---- */

static void enqueue(Expertd__V1__Admin_Service *rpc, const order *asked)
{
    ep_admin_service *self = (ep_admin_service *)rpc;
    order *waiting = malloc(sizeof(*waiting));
    if (waiting == NULL) {
        fail(asked->call, EP_ERR_NO_MEMORY, "no memory for the order");
        return;
    }
    *waiting = *asked;
    pthread_mutex_lock(&self->lock);
    bool stopped = self->stopped;
    if (!stopped) {
        *self->last = waiting;
        self->last = &waiting->next;
    }
    pthread_mutex_unlock(&self->lock);
    if (stopped) {
        free(waiting);
        fail(asked->call, EP_ERR_DRAINING, "this process is ending");
    } else {
        ep_service_loop_post(self->config.loop, &self->task);
    }
}

static void on_drain(Expertd__V1__Admin_Service *rpc, const Expertd__V1__DrainRequest *request,
                     Expertd__V1__DrainReply_Closure closure, void *closure_data)
{
    enqueue(rpc, &(order){.run = do_drain,
                          .call = closure_data,
                          .request.drain = request,
                          .reply.drain = closure});
}

static void on_reload(Expertd__V1__Admin_Service *rpc, const Expertd__V1__Empty *request,
                      Expertd__V1__ReloadReply_Closure closure, void *closure_data)
{
    (void)request;
    enqueue(rpc, &(order){.run = do_reload, .call = closure_data, .reply.reload = closure});
}

static void on_get_config(Expertd__V1__Admin_Service *rpc, const Expertd__V1__Empty *request,
                          Expertd__V1__ConfigReply_Closure closure, void *closure_data)
{
    (void)request;
    enqueue(rpc, &(order){.run = do_config, .call = closure_data, .reply.config = closure});
}

static void on_set_default_version(Expertd__V1__Admin_Service *rpc,
                                   const Expertd__V1__DefaultVersionRequest *request,
                                   Expertd__V1__DefaultVersionReply_Closure closure,
                                   void *closure_data)
{
    enqueue(rpc, &(order){.run = do_set_default,
                          .call = closure_data,
                          .request.set_default = request,
                          .reply.set_default = closure});
}

static void on_policy(Expertd__V1__Admin_Service *rpc, const Expertd__V1__PolicyRequest *request,
                      Expertd__V1__PolicyReply_Closure closure, void *closure_data)
{
    enqueue(rpc, &(order){.run = do_policy,
                          .call = closure_data,
                          .request.policy = request,
                          .reply.policy = closure});
}

static void on_plan_placement(Expertd__V1__Admin_Service *rpc,
                              const Expertd__V1__PlanRequest *request,
                              Expertd__V1__PlanReply_Closure closure, void *closure_data)
{
    enqueue(rpc, &(order){.run = do_plan,
                          .call = closure_data,
                          .request.plan = request,
                          .reply.plan = closure});
}

static const Expertd__V1__Admin_Service rpc_template = EXPERTD__V1__ADMIN__INIT(on_);

ep_err ep_admin_service_create(const ep_admin_config *config, ep_admin_service **out_service)
{
    ep_admin_service *self = calloc(1, sizeof(*self));
    if (self == NULL) {
        return EP_ERR_NO_MEMORY;
    }
    self->rpc = rpc_template;
    self->config = *config;
    self->task = (ep_loop_task){.func = on_task, .arg = self};
    self->last = &self->first;
    pthread_mutex_init(&self->lock, NULL);
    *out_service = self;
    return EP_OK;
}

ProtobufCService *ep_admin_service_rpc(ep_admin_service *self)
{
    return &self->rpc.base;
}

void ep_admin_service_stop(ep_admin_service *self)
{
    order *next = NULL;
    for (order *asked = self != NULL ? take_all(self, true) : NULL; asked != NULL; asked = next) {
        next = asked->next;
        fail(asked->call, EP_ERR_DRAINING, "this process is ending");
        free(asked);
    }
}

void ep_admin_service_destroy(ep_admin_service *self)
{
    if (self == NULL) {
        return;
    }
    ep_service_loop_cancel(self->config.loop, &self->task);
    pthread_mutex_destroy(&self->lock);
    free(self);
}
