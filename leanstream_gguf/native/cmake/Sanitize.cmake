# LEANSTREAM_SANITIZE=address|thread. ggml is instrumented too: its thread pool hands our code from thread to thread, and
# a race detector that cannot see those hand-overs reports races that are none. For the same reason no libgomp.
set_property(CACHE LEANSTREAM_SANITIZE PROPERTY STRINGS "" address thread)
set(LEANSTREAM_SANITIZE_FLAGS "")
if(LEANSTREAM_SANITIZE STREQUAL "address")
    set(GGML_SANITIZE_ADDRESS ON CACHE BOOL "" FORCE)
    set(LEANSTREAM_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
elseif(LEANSTREAM_SANITIZE STREQUAL "thread")
    set(GGML_SANITIZE_THREAD ON CACHE BOOL "" FORCE)
    set(LEANSTREAM_SANITIZE_FLAGS -fsanitize=thread)
elseif(LEANSTREAM_SANITIZE)
    message(FATAL_ERROR "LEANSTREAM_SANITIZE must be address, thread or empty, not ${LEANSTREAM_SANITIZE}")
endif()
if(LEANSTREAM_SANITIZE)
    set(GGML_OPENMP OFF CACHE BOOL "" FORCE)
    set(LEANSTREAM_PYTHON OFF)  # an instrumented library cannot be loaded into a plain interpreter
    set(LEANSTREAM_MTMD OFF)
    list(APPEND LEANSTREAM_SANITIZE_FLAGS -g -O1)
endif()
