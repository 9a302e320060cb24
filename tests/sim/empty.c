/* SPDX-License-Identifier: Apache-2.0 */
/* A program needs a source of its own; main is in the world's library. */
