# cmake -DPYTHON=... -DSCRIPT=... -DFOLDER=... -DMODELS="a b" -P make_toys.cmake: writes the toy models. Without numpy it
# writes none, and the tests that want them are skipped.
execute_process(COMMAND "${PYTHON}" -c "import numpy" RESULT_VARIABLE result ERROR_VARIABLE reason)
if(NOT result EQUAL 0)
    message("no toy models: ${PYTHON} has no numpy: ${reason}")
    return()
endif()
separate_arguments(MODELS)
execute_process(COMMAND "${PYTHON}" "${SCRIPT}" "${FOLDER}" ${MODELS} COMMAND_ERROR_IS_FATAL ANY)
