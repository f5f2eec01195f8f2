# SPDX-License-Identifier: MIT
foreach(area IN ITEMS collectives pipe)
    bellows_mpi_test(NAME comm_${area}_test LIBS bellows::comm RANKS 1 2 3 4 GPU
        SOURCES "${CMAKE_CURRENT_SOURCE_DIR}/comm_${area}_test.cpp"
            "${PROJECT_SOURCE_DIR}/tests/support/mpi_main.cpp")
endforeach()
