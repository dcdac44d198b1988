# Compile through ccache where there is one. ccache does not look behind -march=native, so the cache is split by
# processor; paths under the repository are hashed relative, so that a clone in another folder hits too.
option(LEANSTREAM_CCACHE "use ccache if it is found" ON)
find_program(LEANSTREAM_CCACHE_PROGRAM ccache)
mark_as_advanced(LEANSTREAM_CCACHE_PROGRAM)

if(LEANSTREAM_CCACHE AND LEANSTREAM_CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    cmake_host_system_information(RESULT LEANSTREAM_CPU QUERY PROCESSOR_DESCRIPTION)
    if(EXISTS /proc/cpuinfo)
        file(STRINGS /proc/cpuinfo LEANSTREAM_CPU_FLAGS REGEX "^(flags|Features|model)[ \t]*:" LIMIT_COUNT 2)
        string(APPEND LEANSTREAM_CPU "${LEANSTREAM_CPU_FLAGS}")
    endif()
    string(SHA256 LEANSTREAM_CPU_HASH "${LEANSTREAM_CPU}")
    string(SUBSTRING "${LEANSTREAM_CPU_HASH}" 0 12 LEANSTREAM_CPU_HASH)
    set(LEANSTREAM_LAUNCHER "${CMAKE_COMMAND}" -E env
        "CCACHE_BASEDIR=${LEANSTREAM_ROOT}" CCACHE_NOHASHDIR=1 "CCACHE_NAMESPACE=leanstream-${LEANSTREAM_CPU_HASH}"
        "${LEANSTREAM_CCACHE_PROGRAM}")
    foreach(language C CXX CUDA)
        set(CMAKE_${language}_COMPILER_LAUNCHER "${LEANSTREAM_LAUNCHER}")
    endforeach()
    message(STATUS "ccache: ${LEANSTREAM_CCACHE_PROGRAM}, namespace leanstream-${LEANSTREAM_CPU_HASH}")
endif()
