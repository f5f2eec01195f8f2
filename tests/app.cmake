# SPDX-License-Identifier: MIT
bellows_test(NAME app_data_test SOURCES app_data_test.cpp LIBS bellows::app)
bellows_test(NAME app_safetensors_test SOURCES app_safetensors_test.cpp LIBS bellows::app)
bellows_test(NAME app_checkpoint_test SOURCES app_checkpoint_test.cpp LIBS bellows::app)
bellows_test(NAME app_metrics_test SOURCES app_metrics_test.cpp LIBS bellows::app)
find_library(BELLOWS_SENTENCEPIECE_TRAIN_LIBRARY sentencepiece_train REQUIRED)
mark_as_advanced(BELLOWS_SENTENCEPIECE_TRAIN_LIBRARY)
target_link_libraries(app_data_test PRIVATE "${BELLOWS_SENTENCEPIECE_TRAIN_LIBRARY}")
