// SPDX-License-Identifier: MIT
// Keeps every arrow; its house has no schedules. Never compiled.
#include <cstdint>
