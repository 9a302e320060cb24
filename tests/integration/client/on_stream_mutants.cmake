# SPDX-License-Identifier: Apache-2.0
# Mistakes between a caller's stream and a run, planted into copies of product files: within 24 seeds the scene must end otherwise and say TEXT.
function(ep_add_on_stream_mutant NAME)
    cmake_parse_arguments(A "" "FILE;TEXT" "REPLACE" ${ARGN})
    ep_plant_mutant(on_stream_${NAME} ${PROJECT_SOURCE_DIR}/client/${A_FILE} mutant "${A_REPLACE}")
    ep_add_plain_test(NAME integration.client.on_stream_mutant.${NAME} SOURCES on_stream.c ${mutant} LIBS ep_test_client ep_test_caller_device
        ARGS find ${EP_CANN_HOME} 24 "${A_TEXT}" LABELS turns TIMEOUT 300)
    set(target integration_client_on_stream_mutant_${NAME})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/client)
    target_compile_options(${target} PRIVATE -Wno-error -Wno-unused)
    add_dependencies(${target} ep_test_cann)
endfunction()

# Inputs are there when what is in front of the call in its stream has passed.
ep_add_on_stream_mutant(inputs_too_early FILE api/stream_call.c TEXT "scene: "
    REPLACE "aclrtStreamWaitEvent, s->stream, s->begun" "aclrtStreamWaitEvent, s->stream, s->taken")
# The result is there when the run has ended.
ep_add_on_stream_mutant(result_too_early FILE api/stream_call.c TEXT "scene: "
    REPLACE "EP_STAGE_CALL(stage, out_error, aclrtWaitAndResetNotify, s->ended, stream, 0)"
            "EP_STAGE_CALL(stage, out_error, aclrtWaitAndResetNotify, s->ended, s->stream, 0)")
# A result that was not taken yet is not written over.
ep_add_on_stream_mutant(result_written_over FILE api/stream_call.c TEXT "before the one in front of it was waited for"
    REPLACE "EP_STAGE_CALL(stage, out_error, aclrtStreamWaitEvent, s->stream, s->taken)" "EP_OK")
# Each wait gets its own run's notify: else a stream waits for ever, or for less than its run.
ep_add_on_stream_mutant(notify_of_another_run FILE api/stream_call.c
    REPLACE "EP_STAGE_CALL(stage, out_error, aclrtStreamWaitEvent, stream, s->taken)" "EP_OK")
ep_add_on_stream_mutant(notify_left FILE api/stream_call.c TEXT "before the one in front of it was waited for"
    REPLACE "(void)enqueue_wait(s, s->stream, NULL)" "(void)s")
# A copy that failed brought nothing.
ep_add_on_stream_mutant(failed_copy FILE api/stream_call.c TEXT "scene: "
    REPLACE "EP_STAGE_CALL(&s->stage, out_error, aclrtSynchronizeEventWithTimeout, s->copied, REPORT_MS)" "EP_OK")
# Nor did a run that failed.
ep_add_on_stream_mutant(old_rows FILE api/stream_call.c TEXT "are not NaN"
    REPLACE "0xff, s->tokens" "0xff, 0 * s->tokens")
# T9: each thread enters the context.
ep_add_on_stream_mutant(thread_without_context FILE common/device_stage.c
    REPLACE "*out_before == stage->context" "stage->context != NULL")
# T14: copies that do not wait want pinned memory.
ep_add_on_stream_mutant(pageable_stage FILE common/device_stage.c TEXT "pageable host memory"
    REPLACE "EP_STAGE_CALL(stage, out_error, aclrtMallocHost, &memory, bytes)" "((memory = malloc(bytes)) != NULL ? EP_OK : EP_ERR_NO_MEMORY)"
            "#include <pthread.h>" "#include <pthread.h>\n#include <stdlib.h>")
