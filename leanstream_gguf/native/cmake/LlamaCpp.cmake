# The patched llama.cpp as a subdirectory, and the rules that put its libraries into leanstream_gguf/lib.

set(LEANSTREAM_PIN "${LEANSTREAM_ROOT}/vendor/llama.cpp.toml")
file(STRINGS "${LEANSTREAM_PIN}" LEANSTREAM_COMMIT_LINE REGEX "^commit = ")
string(REGEX REPLACE "^commit = \"([0-9a-f]+)\".*" "\\1" LEANSTREAM_LLAMA_COMMIT "${LEANSTREAM_COMMIT_LINE}")

# Sources: fetched and patched when they are not up to date. A change of pin or series runs this again.
file(GLOB LEANSTREAM_PATCHES CONFIGURE_DEPENDS "${LEANSTREAM_ROOT}/patches/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${LEANSTREAM_PIN}" "${LEANSTREAM_ROOT}/patches/series" ${LEANSTREAM_PATCHES})
execute_process(
    COMMAND "${Python_EXECUTABLE}" "${LEANSTREAM_ROOT}/vendor/fetch.py"
    OUTPUT_VARIABLE LEANSTREAM_LLAMA_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE LEANSTREAM_FETCH_RESULT)
if(NOT LEANSTREAM_FETCH_RESULT EQUAL 0)
    message(FATAL_ERROR "vendor/fetch.py could not provide the llama.cpp sources; its message is above")
endif()

# Plain variables win over upstream's options of the same name (CMP0077).
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
set(BUILD_SHARED_LIBS ON)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP UI)
    set(LLAMA_BUILD_${part} OFF)
endforeach()
set(LLAMA_BUILD_MTMD ${LEANSTREAM_MTMD})
set(LLAMA_OPENSSL OFF)
set(LLAMA_BUILD_NUMBER 0)  # unknown: the archive has no history
string(SUBSTRING "${LEANSTREAM_LLAMA_COMMIT}" 0 9 LLAMA_BUILD_COMMIT)
if(APPLE)
    set(GGML_METAL_EMBED_LIBRARY ON)
endif()
add_subdirectory("${LEANSTREAM_LLAMA_DIR}" llama.cpp)

# Libraries are installed once, under the plain name: a wheel would hold each symbolic link as a full copy.
set(LEANSTREAM_BACKENDS amx blas cann cuda hip hexagon metal musa opencl openvino rpc sycl virtgpu vulkan webgpu zdnn zendnn)
list(TRANSFORM LEANSTREAM_BACKENDS PREPEND ggml-)

function(leanstream_install_library target)
    if(NOT TARGET ${target})
        return()
    endif()
    foreach(property VERSION SOVERSION PUBLIC_HEADER PRIVATE_HEADER)
        set_property(TARGET ${target} PROPERTY ${property})
    endforeach()
    set_property(TARGET ${target} PROPERTY INSTALL_RPATH "${LEANSTREAM_ORIGIN}")
    if(WIN32)
        set_property(TARGET ${target} PROPERTY WINDOWS_EXPORT_ALL_SYMBOLS ON)
    endif()
    install(TARGETS ${target}
        RUNTIME DESTINATION "${LEANSTREAM_INSTALL_DIR}/lib" COMPONENT leanstream
        LIBRARY DESTINATION "${LEANSTREAM_INSTALL_DIR}/lib" COMPONENT leanstream
        ARCHIVE DESTINATION "${LEANSTREAM_INSTALL_DIR}/lib" COMPONENT leanstream-dev)
endfunction()

foreach(target ggml-base ggml-cpu ggml llama mtmd ${LEANSTREAM_BACKENDS})
    leanstream_install_library(${target})
endforeach()
