# SPDX-License-Identifier: MIT
foreach(name IN ITEMS checkpoint config data metrics safetensors sampling)
    bellows_test(NAME app_${name}_test SOURCES app_${name}_test.cpp LIBS bellows::app)
endforeach()
# Tests that train a small sentencepiece model, and that start ranks.
find_library(BELLOWS_SENTENCEPIECE_TRAIN_LIBRARY sentencepiece_train REQUIRED)
mark_as_advanced(BELLOWS_SENTENCEPIECE_TRAIN_LIBRARY)
target_link_libraries(app_data_test PRIVATE "${BELLOWS_SENTENCEPIECE_TRAIN_LIBRARY}")
bellows_test(NAME app_command_line_test SOURCES app_command_line_test.cpp LIBS bellows::app
    LABELS mpi ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)

# The reference implementation of safetensors, where there is one: -DBELLOWS_TEST_PYTHON= names a
# Python that has it.
find_program(BELLOWS_TEST_PYTHON NAMES python3 PATHS "${BELLOWS_TOOLCHAIN}/bin" NO_DEFAULT_PATH)
find_program(BELLOWS_TEST_PYTHON NAMES python3 DOC "Python with safetensors and numpy, for a test")
if(BELLOWS_TEST_PYTHON)
    execute_process(COMMAND "${BELLOWS_TEST_PYTHON}" -c "import safetensors.numpy"
        RESULT_VARIABLE without_safetensors OUTPUT_QUIET ERROR_QUIET)
    if(without_safetensors)
        message(STATUS "no test against the reference safetensors: ${BELLOWS_TEST_PYTHON} lacks it")
    else()
        bellows_test(NAME app_safetensors_reference_test
            SOURCES app_safetensors_reference_test.cpp LIBS bellows::app)
        target_compile_definitions(app_safetensors_reference_test PRIVATE
            BELLOWS_TEST_PYTHON="${BELLOWS_TEST_PYTHON}"
            BELLOWS_TEST_SCRIPT="${CMAKE_CURRENT_LIST_DIR}/app_safetensors_reference.py")
    endif()
endif()
