/* SPDX-License-Identifier: Apache-2.0 */
/* A raw look at a port that does not speak our protocol: what does it speak? For doctor only: the peer logs a broken connection. */
#ifndef EP_CLI_PORT_LOOK_H
#define EP_CLI_PORT_LOOK_H

#include "doctor.h"

/* url: tcp://host:port or tls+tcp://host:port. Takes twice timeout_ms at most. */
ep_doctor_port ep_cli_port_look(const char *url, int timeout_ms);

#endif
