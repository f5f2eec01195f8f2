// SPDX-License-Identifier: MIT
#include <bellows/fp8/recipe.hpp>

int main() {
    return bellows::fp8::quantized_bytes({}, {128, 256}) > 128 * 256 ? 0 : 1;
}
