/* SPDX-License-Identifier: Apache-2.0 */
/* What expertctl doctor finds about an NPU in a made-up root, and what it says to do. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/doctor_ascend.h"
#include "cli/doctor_config.h"
#include "support/process.h"

#define CANN "/usr/local/Ascend/cann"
#define OLDER "/usr/local/Ascend/ascend-toolkit/latest"
#define DRIVER "/usr/local/Ascend/driver"
#define DROP_IN "/etc/systemd/system/expertd.service.d/ascend.conf"

static char root[EP_TEST_PATH_BYTES];
static ep_doctor_ascend_facts facts;
static ep_doctor_findings findings;

static void put(const char *path, const char *text)
{
    char full[1024];
    snprintf(full, sizeof(full), "%s%s", root, path);
    for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        (void)mkdir(full, 0700);
        *slash = '/';
    }
    cr_assert(ep_test_write_file(full, text, 0600), "%s", full);
}

static void take(const char *path)
{
    char full[1024];
    snprintf(full, sizeof(full), "%s%s", root, path);
    cr_assert_eq(remove(full), 0, "%s", full);
}

/* A host with all there must be: two devices, CANN of today. */
static void setup(void)
{
    memset(&findings, 0, sizeof(findings));
    cr_assert(ep_test_dir_create(root));
    put(DRIVER "/version.info", "package_name=x\nVersion=25.5.0\nascendhal_version=7.35\n");
    put("/dev/davinci0", "");
    put("/dev/davinci1", "");
    put("/dev/davinci_manager", "");
    put("/dev/devmm_svm", "");
    put("/dev/hisi_hdc", "");
    put(CANN "/lib64/libacl_rt.so", "");
    put(CANN "/lib64/libopapi_nn.so", "");
    put(CANN "/lib64/libopapi_transformer.so", "");
    put(CANN "/aarch64-linux/ascend_toolkit_install.info",
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\narch=aarch64\n");
}

static void teardown(void)
{
    ep_test_dir_remove(root);
}

TestSuite(doctor_ascend, .init = setup, .fini = teardown);

static void look(const char *home, const char *library_path, bool is_wanted)
{
    findings.count = 0;
    ep_doctor_ascend_look(root, home, library_path, &facts);
    ep_doctor_ascend_examine(&facts, is_wanted, &findings);
}

/* One finding that is more than information, with these words. */
static void expect(const char *code, const char *text, const char *advice)
{
    size_t found = 0;
    for (size_t i = 0; i < findings.count; i++) {
        const ep_doctor_finding *finding = &findings.list[i];
        if (finding->severity > EP_DOCTOR_INFO) {
            found++;
            cr_expect_str_eq(finding->code, code, "%s: %s", finding->code, finding->text);
            cr_expect_not_null(strstr(finding->text, text), "'%s'", finding->text);
            cr_expect_not_null(strstr(finding->advice, advice), "'%s'", finding->advice);
        }
    }
    cr_expect_eq(found, 1u, "%s: %zu", code, found);
}

static void expect_well(const char *line)
{
    cr_expect_not(ep_doctor_is_ill(&findings), "%s", findings.list[0].text);
    cr_assert_eq(findings.count, 2u);
    cr_expect_str_eq(findings.list[0].text, line, "'%s'", findings.list[0].text);
    cr_expect_not_null(strstr(findings.list[1].text, "has not run on hardware yet"));
}

Test(doctor_ascend, a_whole_host_is_told_with_its_versions_and_what_is_unproven)
{
    look(CANN, "/opt/x:" CANN "/lib64/:/y", true);
    expect_well("Ascend: driver 25.5.0, CANN 8.5.0 in " CANN ", 2 devices");
    look(NULL, NULL, false); /* nobody wants it: no word about the environment */
    expect_well("Ascend: driver 25.5.0, CANN 8.5.0 in " CANN ", 2 devices");
}

Test(doctor_ascend, a_host_without_any_of_it_is_not_bothered)
{
    ep_test_dir_remove(root);
    look(NULL, NULL, false);
    cr_assert_eq(findings.count, 0u);
}

Test(doctor_ascend, an_older_layout_is_found_too)
{
    take(CANN "/lib64/libacl_rt.so");
    take(CANN "/lib64/libopapi_nn.so");
    take(CANN "/lib64/libopapi_transformer.so");
    take(CANN "/lib64");
    put(OLDER "/lib64/libascendcl.so", "");
    put(OLDER "/lib64/libopapi.so", "");
    look(OLDER, OLDER "/lib64", true);
    expect_well("Ascend: driver 25.5.0, CANN unknown in " OLDER ", 2 devices");
}

Test(doctor_ascend, cann_may_be_in_a_directory_with_a_long_name)
{
    char home[256], file[320], line[320];
    snprintf(home, sizeof(home), "/home/%0200d/cann", 0);
    const char *const names[] = {"libacl_rt.so", "libopapi.so"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(file, sizeof(file), "%s/lib64/%s", home, names[i]);
        put(file, "");
    }
    snprintf(file, sizeof(file), "%s/lib64", home);
    snprintf(line, sizeof(line), "Ascend: driver 25.5.0, CANN unknown in %s, 2 devices", home);
    look(home, file, true);
    expect_well(line);
}

Test(doctor_ascend, a_driver_and_devices_that_are_missing_are_named)
{
    take("/dev/hisi_hdc");
    look(CANN, CANN "/lib64", true);
    expect("npu-device", "no /dev/hisi_hdc", "npu-smi info");
    put("/dev/hisi_hdc", "");
    take("/dev/davinci0");
    take("/dev/davinci1");
    look(CANN, CANN "/lib64", true);
    expect("npu-device", "no /dev/davinci0", "npu-smi info");
    put("/.dockerenv", "");
    look(CANN, CANN "/lib64", true);
    expect("npu-device", "no /dev/davinci0",
           "--device with each of /dev/davinci0, /dev/davinci_manager");
    put("/dev/davinci7", "");
    take(DRIVER "/version.info");
    look(CANN, CANN "/lib64", true);
    expect("npu-driver", "no " DRIVER "/version.info", "mount " DRIVER " of the host");
    take("/.dockerenv");
    look(CANN, CANN "/lib64", true);
    expect("npu-driver", "no Ascend driver", "install the vendor's driver");
}

Test(doctor_ascend, a_node_that_may_not_be_opened_names_the_group)
{
    ep_doctor_ascend_look(root, CANN, CANN "/lib64", &facts);
    if (geteuid() != 0) { /* who may do anything finds no closed node */
        char path[EP_TEST_PATH_BYTES + 32];
        snprintf(path, sizeof(path), "%s/dev/davinci1", root);
        cr_assert_eq(chmod(path, 0), 0);
        ep_doctor_ascend_look(root, CANN, CANN "/lib64", &facts);
        cr_expect_str_eq(facts.node_closed, "/dev/davinci1");
        cr_expect_neq(facts.node_group[0], '\0');
    }
    strcpy(facts.node_closed, "/dev/davinci1");
    strcpy(facts.node_group, "HwHiAiUser");
    ep_doctor_ascend_examine(&facts, true, &findings);
    expect("npu-access", "/dev/davinci1 may not be opened by this user",
           "usermod -a -G HwHiAiUser USER");
}

Test(doctor_ascend, where_cann_is_and_what_it_lacks_is_said)
{
    look(NULL, NULL, true);
    expect("npu-environment", "which ASCEND_HOME_PATH does not name", "source " CANN "/set_env.sh");
    look(CANN, "/usr/lib:" CANN "/lib", true);
    expect("npu-environment", "whose lib64 is not in LD_LIBRARY_PATH",
           "source " CANN "/set_env.sh");
    look("/nowhere", CANN "/lib64", true);
    expect("npu-environment", "CANN is in " CANN ", which ASCEND_HOME_PATH does not name",
           "source");
    take(CANN "/lib64/libopapi_nn.so"); /* the newer libraries come together */
    look(CANN, CANN "/lib64", true);
    expect("npu-cann", "neither libopapi_nn.so and libopapi_transformer.so nor libopapi.so",
           "package of operators");
    put(CANN "/lib64/libopapi.so", "");
    take(CANN "/lib64/libacl_rt.so");
    look(CANN, CANN "/lib64", true);
    expect("npu-cann", "neither libacl_rt.so nor libascendcl.so", "toolkit");
    take(CANN "/lib64/libopapi.so");
    take(CANN "/lib64/libopapi_transformer.so");
    take(CANN "/lib64");
    look(NULL, NULL, true);
    expect("npu-cann", "neither in ASCEND_HOME_PATH nor in " CANN " or " OLDER, "install CANN");
}

Test(doctor_ascend, a_unit_that_lets_no_device_in_is_found)
{
    put("/run/systemd/system/x", "");
    put("/usr/lib/systemd/system/expertd.service", "");
    look(CANN, CANN "/lib64", true);
    expect("npu-unit", "expertd.service lets no NPU in", "examples/ascend.conf");
    put(DROP_IN, "[Service]\n#DeviceAllow=/dev/davinci_manager rw\n");
    look(CANN, CANN "/lib64", true);
    expect("npu-unit", "expertd.service lets no NPU in", "examples/ascend.conf");
    char shipped[2048];
    snprintf(shipped, sizeof(shipped), "cp %s/deploy/systemd/examples/ascend.conf %s" DROP_IN,
             EP_SOURCE_DIR, root);
    cr_assert_eq(system(shipped), 0);
    look(CANN, CANN "/lib64", true);
    expect_well("Ascend: driver 25.5.0, CANN 8.5.0 in " CANN ", 2 devices");
}

Test(doctor_ascend, whether_a_configuration_wants_it_is_read_from_printed_options)
{
    cr_assert(ep_doctor_names_ascend(
        "node_name: \"a\"\nbackend: \"ascend\"  # file x:3\nnumerics: auto\n"));
    cr_assert(ep_doctor_names_ascend("node_name: \"a\"\nbackend: \"ascend, cpu\"\n"));
    cr_assert_not(ep_doctor_names_ascend(
        "node_name: \"ascend\"\nbackend: \"cpu\"  # file /etc/ascend.yaml:3\nhost: \"ascend\"\n"));
    cr_assert_not(ep_doctor_names_ascend(""));
}
