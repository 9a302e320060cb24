/* SPDX-License-Identifier: Apache-2.0 */
/* Runs source.ctf.fs -> filter.utils.muxer -> a sink that passes on every event of expertd. */
#include "trace/trace_source.h"

#include <babeltrace2/babeltrace.h>
#include <stdio.h>
#include <string.h>

#define PROVIDER "expertd:"

typedef struct sink {
    ep_cli_trace_tell *tell;
    void *arg;
    bool told_host;
    ep_err err;
    ep_error error;
} sink;

/* ---- fields ---- */

static bool read_unsigned(const bt_field *parent, const char *name, uint64_t *out_value)
{
    const bt_field *field = bt_field_structure_borrow_member_field_by_name_const(parent, name);
    if (field == NULL || !bt_field_class_type_is(bt_field_get_class_type(field),
                                                 BT_FIELD_CLASS_TYPE_UNSIGNED_INTEGER)) {
        return false;
    }
    *out_value = bt_field_integer_unsigned_get_value(field);
    return true;
}

static bool read_u32(const bt_field *parent, const char *name, uint32_t *out_value)
{
    uint64_t value;
    if (!read_unsigned(parent, name, &value) || value > UINT32_MAX) {
        return false;
    }
    *out_value = (uint32_t)value;
    return true;
}

static bool read_i32(const bt_field *parent, const char *name, int32_t *out_value)
{
    const bt_field *field = bt_field_structure_borrow_member_field_by_name_const(parent, name);
    if (field == NULL || !bt_field_class_type_is(bt_field_get_class_type(field),
                                                 BT_FIELD_CLASS_TYPE_SIGNED_INTEGER)) {
        return false;
    }
    int64_t value = bt_field_integer_signed_get_value(field);
    *out_value = (int32_t)value;
    return value >= INT32_MIN && value <= INT32_MAX;
}

static bool read_text(const bt_field *parent, const char *name,
                      char out_text[EP_CLI_TRACE_NAME_BYTES])
{
    const bt_field *field = bt_field_structure_borrow_member_field_by_name_const(parent, name);
    if (field == NULL || bt_field_get_class_type(field) != BT_FIELD_CLASS_TYPE_STRING) {
        return false;
    }
    snprintf(out_text, EP_CLI_TRACE_NAME_BYTES, "%s", bt_field_string_get_value(field));
    return true;
}

static bool is_structure(const bt_field *field)
{
    return field != NULL && bt_field_get_class_type(field) == BT_FIELD_CLASS_TYPE_STRUCTURE;
}

/* The probes write "-" for no name (trace.h). */
static bool read_name_field(const bt_field *parent, const char *name,
                            char out_text[EP_CLI_TRACE_NAME_BYTES])
{
    if (!read_text(parent, name, out_text)) {
        return false;
    }
    out_text[0] = strcmp(out_text, "-") == 0 ? '\0' : out_text[0];
    return true;
}

/* Returns NULL, or the name of the first field that is missing or has another type. */
static const char *read_event(const bt_field *payload, const bt_field *context,
                              ep_cli_trace_event *event)
{
    if (!is_structure(payload) || !is_structure(context)) {
        return "payload or context";
    }
    const struct {
        const char *name;
        uint64_t *value;
    } wide[] = {{"trace_hi", &event->trace.high},
                {"trace_lo", &event->trace.low},
                {"call", &event->call},
                {"parent", &event->parent},
                {"epoch", &event->epoch}};
    for (size_t i = 0; i < sizeof(wide) / sizeof(wide[0]); i++) {
        if (!read_unsigned(payload, wide[i].name, wide[i].value)) {
            return wide[i].name;
        }
    }
    return !read_u32(payload, "sub", &event->sub)           ? "sub"
           : !read_u32(payload, "rows", &event->rows)       ? "rows"
           : !read_i32(payload, "layer", &event->layer)     ? "layer"
           : !read_i32(payload, "expert", &event->expert)   ? "expert"
           : !read_i32(payload, "status", &event->status)   ? "status"
           : !read_name_field(payload, "node", event->node) ? "node"
           : !read_name_field(payload, "peer", event->peer) ? "peer"
           : !read_i32(context, "vpid", &event->pid)        ? "vpid (a context)"
           : !read_i32(context, "vtid", &event->tid)        ? "vtid (a context)"
           : !read_text(context, "procname", event->thread) ? "procname (a context)"
                                                            : NULL;
}

