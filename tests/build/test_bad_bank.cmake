# SPDX-License-Identifier: MIT
# The shader bank refuses kernels that access what their manifest does not declare.
#   cmake -DBANK=<program> -DGLSLC=<command;line> -DSOURCE=bad_bank -DWORK=... -P ...
cmake_minimum_required(VERSION 3.25)

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status ERROR_VARIABLE error
        OUTPUT_VARIABLE error)
    set(status "${status}" PARENT_SCOPE)
    set(error "${error}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
file(MAKE_DIRECTORY "${WORK}/spirv")
file(WRITE "${WORK}/unbuilt.txt" "")
run("${BANK}" bindings "${SOURCE}/manifest.json" "${WORK}")
if(NOT status EQUAL 0)
    message(FATAL_ERROR "bindings: ${error}")
endif()
foreach(variant honest stores_by_cast loads_by_cast stores_by_selection stores_anywhere)
    string(REGEX REPLACE "^(store|load)s" "\\1" define "${variant}")
    string(TOUPPER "${define}" define)
    run(${GLSLC} "-D${define}=1" "-I${WORK}/glsl" "${SOURCE}/cheats.comp"
        -o "${WORK}/spirv/cheats.${variant}.spv")
    if(NOT status EQUAL 0)
        message(FATAL_ERROR "${variant}: ${error}")
    endif()
endforeach()
run("${BANK}" embed "${SOURCE}/manifest.json" "${WORK}")
message("${error}")
if(status EQUAL 0 OR EXISTS "${WORK}/bank.cpp")
    message(FATAL_ERROR "the bank took kernels that break their declared accesses")
endif()
foreach(expected
        "'stores_by_cast': operand 'source' is declared read, and a store can reach it"
        "'loads_by_cast': operand 'destination' is declared write, and a load can reach it"
        "'stores_by_selection': operand 'source' is declared read, and a store can reach it"
        "'stores_anywhere': stores through an address that comes from no operand")
    string(FIND "${error}" "${expected}" at)
    if(at EQUAL -1)
        message(FATAL_ERROR "not found: ${expected}")
    endif()
endforeach()
if(error MATCHES "'honest'")
    message(FATAL_ERROR "the honest variant was refused")
endif()
