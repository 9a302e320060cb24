/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "child.h"
#include "model/model.h"

#define OUTPUT_BYTES (256u << 10)
#define PATH_BYTES 4097

/* Runs a daemon with a flag and keeps its output; returns as ep_cli_child_run. */
static int run(const char *program, const char *file, const char *flag, char *out_text)
{
    char config[PATH_BYTES + 16];
    snprintf(config, sizeof(config), "--config=%s", file);
    char *argv[] = {(char *)(uintptr_t)program, config, (char *)(uintptr_t)flag, NULL};
    return ep_cli_child_run(argv, false, out_text, OUTPUT_BYTES);
}

static void choose_program(const char *file, const char *program, char *out_path, size_t bytes)
{
    const char *base = strrchr(file, '/');
    base = base != NULL ? base + 1 : file;
    const char *name = strncmp(base, "coordinator", 11) == 0 ? "expertd-coordinator" : "expertd";
    ssize_t n = program == NULL ? readlink("/proc/self/exe", out_path, bytes - 1) : -1;
    out_path[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(out_path, '/');
    if (slash != NULL && (size_t)(slash + 1 - out_path) + strlen(name) < bytes) {
        strcpy(slash + 1, name);
        if (access(out_path, X_OK) == 0) {
            return;
        }
    }
    snprintf(out_path, bytes, "%s", program != NULL ? program : name);
}

/* Reads a text in double quotes, as --print-config writes it. */
static void unquote(const char *from, const char *end, char *out, size_t bytes)
{
    size_t used = 0;
    from += from < end && *from == '"';
    for (; from < end && *from != '"' && used + 1 < bytes; from++) {
        from += *from == '\\' && from + 1 < end;
        out[used++] = *from;
    }
    out[used] = '\0';
}

/* Whether the rest of a list's entry, from line at on, has a weights_from other than files. */
static bool is_mirrored(const char *at)
{
    static const char key[] = "weights_from: ";
    for (; at[0] == ' '; at += strcspn(at, "\n"), at += at[0] == '\n') {
        const char *word = at + strspn(at, " ");
        if (word[0] == '-') {
            return false;
        }
        if (strncmp(word, key, sizeof(key) - 1) == 0) {
            word += sizeof(key) - 1;
            return strncmp(word + (word[0] == '"'), "files", strlen("files")) != 0;
        }
    }
    return false;
}

bool ep_doctor_next_model_path(const char **io_at, char *out_path, size_t bytes,
                               bool *out_is_mirrored)
{
    static const char key[] = "path: ";
    const char *at = *io_at;
    if (strncmp(at, "models:", 7) != 0) {
        const char *block = strstr(at, "\nmodels:");
        at = at[0] == ' ' ? at : block != NULL ? block + 1 : at + strlen(at);
    }
    for (bool is_head = at[0] != ' '; at[0] == ' ' || is_head; is_head = false) {
        const char *end = strchr(at, '\n');
        end = end != NULL ? end : at + strlen(at);
        const char *word = at + strspn(at, " -");
        at = *end != '\0' ? end + 1 : end;
        if (strncmp(word, key, sizeof(key) - 1) == 0) {
            unquote(word + sizeof(key) - 1, end, out_path, bytes);
            *io_at = at;
            *out_is_mirrored = is_mirrored(at);
            return true;
        }
        if (*at == '\0') {
            break;
        }
    }
    return false;
}

static void open_checkpoint(const char *path, ep_doctor_findings *io_findings)
{
    ep_checkpoint *checkpoint = NULL;
    ep_error error;
    if (ep_checkpoint_open(path, &checkpoint, &error) != EP_OK) {
        ep_doctor_add(io_findings, EP_DOCTOR_ERROR, "checkpoint",
                      "copy the checkpoint again, or correct the model's path", "%s", error.text);
    } else {
        ep_checkpoint_survey survey;
        ep_doctor_add(io_findings, EP_DOCTOR_INFO, "checkpoint", "",
                      "%s can be opened: files of version %s, %u MoE layers", path,
                      ep_checkpoint_info(checkpoint)->version,
                      ep_checkpoint_info(checkpoint)->moe_layers_count);
        ep_checkpoint_survey_experts(checkpoint, &survey);
        if (survey.unreadable > 0) {
            ep_doctor_add(
                io_findings, survey.unreadable == survey.experts ? EP_DOCTOR_ERROR : EP_DOCTOR_WARN,
                "checkpoint",
                "copy the checkpoint again; the manual's page models lists the formats that are "
                "read",
                "%s: %llu of %llu experts cannot be read, first %s (layer %d expert %d)", path,
                (unsigned long long)survey.unreadable, (unsigned long long)survey.experts,
                survey.first.text, (int)survey.first.layer, (int)survey.first.expert);
        }
    }
    ep_checkpoint_close(checkpoint);
}

/* Reads a field of a logfmt line, KEY=VALUE or KEY="VALUE"; returns the start of the next one. */
static const char *next_field(const char *at, char *out_key, char *out_value, size_t bytes)
{
    const size_t key_bytes = strcspn(at, "= ");
    const char *value = at + key_bytes + (at[key_bytes] == '=');
    const char *end = value + strcspn(value, " ");
    if (*value == '"') {
        for (end = value + 1; *end != '"' && *end != '\0'; end++) {
            end += *end == '\\' && end[1] != '\0';
        }
        end += *end == '"';
    }
    snprintf(out_key, bytes, "%.*s", (int)key_bytes, at);
    unquote(value, end, out_value, bytes);
    return end + (*end == ' ');
}

static void append(char *text, size_t bytes, const char *between, const char *word)
{
    const size_t used = strlen(text);
    snprintf(text + used, bytes - used, "%s%s", used > 0 && word[0] != '\0' ? between : "", word);
}

void ep_doctor_take_warning(const char *line, ep_doctor_findings *io_findings)
{
    char text[sizeof(io_findings->list[0].text)] = "", effect[sizeof(text)] = "",
         reason[sizeof(text)] = "";
    char hint[sizeof(text)] = "man expertd.yaml explains each key";
    char key[sizeof(text)], value[sizeof(text)];
    bool is_warning = false;
    while (*line != '\0') {
        line = next_field(line, key, value, sizeof(value));
        if (strcmp(key, "level") == 0) {
            is_warning = strcmp(value, "warn") == 0;
        } else if (strcmp(key, "reason") == 0) {
            strcpy(reason, value);
        } else if (strcmp(key, "effect") == 0) {
            strcpy(effect, value);
        } else if (strcmp(key, "hint") == 0) {
            strcpy(hint, value);
        } else if (is_warning && strcmp(key, "event") != 0) {
            const bool names_itself =
                strcmp(key, "key") == 0 || strcmp(key, "path") == 0 || strcmp(key, "url") == 0;
            append(text, sizeof(text), " ", names_itself ? "" : key);
            append(text, sizeof(text), " ", value);
        }
    }
    if (is_warning) {
        append(text, sizeof(text), ": ", reason);
        append(text, sizeof(text), "; ", effect);
        ep_doctor_add(io_findings, EP_DOCTOR_WARN, "config", hint, "%s", text);
    }
}

/* Takes the warnings in the daemon's log, about settings that it accepts. */
static void take_warnings(char *text, ep_doctor_findings *io_findings)
{
    for (char *line = text, *end; *line != '\0'; line = end) {
        end = line + strcspn(line, "\n");
        end += *end != '\0';
        if (end > line && end[-1] == '\n') {
            end[-1] = '\0';
        }
        ep_doctor_take_warning(line, io_findings);
    }
}

bool ep_doctor_names_ascend(const char *text)
{
    static const char key[] = "\nbackend: ";
    const char *line = strstr(text, key);
    const char *name = line != NULL ? strstr(line + sizeof(key) - 1, "ascend") : NULL;
    return name != NULL && name < line + 1 + strcspn(line + 1, "\n#");
}

bool ep_doctor_check_config(const char *file, const char *program, ep_doctor_findings *io_findings)
{
    char path[PATH_BYTES];
    bool names_ascend = false;
    char *text = malloc(OUTPUT_BYTES);
    if (text == NULL) {
        ep_doctor_add(io_findings, EP_DOCTOR_ERROR, "config", "", "no memory to check %s", file);
        return false;
    }
    choose_program(file, program, path, sizeof(path));
    int code = run(path, file, "--check-config", text);
    if (code < 0 || code >= 127) { /* also: a signal ended it */
        ep_doctor_add(io_findings, EP_DOCTOR_ERROR, "config", "name the daemon with --program",
                      "%s cannot be checked: %s cannot be run", file, path);
    } else if (code == 0) {
        take_warnings(text, io_findings);
    } else {
        text[strcspn(text, "\n")] = '\0';
        ep_doctor_add(io_findings, EP_DOCTOR_ERROR, "config",
                      "correct the file; man expertd.yaml explains each key", "%s", text);
    }
    if (code == 0 && run(path, file, "--print-config", text) == 0) {
        const char *at = text;
        names_ascend = ep_doctor_names_ascend(text);
        bool is_filled = false;
        while (ep_doctor_next_model_path(&at, path, sizeof(path), &is_filled)) {
            /* only the node that has a mirror open can tell which files it holds */
            if (is_filled) {
                ep_doctor_add(io_findings, EP_DOCTOR_INFO, "checkpoint", "",
                              "%s is filled from elsewhere (weights_from)", path);
            } else {
                open_checkpoint(path, io_findings);
            }
        }
    }
    free(text);
    return names_ascend;
}