/* Splits "expertd:<kind>_begin" or _end; false for other events. */
static bool read_name(const char *name, ep_cli_trace_event *event)
{
    if (name == NULL || strncmp(name, PROVIDER, strlen(PROVIDER)) != 0) {
        return false;
    }
    name += strlen(PROVIDER);
    for (int i = 0; i < EP_CLI_SPAN_KINDS; i++) {
        size_t bytes = strlen(ep_cli_span_names[i]);
        if (strncmp(name, ep_cli_span_names[i], bytes) == 0 && name[bytes] == '_') {
            event->kind = (ep_cli_span_kind)i;
            event->is_end = strcmp(name + bytes + 1, "end") == 0;
            return event->is_end || strcmp(name + bytes + 1, "begin") == 0;
        }
    }
    return false;
}

/* ---- messages ---- */

static bool tell_host(sink *s, const bt_stream *stream, const bt_clock_class *clock)
{
    ep_cli_trace_note note = {.kind = EP_CLI_TRACE_NOTE_HOST};
    const bt_value *host = bt_trace_borrow_environment_entry_value_by_name_const(
        bt_stream_borrow_trace_const(stream), "hostname");
    if (host != NULL && bt_value_is_string(host)) {
        snprintf(note.u.host.name, sizeof(note.u.host.name), "%s", bt_value_string_get(host));
    }
    bt_uuid uuid = bt_clock_class_get_uuid(clock);
    if (uuid != NULL) {
        memcpy(note.u.host.clock, uuid, sizeof(note.u.host.clock));
        note.u.host.has_clock = true;
    }
    s->told_host = true;
    return s->tell(&note, s->arg);
}

static ep_err take_event(sink *s, const bt_message *message)
{
    const bt_event *event = bt_message_event_borrow_event_const(message);
    const char *name = bt_event_class_get_name(bt_event_borrow_class_const(event));
    ep_cli_trace_note note = {.kind = EP_CLI_TRACE_NOTE_EVENT};
    if (!read_name(name, &note.u.event)) {
        return EP_OK;
    }
    const bt_stream *stream = bt_event_borrow_stream_const(event);
    const bt_clock_class *clock =
        bt_stream_class_borrow_default_clock_class_const(bt_stream_borrow_class_const(stream));
    if (clock == NULL) {
        return ep_error_set(&s->error, EP_ERR_BAD_FILE, "event %s has no time", name);
    }
    const bt_clock_snapshot *time = bt_message_event_borrow_default_clock_snapshot_const(message);
    if (bt_clock_snapshot_get_ns_from_origin(time, &note.u.event.time_ns) !=
            BT_CLOCK_SNAPSHOT_GET_NS_FROM_ORIGIN_STATUS_OK ||
        note.u.event.time_ns < INT64_MIN / 4 || note.u.event.time_ns > INT64_MAX / 4) {
        return ep_error_set(&s->error, EP_ERR_BAD_FILE, "event %s has a time out of range", name);
    }
    const char *missing =
        read_event(bt_event_borrow_payload_field_const(event),
                   bt_event_borrow_common_context_field_const(event), &note.u.event);
    if (missing != NULL) {
        return ep_error_set(
            &s->error, EP_ERR_BAD_FILE,
            "event %s has no field %s of the right type; `expertctl trace record` writes all", name,
            missing);
    }
    if ((!s->told_host && !tell_host(s, stream, clock)) || !s->tell(&note, s->arg)) {
        return ep_error_set(&s->error, EP_ERR_CANCELLED, "reading was ended");
    }
    return EP_OK;
}

