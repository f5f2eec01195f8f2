# SPDX-License-Identifier: MIT
foreach(name reference_ops_test reference_moe_test reference_model_test)
    bellows_test(NAME ${name} SOURCES ${name}.cpp LIBS bellows_reference bellows::model)
endforeach()
