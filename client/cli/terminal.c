/* SPDX-License-Identifier: Apache-2.0 */
#include "terminal.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/screen.h"

#define ENTER "\033[?1049h\033[?25l" /* alternate screen, no cursor */
#define LEAVE "\033[?25h\033[?1049l"
#define END_OF_INPUT 4 /* ^D as a byte, since input is not by lines */
#define KEYS_BYTES 64

static const int fatal[] = {SIGQUIT, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};

static struct {
    int signals; /* a signalfd */
    volatile sig_atomic_t is_open;
    struct termios before;
} terminal = {.signals = -1};

static void write_all(const char *text, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(STDOUT_FILENO, text, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return; /* the terminal is gone; there is a SIGHUP too */
        }
        text += n;
        bytes -= (size_t)n;
    }
}

static void enter(void)
{
    struct termios modes = terminal.before;
    modes.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    modes.c_cc[VMIN] = 1;
    modes.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &modes);
    write_all(ENTER, strlen(ENTER));
}

static void leave(void) /* also in signal handlers */
{
    write_all(LEAVE, strlen(LEAVE));
    tcsetattr(STDIN_FILENO, TCSADRAIN, &terminal.before);
}

static void on_fatal(int signal_number)
{
    if (terminal.is_open) {
        leave();
    }
    raise(signal_number); /* ends by the signal's default action: SA_RESETHAND */
}

ep_err ep_cli_terminal_prepare(ep_error *out_error)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGWINCH);
    sigaddset(&set, SIGTSTP);
    sigaddset(&set, SIGCONT);
    terminal.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (terminal.signals < 0 || pthread_sigmask(SIG_BLOCK, &set, NULL) != 0) {
        return ep_error_set(out_error, EP_ERR_IO, "cannot wait for signals: %s", strerror(errno));
    }
    return EP_OK;
}

bool ep_cli_terminal_open(void)
{
    const struct sigaction action = {.sa_handler = on_fatal, .sa_flags = SA_RESETHAND | SA_NODEFER};
    const char *kind = getenv("TERM");
    if (kind == NULL || strcmp(kind, "dumb") == 0 || isatty(STDOUT_FILENO) != 1 ||
        tcgetattr(STDIN_FILENO, &terminal.before) != 0) {
        return false;
    }
    for (size_t i = 0; i < EP_ARRAY_COUNT(fatal); i++) {
        sigaction(fatal[i], &action, NULL);
    }
    terminal.is_open = 1;
    enter();
    return true;
}

void ep_cli_terminal_draw(const char *lines)
{
    char *text = NULL;
    size_t text_bytes = 0;
    FILE *out = open_memstream(&text, &text_bytes); /* one write avoids flicker */
    if (out == NULL) {
        return;
    }
    fputs("\033[H", out);
    size_t rows = ep_screen_of(STDOUT_FILENO).rows;
    for (size_t bytes; *lines != '\0' && rows > 0; lines += bytes, rows--) {
        bytes = strcspn(lines, "\n");
        fprintf(out, "%.*s\033[K", (int)bytes, lines);
        bytes += lines[bytes] != '\0';
        /* no newline after the last line, which would scroll */
        if (lines[bytes] != '\0' && rows > 1) {
            fputc('\n', out);
        }
    }
    fputs("\033[J", out);
    if (fclose(out) == 0) {
        write_all(text, text_bytes);
    }
    free(text);
}

void ep_cli_terminal_close(void)
{
    if (terminal.is_open) {
        terminal.is_open = 0;
        leave();
    }
}

static ep_cli_event read_signal(void)
{
    struct signalfd_siginfo info;
    if (read(terminal.signals, &info, sizeof(info)) != (ssize_t)sizeof(info)) {
        return EP_CLI_EVENT_TIME;
    }
    switch (info.ssi_signo) {
    case SIGTSTP:
        if (terminal.is_open) {
            leave();
        }
        raise(SIGSTOP); /* until SIGCONT */
        return EP_CLI_EVENT_TIME;
    case SIGCONT:
        if (terminal.is_open) {
            enter();
        }
        return EP_CLI_EVENT_REDRAW;
    case SIGWINCH:
        return EP_CLI_EVENT_REDRAW;
    default:
        return EP_CLI_EVENT_QUIT;
    }
}

/* Reads the bytes of a key; other bytes are ignored. */
static ep_cli_event read_key(void)
{
    static const struct {
        const char *keys;
        ep_cli_event event;
    } known[] = {{"\033[A", EP_CLI_EVENT_UP},         {"k", EP_CLI_EVENT_UP},
                 {"\033[B", EP_CLI_EVENT_DOWN},       {"j", EP_CLI_EVENT_DOWN},
                 {"\033[5~", EP_CLI_EVENT_PAGE_UP},   {"b", EP_CLI_EVENT_PAGE_UP},
                 {"\033[6~", EP_CLI_EVENT_PAGE_DOWN}, {" ", EP_CLI_EVENT_PAGE_DOWN}};
    char keys[KEYS_BYTES] = {0};
    ssize_t n = read(STDIN_FILENO, keys, sizeof(keys) - 1);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) {
        return EP_CLI_EVENT_QUIT;
    }
    for (ssize_t i = 0; i < n; i++) { /* it may be among other bytes read at once */
        if (keys[i] == 'q' || keys[i] == 'Q' || keys[i] == END_OF_INPUT) {
            return EP_CLI_EVENT_QUIT;
        }
    }
    for (size_t i = 0; n > 0 && i < EP_ARRAY_COUNT(known); i++) {
        if (strncmp(keys, known[i].keys, strlen(known[i].keys)) == 0) {
            return known[i].event;
        }
    }
    return EP_CLI_EVENT_TIME;
}

ep_cli_event ep_cli_terminal_wait(uint64_t until_ns)
{
    struct pollfd fds[] = {{.fd = terminal.signals, .events = POLLIN},
                           {.fd = terminal.is_open ? STDIN_FILENO : -1, .events = POLLIN}};
    ep_cli_event event = EP_CLI_EVENT_TIME;
    for (uint64_t now_ns; event == EP_CLI_EVENT_TIME;) {
        now_ns = ep_clock_now_ns();
        int ms =
            now_ns < until_ns ? (int)((until_ns - now_ns + EP_NS_PER_MS - 1) / EP_NS_PER_MS) : 0;
        int count = poll(fds, EP_ARRAY_COUNT(fds), ms);
        if (count == 0) {
            return EP_CLI_EVENT_TIME;
        }
        if (count > 0 && fds[0].revents != 0) {
            event = read_signal();
        } else if (count > 0 && fds[1].revents != 0) {
            event = read_key();
        }
    }
    return event;
}
