/* SPDX-License-Identifier: Apache-2.0 */
#include "coordinator/policy_report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "options/options_internal.h"

#define CHANGES_MAX 64

/* An answer and the memory that it borrows. */
typedef struct report {
    Expertd__V1__PolicyReply reply;
    Expertd__V1__PolicyEntry entries[EP_POLICY_KEYS];
    Expertd__V1__PolicyEntry *list[EP_POLICY_KEYS];
    ep_policy_view view;
    char values[EP_POLICY_KEYS][EP_QUANTITY_BYTES];
    char origins[EP_POLICY_KEYS][64];
    char allowed[EP_POLICY_KEYS][64];
    char *configured[EP_POLICY_KEYS]; /* owned */
} report;

static void fill_origin(char out[64], uint64_t revision)
{
    snprintf(out, 64, "policy revision %llu", (unsigned long long)revision);
}

/* Fills in the value of the coordinator's own configuration. */
static ep_err fill_configured(report *r, ep_policy_key key, const ep_reload *reload)
{
    const ep_options_spec *spec = reload->started->spec;
    const ep_option *option = ep_policy_option(key);
    ep_options_entry entry;
    ep_err err = ep_options_entry_read(
        ep_reload_in_force(reload, option),
        ep_options_find(spec->options, spec->options_count, option->name), &entry);
    if (err == EP_OK) {
        r->configured[key] = entry.value;
        r->entries[key].value = entry.value;
        r->entries[key].origin = (char *)(uintptr_t)entry.origin;
    }
    return err;
}

static ep_err fill_entry(report *r, ep_policy_key key, const ep_reload *reload)
{
    const ep_policy_value *value = &r->view.policy.values[key];
    const ep_option *option = ep_policy_option(key);
    const char *unused = ep_policy_unused(key, &r->view.configured);
    Expertd__V1__PolicyEntry *entry = &r->entries[key];
    expertd__v1__policy_entry__init(entry);
    entry->key = (char *)(uintptr_t)option->name;
    entry->help = (char *)(uintptr_t)option->help;
    ep_option_describe_allowed(option, r->allowed[key], sizeof(r->allowed[key]));
    entry->allowed = r->allowed[key];
    if (value->revision != 0) {
        entry->revision = value->revision;
        entry->set_at = value->set_at;
        entry->who = (char *)(uintptr_t)value->who;
        entry->unused = (char *)(uintptr_t)(unused != NULL ? unused : "");
        entry->value = ep_policy_format(key, value->number, r->values[key]);
        fill_origin(r->origins[key], value->revision);
        entry->origin = r->origins[key];
    }
    if (value->revision != 0 && unused == NULL) {
        return EP_OK;
    }
    if (ep_policy_elsewhere(key) != NULL) {
        entry->origin = (char *)(uintptr_t)ep_policy_elsewhere(key);
        return EP_OK;
    }
    return fill_configured(r, key, reload);
}

ep_err ep_policy_report_answer(ep_coordinator_service *service, const ep_reload *reload,
                               const Expertd__V1__PolicyRequest *request,
                               Expertd__V1__PolicyReply_Closure closure, void *closure_data,
                               ep_error *out_error)
{
    ep_policy_change changes[CHANGES_MAX];
    report *r = calloc(1, sizeof(*r));
    if (request->n_changes > CHANGES_MAX) {
        free(r);
        return ep_error_set(out_error, EP_ERR_INVALID_ARGUMENT,
                            "%zu changes of the policy at once, allowed 0..%d", request->n_changes,
                            CHANGES_MAX);
    }
    for (size_t i = 0; i < request->n_changes; i++) {
        const Expertd__V1__PolicyChange *change = request->changes[i];
        changes[i] =
            (ep_policy_change){.key = change->key, .value = change->unset ? NULL : change->value};
    }
    const ep_policy_order order = {.changes = changes,
                                   .count = request->n_changes,
                                   .has_expect_revision = request->has_expect_revision,
                                   .expect_revision = request->expect_revision,
                                   .who = request->who};
    ep_err err = r == NULL ? ep_error_set(out_error, EP_ERR_NO_MEMORY, "no memory for the policy")
                           : ep_coordinator_service_policy(service, &order, &r->view, out_error);
    if (err != EP_OK) {
        free(r);
        return err;
    }
    expertd__v1__policy_reply__init(&r->reply);
    for (int key = 0; err == EP_OK && key < EP_POLICY_KEYS; key++) {
        err = fill_entry(r, (ep_policy_key)key, reload);
        r->list[key] = &r->entries[key];
    }
    if (err == EP_OK) {
        r->reply.revision = r->view.policy.revision;
        r->reply.kept = r->view.is_kept;
        r->reply.store = (char *)(uintptr_t)r->view.store;
        r->reply.store_error = r->view.store_error;
        r->reply.entries = r->list;
        r->reply.n_entries = EP_POLICY_KEYS;
        closure(&r->reply, closure_data); /* packs it */
    } else {
        ep_error_set(out_error, err, "no memory for the policy");
    }
    for (int key = 0; key < EP_POLICY_KEYS; key++) {
        free(r->configured[key]);
    }
    free(r);
    return err;
}

bool ep_policy_report_override(ep_coordinator_service *service, const char *name,
                               ep_admin_override *out_override)
{
    const ep_policy_order order = {.count = 0};
    const ep_policy_key key = ep_policy_find(name);
    ep_policy_view view;
    if (key == EP_POLICY_KEYS ||
        ep_coordinator_service_policy(service, &order, &view, NULL) != EP_OK) {
        return false;
    }
    const ep_policy_value *value = &view.policy.values[key];
    if (value->revision == 0 || ep_policy_unused(key, &view.configured) != NULL) {
        return false;
    }
    ep_policy_format(key, value->number, out_override->value);
    fill_origin(out_override->origin, value->revision);
    return true;
}
