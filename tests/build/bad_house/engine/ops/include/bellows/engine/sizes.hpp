// SPDX-License-Identifier: MIT
// A seeded fault for the test of check_arrows.cmake; never compiled.
#include <bellows/engine/device.hpp>
