/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor_ascend.h"

#include <ctype.h>
#include <errno.h>
#include <glob.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"

#define PATH_BYTES 4096
#define DRIVER "/usr/local/Ascend/driver"

static const char *const shared_nodes[] = {"/dev/davinci_manager", "/dev/devmm_svm",
                                           "/dev/hisi_hdc"};
/* Paths since release 8.5, and before. */
static const char *const homes[] = {"/usr/local/Ascend/cann",
                                    "/usr/local/Ascend/ascend-toolkit/latest"};

/* ---- looking ---- */

static bool is_there(const char *root, const char *directory, const char *name)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s%s%s", root, directory, name);
    return access(path, F_OK) == 0;
}

/* The value of the first line "version=..." of a file; false: there is none. */
static bool read_version(const char *path, char out[EP_DOCTOR_ASCEND_TEXT_BYTES])
{
    char line[256];
    bool found = false;
    FILE *file = fopen(path, "r");
    while (file != NULL && !found && fgets(line, sizeof(line), file) != NULL) {
        found = strncasecmp(line, "version=", 8) == 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    if (found) {
        snprintf(out, EP_DOCTOR_ASCEND_TEXT_BYTES, "%.*s", (int)strcspn(line + 8, " \r\n"),
                 line + 8);
    }
    return found && out[0] != '\0';
}

static void look_at_driver(const char *root, ep_doctor_ascend_facts *facts)
{
    char path[PATH_BYTES];
    snprintf(path, sizeof(path), "%s" DRIVER "/version.info", root);
    if (!read_version(path, facts->driver) && is_there(root, DRIVER, "/lib64")) {
        snprintf(facts->driver, sizeof(facts->driver), "unknown");
    }
}

static void look_at_node(const char *path, size_t root_bytes, ep_doctor_ascend_facts *facts)
{
    struct stat st;
    if (facts->node_closed[0] != '\0' || access(path, R_OK | W_OK) == 0 || stat(path, &st) != 0) {
        return;
    }
    const struct group *group = getgrgid(st.st_gid);
    snprintf(facts->node_closed, sizeof(facts->node_closed), "%s", path + root_bytes);
    snprintf(facts->node_group, sizeof(facts->node_group), "%.32s",
             group != NULL ? group->gr_name : "HwHiAiUser");
}

static void look_at_nodes(const char *root, ep_doctor_ascend_facts *facts)
{
    char path[PATH_BYTES];
    glob_t found;
    for (size_t i = 0; i < EP_ARRAY_COUNT(shared_nodes); i++) {
        snprintf(path, sizeof(path), "%s%s", root, shared_nodes[i]);
        if (access(path, F_OK) != 0) {
            facts->node_missing =
                facts->node_missing == NULL ? shared_nodes[i] : facts->node_missing;
        } else {
            look_at_node(path, strlen(root), facts);
        }
    }
    snprintf(path, sizeof(path), "%s/dev/davinci[0-9]*", root);
    if (glob(path, 0, NULL, &found) == 0) {
        facts->devices_count = (uint32_t)found.gl_pathc;
        for (size_t i = 0; i < found.gl_pathc; i++) {
            look_at_node(found.gl_pathv[i], strlen(root), facts);
        }
    }
    globfree(&found);
}

/* Whether a list with colons has the directory lib64 of home. */
static bool has_directory(const char *list, const char *home)
{
    char wanted[PATH_BYTES];
    const size_t bytes = (size_t)snprintf(wanted, sizeof(wanted), "%s/lib64", home);
    for (const char *at = list; at != NULL && *at != '\0';) {
        size_t length = strcspn(at, ":");
        const char *next = at + length + (at[length] == ':');
        while (length > 1 && at[length - 1] == '/') {
            length--;
        }
        if (length == bytes && strncmp(at, wanted, bytes) == 0) {
            return true;
        }
        at = next;
    }
    return false;
}

static void look_at_cann(const char *root, const char *home, const char *library_path,
                         ep_doctor_ascend_facts *facts)
{
    char path[PATH_BYTES];
    glob_t found;
    facts->home_is_set = home != NULL && home[0] == '/' && is_there(root, home, "/lib64");
    facts->home = facts->home_is_set ? home : NULL;
    for (size_t i = 0; i < EP_ARRAY_COUNT(homes) && facts->home == NULL; i++) {
        facts->home = is_there(root, homes[i], "/lib64") ? homes[i] : NULL;
    }
    if (facts->home == NULL) {
        return;
    }
    facts->library_path_is_set = has_directory(library_path, facts->home);
    facts->has_runtime = is_there(root, facts->home, "/lib64/libacl_rt.so") ||
                         is_there(root, facts->home, "/lib64/libascendcl.so");
    facts->has_operators = is_there(root, facts->home, "/lib64/libopapi.so") ||
                           (is_there(root, facts->home, "/lib64/libopapi_nn.so") &&
                            is_there(root, facts->home, "/lib64/libopapi_transformer.so"));
    snprintf(path, sizeof(path), "%s%s/*-linux/ascend_*_install.info", root, facts->home);
    const bool has_info = glob(path, 0, NULL, &found) == 0;
    if (!has_info || !read_version(found.gl_pathv[found.gl_pathc - 1], facts->version)) {
        snprintf(facts->version, sizeof(facts->version), "unknown");
    }
    globfree(&found);
}

static bool says_davinci(const char *path)
{
    char line[512];
    bool says = false;
    FILE *file = fopen(path, "r");
    while (file != NULL && !says && fgets(line, sizeof(line), file) != NULL) {
        says = strncmp(line, "DeviceAllow=", 12) == 0 && strstr(line, "davinci") != NULL;
    }
    if (file != NULL) {
        fclose(file);
    }
    return says;
}

static bool unit_lacks_devices(const char *root)
{
    char path[PATH_BYTES];
    glob_t found;
    bool lets_in = false;
    if (!is_there(root, "/run/systemd/system", "") ||
        !is_there(root, "/usr/lib/systemd/system", "/expertd.service")) {
        return false;
    }
    snprintf(path, sizeof(path), "%s/etc/systemd/system/expertd.service.d/*.conf", root);
    if (glob(path, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            lets_in = lets_in || says_davinci(found.gl_pathv[i]);
        }
    }
    globfree(&found);
    return !lets_in;
}

void ep_doctor_ascend_look(const char *root, const char *home, const char *library_path,
                           ep_doctor_ascend_facts *out_facts)
{
    memset(out_facts, 0, sizeof(*out_facts));
    look_at_driver(root, out_facts);
    look_at_nodes(root, out_facts);
    look_at_cann(root, home, library_path, out_facts);
    out_facts->is_container = is_there(root, "/.dockerenv", "") ||
                              is_there(root, "/run/.containerenv", "") ||
                              is_there(root, "/var/run/secrets/kubernetes.io", "");
    out_facts->unit_lacks_devices = unit_lacks_devices(root);
}

/* ---- judging ---- */

#define LET_IN                                                                                     \
    "let them into the container: the device plugin's resource (huawei.com/Ascend910), Ascend "    \
    "Docker "                                                                                      \
    "Runtime, or docker run "                                                                      \
    "--device with each of /dev/davinci0, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc"

static void examine_driver(const ep_doctor_ascend_facts *facts, ep_doctor_findings *out)
{
    if (facts->driver[0] == '\0') {
        ep_doctor_add(
            out, EP_DOCTOR_ERROR, "npu-driver",
            facts->is_container
                ? "mount " DRIVER " of the host into the container, read-only"
                : "install the vendor's driver and firmware; npu-smi info then lists the devices",
            "no Ascend driver: there is no " DRIVER "/version.info");
    }
    if (facts->node_missing != NULL || facts->devices_count == 0) {
        ep_doctor_add(
            out, EP_DOCTOR_ERROR, "npu-device",
            facts->is_container
                ? LET_IN
                : "see whether npu-smi info lists devices, and dmesg why the driver does not",
            "no device can be used: there is no %s",
            facts->node_missing != NULL ? facts->node_missing : "/dev/davinci0");
    } else if (facts->node_closed[0] != '\0') {
        char advice[320];
        snprintf(advice, sizeof(advice),
                 "run as a member of group %s: usermod -a -G %s USER and a new login; a unit: "
                 "SupplementaryGroups=%s; a container: --group-add, or supplementalGroups",
                 facts->node_group, facts->node_group, facts->node_group);
        ep_doctor_add(out, EP_DOCTOR_ERROR, "npu-access", advice,
                      "%s may not be opened by this user", facts->node_closed);
    }
    if (facts->unit_lacks_devices) {
        ep_doctor_add(out, EP_DOCTOR_WARN, "npu-unit",
                      "copy /usr/share/doc/expertd/examples/ascend.conf to "
                      "/etc/systemd/system/expertd.service.d/, then systemctl daemon-reload",
                      "the unit expertd.service lets no NPU in: none of its drop-ins has "
                      "DeviceAllow=/dev/davinci_manager");
    }
}

static void examine_cann(const ep_doctor_ascend_facts *facts, ep_doctor_findings *out)
{
    char advice[320];
    if (facts->home == NULL) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "npu-cann",
                      "install CANN's toolkit and operators for the device; elsewhere than there: "
                      "set ASCEND_HOME_PATH",
                      "CANN is neither in ASCEND_HOME_PATH nor in %s or %s", homes[0], homes[1]);
        return;
    }
    if (!facts->has_runtime) {
        ep_doctor_add(out, EP_DOCTOR_ERROR, "npu-cann", "install CANN's toolkit again",
                      "%s/lib64 has neither libacl_rt.so nor libascendcl.so", facts->home);
    }
    if (!facts->has_operators) {
        ep_doctor_add(
            out, EP_DOCTOR_ERROR, "npu-cann",
            "install CANN's package of operators (ops or kernels) for the device",
            "%s/lib64 has neither libopapi_nn.so and libopapi_transformer.so nor libopapi.so",
            facts->home);
    }
    if (!facts->home_is_set || !facts->library_path_is_set) {
        snprintf(advice, sizeof(advice),
                 "source %.120s/set_env.sh; in a unit Environment= as examples/ascend.conf has it",
                 facts->home);
        ep_doctor_add(out, EP_DOCTOR_WARN, "npu-environment", advice, "CANN is in %s, %s",
                      facts->home,
                      facts->home_is_set ? "whose lib64 is not in LD_LIBRARY_PATH: libraries that "
                                           "others need may not be found"
                                         : "which ASCEND_HOME_PATH does not name");
    }
}

void ep_doctor_ascend_examine(const ep_doctor_ascend_facts *facts, bool is_wanted,
                              ep_doctor_findings *io_findings)
{
    if (!is_wanted && facts->driver[0] == '\0' && facts->devices_count == 0) {
        return;
    }
    if (is_wanted) {
        examine_driver(facts, io_findings);
        examine_cann(facts, io_findings);
    }
    ep_doctor_add(
        io_findings, EP_DOCTOR_INFO, "npu", "", "Ascend: driver %s, CANN %s%s%s, %u devices",
        facts->driver[0] != '\0' ? facts->driver : "missing",
        facts->home != NULL ? facts->version : "missing", facts->home != NULL ? " in " : "",
        facts->home != NULL ? facts->home : "", facts->devices_count);
    ep_doctor_add(
        io_findings, EP_DOCTOR_INFO, "npu-unproven",
        "run deploy/examples/ascend-first-run of the source tree once and send its report",
        "backend ascend has not run on hardware yet: what is known of it comes from an emulated "
        "device");
}
