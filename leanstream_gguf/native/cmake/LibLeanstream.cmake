# libleanstream: the streaming runtime, linked to the patched llama.cpp.

file(GLOB LEANSTREAM_SOURCES CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/src/*.cpp")
find_package(Threads REQUIRED)

add_library(leanstream_objects OBJECT ${LEANSTREAM_SOURCES})
set_target_properties(leanstream_objects PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(leanstream_objects
    PUBLIC  "${CMAKE_CURRENT_SOURCE_DIR}/include"
    PUBLIC  "${CMAKE_CURRENT_SOURCE_DIR}/src"
    # Internal headers (ggml-impl.h, ggml-backend-impl.h, ggml-cpu-impl.h, llama-ext.h): patches/README.md lists the uses.
    PUBLIC  "${LEANSTREAM_LLAMA_DIR}/src" "${LEANSTREAM_LLAMA_DIR}/ggml/src" "${LEANSTREAM_LLAMA_DIR}/ggml/src/ggml-cpu")
target_compile_definitions(leanstream_objects
    PRIVATE LS_BUILD "LS_LLAMA_COMMIT=\"${LEANSTREAM_LLAMA_COMMIT}\""
    # As ggml-cpu is compiled, so that internal headers and kernel choices agree with it.
    PRIVATE $<TARGET_PROPERTY:ggml-cpu,COMPILE_DEFINITIONS>)
target_compile_options(leanstream_objects
    PRIVATE $<TARGET_PROPERTY:ggml-cpu,COMPILE_OPTIONS>
    PRIVATE $<$<NOT:$<CXX_COMPILER_ID:MSVC>>:-Wall;-Wextra;-Wno-unused-parameter>
    PRIVATE $<$<CXX_COMPILER_ID:MSVC>:/utf-8;/EHsc>
    PUBLIC  ${LEANSTREAM_SANITIZE_FLAGS})
# Kernels for several instruction sets, chosen when the program runs (neuron_kernels.h).
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    if(MSVC)
        set(LEANSTREAM_AVX2_FLAGS /arch:AVX2)
        set(LEANSTREAM_AVX512_FLAGS /arch:AVX512)
    else()
        set(LEANSTREAM_AVX2_FLAGS -mavx2 -mfma -mf16c)
        set(LEANSTREAM_AVX512_FLAGS ${LEANSTREAM_AVX2_FLAGS} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
    endif()
    set(LEANSTREAM_VNNI_FLAGS ${LEANSTREAM_AVX512_FLAGS})
    if(NOT MSVC)
        list(APPEND LEANSTREAM_VNNI_FLAGS -mavx512vnni)
    endif()
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/src/repacked_kernels_avx512.cpp" PROPERTIES COMPILE_OPTIONS "${LEANSTREAM_VNNI_FLAGS}")
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/src/neuron_kernels_avx2.cpp" PROPERTIES COMPILE_OPTIONS "${LEANSTREAM_AVX2_FLAGS}")
    set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/src/neuron_kernels_avx512.cpp" PROPERTIES COMPILE_OPTIONS "${LEANSTREAM_AVX512_FLAGS}")
endif()
target_link_options(leanstream_objects PUBLIC ${LEANSTREAM_SANITIZE_FLAGS})
target_link_libraries(leanstream_objects PUBLIC llama ggml ggml-cpu ggml-base Threads::Threads)

if(LEANSTREAM_LIBURING AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    find_package(PkgConfig)
    if(PKG_CONFIG_FOUND)
        pkg_check_modules(LIBURING IMPORTED_TARGET liburing)
    endif()
    if(LIBURING_FOUND)
        target_compile_definitions(leanstream_objects PRIVATE LS_HAVE_LIBURING)
        target_link_libraries(leanstream_objects PUBLIC PkgConfig::LIBURING)
    else()
        message(STATUS "liburing not found: reads use a pool of threads")
    endif()
endif()

add_library(leanstream_internal STATIC $<TARGET_OBJECTS:leanstream_objects>)
target_link_libraries(leanstream_internal PUBLIC leanstream_objects)

add_library(leanstream SHARED $<TARGET_OBJECTS:leanstream_objects>)
target_include_directories(leanstream PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}/include")
target_link_libraries(leanstream PRIVATE leanstream_objects)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT LEANSTREAM_SANITIZE)
    target_link_options(leanstream PRIVATE -Wl,--no-undefined)  # not at import
endif()
leanstream_install_library(leanstream)
if(WIN32)
    set_property(TARGET leanstream PROPERTY WINDOWS_EXPORT_ALL_SYMBOLS OFF)  # LS_API says what is exported
endif()
