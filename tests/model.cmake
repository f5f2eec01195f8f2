# SPDX-License-Identifier: MIT
if(NOT TARGET bellows_model)
    return()
endif()
bellows_test(NAME model_config_test SOURCES model_config_test.cpp LIBS bellows::model)
bellows_test(NAME model_layers_test SOURCES model_layers_test.cpp model_dense_test.cpp
    LIBS bellows::model bellows_reference GPU)