static ep_err take_message(sink *s, const bt_message *message)
{
    ep_cli_trace_note note = {.kind = EP_CLI_TRACE_NOTE_DISCARDED};
    uint64_t count = 1; /* discarded events without a count are at least one */
    switch (bt_message_get_type(message)) {
    case BT_MESSAGE_TYPE_EVENT:
        return take_event(s, message);
    case BT_MESSAGE_TYPE_DISCARDED_EVENTS:
        (void)bt_message_discarded_events_get_count(message, &count);
        note.u.discarded.events = count;
        break;
    case BT_MESSAGE_TYPE_DISCARDED_PACKETS:
        (void)bt_message_discarded_packets_get_count(message, &count);
        note.u.discarded.packets = count;
        break;
    default:
        return EP_OK;
    }
    return s->tell(&note, s->arg) ? EP_OK
                                  : ep_error_set(&s->error, EP_ERR_CANCELLED, "reading was ended");
}

static bt_graph_simple_sink_component_consume_func_status consume(bt_message_iterator *iterator,
                                                                  void *data)
{
    sink *s = data;
    bt_message_array_const messages;
    uint64_t count = 0;
    switch (bt_message_iterator_next(iterator, &messages, &count)) {
    case BT_MESSAGE_ITERATOR_NEXT_STATUS_OK:
        break;
    case BT_MESSAGE_ITERATOR_NEXT_STATUS_END:
        return BT_GRAPH_SIMPLE_SINK_COMPONENT_CONSUME_FUNC_STATUS_END;
    case BT_MESSAGE_ITERATOR_NEXT_STATUS_AGAIN:
        return BT_GRAPH_SIMPLE_SINK_COMPONENT_CONSUME_FUNC_STATUS_AGAIN;
    case BT_MESSAGE_ITERATOR_NEXT_STATUS_MEMORY_ERROR:
        return BT_GRAPH_SIMPLE_SINK_COMPONENT_CONSUME_FUNC_STATUS_MEMORY_ERROR;
    default:
        return BT_GRAPH_SIMPLE_SINK_COMPONENT_CONSUME_FUNC_STATUS_ERROR;
    }
    for (uint64_t i = 0; i < count; i++) {
        s->err = s->err == EP_OK ? take_message(s, messages[i]) : s->err;
        bt_message_put_ref(messages[i]);
    }
    return s->err == EP_OK ? BT_GRAPH_SIMPLE_SINK_COMPONENT_CONSUME_FUNC_STATUS_OK
                           : BT_GRAPH_SIMPLE_SINK_COMPONENT_CONSUME_FUNC_STATUS_ERROR;
}

/* ---- the graph ---- */

/* Sets the library's innermost cause as the error: it is the most exact one. */
static ep_err library_error(const char *dir, const char *what, ep_error *out_error)
{
    const bt_error *error = bt_current_thread_take_error();
    const char *cause = "no reason given";
    if (error != NULL && bt_error_get_cause_count(error) > 0) {
        cause = bt_error_cause_get_message(bt_error_borrow_cause_by_index(error, 0));
    }
    ep_error_set(out_error, EP_ERR_BAD_FILE, "%s: %s: %.300s", dir, what, cause);
    if (error != NULL) {
        bt_error_release(error);
    }
    return EP_ERR_BAD_FILE;
}

typedef struct plumbing {
    const bt_plugin *ctf;
    const bt_plugin *utils;
    bt_graph *graph;
    bt_value *params;
} plumbing;

static bool add_source(plumbing *p, const char *dir, const bt_component_source **out_source)
{
    bt_value *inputs = NULL;
    p->params = bt_value_map_create();
    return p->params != NULL &&
           bt_value_map_insert_empty_array_entry(p->params, "inputs", &inputs) ==
               BT_VALUE_MAP_INSERT_ENTRY_STATUS_OK &&
           bt_value_array_append_string_element(inputs, dir) ==
               BT_VALUE_ARRAY_APPEND_ELEMENT_STATUS_OK &&
           bt_graph_add_source_component(
               p->graph, bt_plugin_borrow_source_component_class_by_name_const(p->ctf, "fs"),
               "source", p->params, BT_LOGGING_LEVEL_NONE,
               out_source) == BT_GRAPH_ADD_COMPONENT_STATUS_OK;
}

