# SPDX-License-Identifier: MIT
foreach(name reference_ops_test reference_moe_test)
    bellows_test(NAME ${name} SOURCES ${name}.cpp LIBS bellows_reference)
endforeach()
if(TARGET bellows_model)
    bellows_test(NAME reference_model_test SOURCES reference_model_test.cpp
        LIBS bellows_reference bellows::model)
endif()
