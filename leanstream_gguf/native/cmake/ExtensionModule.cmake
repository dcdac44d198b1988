# leanstream_gguf._leanstream: cffi's C source, generated from leanstream.h and compiled against it (API mode), so that
# enum values and struct layouts are the compiler's.
set(LEANSTREAM_CFFI_BUILD "${LEANSTREAM_ROOT}/leanstream_gguf/_cffi_build.py")
set(LEANSTREAM_HEADER "${CMAKE_CURRENT_SOURCE_DIR}/include/leanstream.h")
set(LEANSTREAM_CFFI_SOURCE "${CMAKE_CURRENT_BINARY_DIR}/_leanstream.c")

add_custom_command(
    OUTPUT "${LEANSTREAM_CFFI_SOURCE}"
    COMMAND "${Python_EXECUTABLE}" "${LEANSTREAM_CFFI_BUILD}" "${LEANSTREAM_HEADER}" "${LEANSTREAM_CFFI_SOURCE}"
    DEPENDS "${LEANSTREAM_CFFI_BUILD}" "${LEANSTREAM_HEADER}"
    VERBATIM)
python_add_library(_leanstream MODULE WITH_SOABI "${LEANSTREAM_CFFI_SOURCE}")
target_link_libraries(_leanstream PRIVATE leanstream)
set_target_properties(_leanstream PROPERTIES INSTALL_RPATH "${LEANSTREAM_ORIGIN}/lib")
install(TARGETS _leanstream
    LIBRARY DESTINATION "${LEANSTREAM_INSTALL_DIR}" COMPONENT leanstream
    RUNTIME DESTINATION "${LEANSTREAM_INSTALL_DIR}" COMPONENT leanstream)