static bool connect_parts(plumbing *p, const bt_component_source *source, sink *s)
{
    const bt_component_filter *muxer = NULL;
    const bt_component_sink *end = NULL;
    if (bt_graph_add_filter_component(
            p->graph, bt_plugin_borrow_filter_component_class_by_name_const(p->utils, "muxer"),
            "muxer", NULL, BT_LOGGING_LEVEL_NONE, &muxer) != BT_GRAPH_ADD_COMPONENT_STATUS_OK ||
        bt_graph_add_simple_sink_component(p->graph, "sink", NULL, consume, NULL, s, &end) !=
            BT_GRAPH_ADD_COMPONENT_STATUS_OK) {
        return false;
    }
    uint64_t ports = bt_component_source_get_output_port_count(source);
    for (uint64_t i = 0; i < ports; i++) {
        if (bt_graph_connect_ports(p->graph,
                                   bt_component_source_borrow_output_port_by_index_const(source, i),
                                   bt_component_filter_borrow_input_port_by_index_const(muxer, i),
                                   NULL) != BT_GRAPH_CONNECT_PORTS_STATUS_OK) {
            return false;
        }
    }
    return bt_graph_connect_ports(p->graph,
                                  bt_component_filter_borrow_output_port_by_index_const(muxer, 0),
                                  bt_component_sink_borrow_input_port_by_index_const(end, 0),
                                  NULL) == BT_GRAPH_CONNECT_PORTS_STATUS_OK;
}

static ep_err run_graph(plumbing *p, const char *dir, sink *s, ep_error *out_error)
{
    const bt_component_source *source = NULL;
    if (bt_plugin_find("ctf", BT_TRUE, BT_FALSE, BT_TRUE, BT_TRUE, BT_FALSE, &p->ctf) !=
            BT_PLUGIN_FIND_STATUS_OK ||
        bt_plugin_find("utils", BT_TRUE, BT_FALSE, BT_TRUE, BT_TRUE, BT_FALSE, &p->utils) !=
            BT_PLUGIN_FIND_STATUS_OK) {
        return library_error(dir, "the plugins ctf and utils of babeltrace2 were not found",
                             out_error);
    }
    p->graph = bt_graph_create(0);
    if (p->graph == NULL || !add_source(p, dir, &source)) {
        return library_error(dir, "not a readable CTF trace", out_error);
    }
    if (bt_component_source_get_output_port_count(source) == 0) {
        return EP_OK; /* metadata only: no events */
    }
    if (!connect_parts(p, source, s)) {
        return library_error(dir, "not a readable CTF trace", out_error);
    }
    bt_graph_run_status status;
    do {
        status = bt_graph_run(p->graph);
    } while (status == BT_GRAPH_RUN_STATUS_AGAIN);
    if (s->err != EP_OK) {
        return ep_error_set(out_error, s->err, "%s: %s", dir, s->error.text);
    }
    return status == BT_GRAPH_RUN_STATUS_OK ? EP_OK : library_error(dir, "damaged", out_error);
}

ep_err ep_cli_trace_source_run(const char *dir, ep_cli_trace_tell *tell, void *arg,
                               ep_error *out_error)
{
    plumbing p = {0};
    sink s = {.tell = tell, .arg = arg};
    bt_logging_set_global_level(BT_LOGGING_LEVEL_NONE);
    ep_err err = run_graph(&p, dir, &s, out_error);
    bt_value_put_ref(p.params);
    bt_graph_put_ref(p.graph);
    bt_plugin_put_ref(p.utils);
    bt_plugin_put_ref(p.ctf);
    return err;
}
