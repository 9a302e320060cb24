/* SPDX-License-Identifier: Apache-2.0 */
/* Runs every registered test in a process of its own; a file name pattern as argument selects
 * some. */
#include <criterion/criterion.h>
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static ep_plain_test *tests;
static ep_plain_test **tests_end = &tests;
static ep_plain_suite *suites;
static bool failed; /* of the test this process runs */

void ep_plain_add(ep_plain_test *test)
{
    *tests_end = test;
    tests_end = &test->next;
}

void ep_plain_add_suite(ep_plain_suite *suite)
{
    suite->next = suites;
    suites = suite;
}

void ep_plain_failed(bool fatal, const char *file, int line, const char *expected,
                     const char *format, ...)
{
    va_list args;
    va_start(args, format);
    printf("%s:%d: expected: %s:", file, line, expected);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    failed = true;
    if (fatal) {
        exit(1);
    }
}

static void call(void (*function)(void))
{
    if (function != NULL) {
        function();
    }
}

static void run(const ep_plain_test *test)
{
    const ep_plain_suite *suite = suites;
    while (suite != NULL && strcmp(suite->name, test->suite) != 0) {
        suite = suite->next;
    }
    call(suite != NULL ? suite->options.init : NULL);
    call(test->options.init);
    test->run();
    call(test->options.fini);
    call(suite != NULL ? suite->options.fini : NULL);
}

static bool passes(const ep_plain_test *test)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        run(test);
        exit(failed ? 1 : 0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child) {
        perror("plain_criterion");
        return false;
    }
    if (WIFSIGNALED(status)) {
        printf("%s::%s: ended by signal %d\n", test->suite, test->name, WTERMSIG(status));
    }
    return status == 0;
}

int main(int argc, char **argv)
{
    int run = 0;
    int bad = 0;
    for (const ep_plain_test *test = tests; test != NULL; test = test->next) {
        char label[256];
        snprintf(label, sizeof(label), "%s/%s", test->suite, test->name);
        if (argc > 1 && fnmatch(argv[1], label, 0) != 0) {
            continue;
        }
        bool ok = passes(test);
        printf("%s %s\n", ok ? "passed" : "FAILED", label);
        run++;
        bad += ok ? 0 : 1;
    }
    printf("%d tests, %d failed\n", run, bad);
    return run > 0 && bad == 0 ? 0 : 1;
}
