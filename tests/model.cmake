# SPDX-License-Identifier: MIT
bellows_test(NAME model_config_test SOURCES model_config_test.cpp LIBS bellows::model)
target_compile_definitions(model_config_test PRIVATE
    BELLOWS_PRESET_DIR="${PROJECT_SOURCE_DIR}/model/presets")
