// SPDX-License-Identifier: MIT
// What the seeded faults of this house include; never compiled.
#pragma once
